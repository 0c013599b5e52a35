"""A step as a Gantt chart in the terminal: predicted, measured, or one above the other.

One row for each rank, one letter for each kind of action, the micro-batch's number where there is room::

    rank 0 │F0F1B0══B1══│
    rank 1 │··F0F1B0══B1│
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from ppdsl.report.axis import draw_axis
from ppdsl.report.chart import ASCII, UNICODE, Chart, Glyphs, draw_chart
from ppdsl.report.figures import Figures, draw_differences, draw_figures, format_time
from ppdsl.report.legend import draw_legend
from ppdsl.report.palette import AXIS, TITLE, rank_color
from ppdsl.report.scale import Scale, Segment, choose_scale
from ppdsl.report.sends import SendRow, draw_sends
from ppdsl.report.wrapping import wrap_scales
from ppdsl.simulation.transfers import Transfer
from ppdsl.timeline import Timeline

__all__ = ["format_time", "render_comparison", "render_timeline"]

_TAIL = 6  # "│100 %"
_LEAST_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class _Sheet:
    """What all lines of a drawing share.

    Attributes:
        width: Columns of a line.
        unit: What times are counted in; None for seconds.
        glyphs: Characters to draw with.
        ranks: Ranks to draw; None: all.
        messages: Messages to draw.
        wrap: Whether to go on in a line below rather than to leave labels or actions out.
    """

    width: int
    unit: str | None
    glyphs: Glyphs
    ranks: Sequence[int] | None = None
    messages: Sequence[Transfer] | None = None
    wrap: bool = False


def render_timeline(
    timeline: Timeline,
    *,
    width: int = 80,
    title: str = "",
    unit: str | None = None,
    bound: float | None = None,
    period: float | None = None,
    peaks: Sequence[int] | None = None,
    peak_bytes: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    messages: Sequence[Transfer] | None = None,
    wrap: bool = False,
    ascii_only: bool = False,
) -> Text:
    """Draw one timeline with its axis, legend and figures.

    Args:
        timeline: What is drawn.
        width: Columns; no line is longer, and the chart's rows are exactly as long.
        title: Said above the chart.
        unit: What times are counted in (`F`: forwards of one stage); None for seconds.
        bound: Lower bound of the makespan, in seconds (or `unit`).
        period: Length of a step when steps follow each other without a barrier.
        peaks: For each rank the most micro-batches whose activations it holds at once.
        peak_bytes: For each rank the most bytes of its stages' inputs and outputs it holds, when sizes are known.
        ranks: Ranks to draw, ascending; None: all.
        messages: Messages to draw under the ranks that send them, sorted by start.
        wrap: Whether to go on in a line below, as music does, rather than to leave labels or actions out. Times
            without a common quantum, such as measured ones, stay on one line.
        ascii_only: Whether to draw without box characters.

    Returns:
        Coloured text whose `plain` form says the same.

    >>> from ppdsl.schedule.action import parse_action
    >>> from ppdsl.timeline import Event
    >>> events = (Event(0, parse_action("0F0"), 0.0, 1.0), Event(1, parse_action("1F0"), 1.0, 2.0))
    >>> for line in render_timeline(Timeline(events, ranks=2), width=40, unit="F").plain.splitlines()[1:3]:
    ...     print(line)
    rank 0 │F0───────────·············│ 50 %
    rank 1 │·············F0───────────│ 50 %
    """
    sheet = _Sheet(width, unit, ASCII if ascii_only else UNICODE, ranks, messages, wrap)
    lines = _chart_lines(timeline, sheet, title)
    figures = Figures(bound, period, peaks or (), peak_bytes or ())
    return _join([*lines, Text(), *draw_figures(timeline, figures, width, unit)], ascii_only=ascii_only)


def render_comparison(
    predicted: Timeline, measured: Timeline, *, width: int = 80, title: str = "", ascii_only: bool = False
) -> Text:
    """Draw a predicted and a measured timeline on one scale, with the difference for each kind of action.

    Args:
        predicted: From the simulator, in seconds.
        measured: From a real step, in seconds.
        width: Columns; no line is longer.
        title: Said above the charts.
        ascii_only: Whether to draw without box characters.
    """
    sheet = _Sheet(width, None, ASCII if ascii_only else UNICODE)
    span = max(predicted.makespan, measured.makespan)
    lines: list[Text] = []
    for timeline in (predicted, measured):
        lines += [*_chart_lines(timeline, sheet, title, span=span, legend=timeline is measured), Text()]
    return _join([*lines, *draw_differences(predicted, measured)], ascii_only=ascii_only)


def _join(lines: Iterable[Text], *, ascii_only: bool) -> Text:
    texts = list(lines)
    for text in texts:
        text.rstrip()
        if ascii_only:
            text.plain = text.plain.replace("…", "~")
    return Text("\n", no_wrap=True, overflow="crop").join(texts)


def _chart_lines(
    timeline: Timeline, sheet: _Sheet, title: str, *, span: float | None = None, legend: bool = True
) -> list[Text]:
    margin = _margin(timeline, sheet)
    columns = max(_LEAST_COLUMNS, sheet.width - margin - 1 - _TAIL)
    start = min((e.start for e in timeline.events), default=0.0)
    total = timeline.makespan if span is None else span
    lines = [_title_line(timeline, title, sheet.width)]
    charts: list[Chart] = []
    sent: list[SendRow] = []
    scales = _scales(timeline, columns, span, wrap=sheet.wrap)
    for scale in scales:
        chart = draw_chart(timeline, scale, sheet.glyphs, ranks=sheet.ranks, full=None if len(scales) == 1 else False)
        sends = _sends(chart, sheet)
        lines += _rows(timeline, chart, sends, sheet, margin, columns)
        tail = columns - scale.columns + _TAIL
        lines += draw_axis(scale, start, total, margin=margin, tail=tail, unit=sheet.unit, glyphs=sheet.glyphs)
        charts.append(chart)
        sent += sends.values()
    if legend:
        whole = replace(charts[0], hidden=sum(chart.hidden for chart in charts))
        lines += [Text(), *draw_legend(timeline, whole, sent, sheet.width, sheet.unit, sheet.glyphs)]
    return lines


def _margin(timeline: Timeline, sheet: _Sheet) -> int:
    """Return the columns in front of the rows."""
    shown = range(timeline.ranks) if sheet.ranks is None else sheet.ranks
    last = max(shown, default=0)
    return len(f"ranks {last}-{last} " if len(shown) > 64 else f"rank {last} ")


def _scales(timeline: Timeline, columns: int, span: float | None, *, wrap: bool) -> Sequence[Scale]:
    """Return the scale of each line of the chart; one unless it goes on below."""
    if span is not None:
        start = min((e.start for e in timeline.events), default=0.0)
        return [Scale((Segment(start, start + span, 0, columns),), (), columns)]
    labels = 1 + len(str(max((e.action.microbatch for e in timeline.events), default=0)))
    wrapped = wrap_scales(timeline, columns, label_columns=labels) if wrap else ()
    return wrapped or [choose_scale(timeline, columns, label_columns=labels)]


def _sends(chart: Chart, sheet: _Sheet) -> Mapping[int, SendRow]:
    """Return the lines of messages by the rank that sends them."""
    if sheet.messages is None or chart.dense:
        return {}
    sent: dict[int, list[Transfer]] = {ranks.start: [] for ranks in chart.ranks}
    for message in sheet.messages:
        if message.source in sent:
            sent[message.source].append(message)
    return {rank: draw_sends(found, chart.scale, sheet.glyphs) for rank, found in sent.items()}


def _title_line(timeline: Timeline, title: str, width: int) -> Text:
    kind = "measured" if timeline.measured else "predicted"
    room = width - len(kind) - 1
    left = title if cell_len(title) <= room else set_cell_size(title, max(room - 1, 0)) + "…"
    return Text.assemble((left, TITLE), " " * (width - cell_len(left) - len(kind)), (kind, AXIS))


def _rows(
    timeline: Timeline, chart: Chart, sends: Mapping[int, SendRow], sheet: _Sheet, margin: int, columns: int
) -> Iterable[Text]:
    span, used, glyphs = timeline.makespan, timeline.busy, sheet.glyphs
    blank = " " * (columns - chart.scale.columns)
    after = chart.ranks[0].start if chart.ranks else 0
    for ranks, pieces in zip(chart.ranks, chart.rows, strict=True):
        if ranks.start != after:
            yield Text(glyphs.gap.rjust(margin - 1), style=AXIS, no_wrap=True)
        after = ranks.stop
        name = f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"
        row = Text(no_wrap=True)
        row.append(name.ljust(margin), Style(color=rank_color(ranks.start)))
        row.append(glyphs.wall, AXIS)
        for piece in pieces:
            row.append(piece.label, piece.style)
            row.append(piece.fill, piece.fill_style)
        row.append(glyphs.wall, AXIS)
        busy = sum(used[r] for r in ranks) / len(ranks)
        row.append(f"{blank}{100 * busy / span if span else 0:3.0f} %")
        yield row
        if ranks.start in sends:
            yield _send_line(sends[ranks.start], glyphs, margin)


def _send_line(sent: SendRow, glyphs: Glyphs, margin: int) -> Text:
    row = Text(no_wrap=True)
    row.append("sends ".rjust(margin), AXIS)
    row.append(glyphs.wall, AXIS)
    for character, style in sent.cells:
        row.append(character, style)
    row.append(glyphs.wall, AXIS)
    return row
