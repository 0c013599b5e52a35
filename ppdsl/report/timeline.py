"""A step as a Gantt chart in the terminal: predicted, measured, or one above the other.

One row for each rank, one letter for each kind of action, the micro-batch's number where there is room::

    rank 0 │F0F1B0══B1══│
    rank 1 │··F0F1B0══B1│
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from ppdsl.report.chart import ASCII, UNICODE, Chart, Glyphs, draw_chart
from ppdsl.report.palette import AXIS, IDLE, LABEL, TITLE, action_style, blend_style, rank_color
from ppdsl.report.scale import FOLD_COLUMNS, Scale, Segment, choose_scale
from ppdsl.schedule.action import ActionKind
from ppdsl.timeline import Timeline
from ppdsl.units import format_seconds

__all__ = ["format_time", "render_comparison", "render_timeline"]

_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}
_TAIL = 6  # "│100 %"
_LEAST_COLUMNS = 10


def render_timeline(
    timeline: Timeline,
    *,
    width: int = 80,
    title: str = "",
    unit: str | None = None,
    bound: float | None = None,
    peaks: Sequence[int] | None = None,
    ascii_only: bool = False,
) -> Text:
    """Draw one timeline with its axis, legend and figures.

    Args:
        timeline: What is drawn.
        width: Columns; no line is longer, and the chart's rows are exactly as long.
        title: Said above the chart.
        unit: What times are counted in (`F`: forwards of one stage); None for seconds.
        bound: Lower bound of the makespan, in seconds (or `unit`).
        peaks: For each rank the most micro-batches whose activations it holds at once.
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
    lines = [*_chart_lines(timeline, width, title, unit, ascii_only=ascii_only)]
    lines += ["", *_figures(timeline, width, unit, bound, peaks)]
    return _join(lines)


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
    span = max(predicted.makespan, measured.makespan)
    lines: list[Text | str] = []
    for timeline in (predicted, measured):
        lines += _chart_lines(
            timeline, width, title, None, ascii_only=ascii_only, span=span, legend=timeline is measured
        )
        lines.append("")
    return _join([*lines, *_differences(predicted, measured)])


def format_time(value: float, unit: str | None = None) -> str:
    """Return a time in seconds, or in the unit it is counted in.

    >>> format_time(0.0125), format_time(33, "F"), format_time(7.5, "F")
    ('12.5 ms', '33 F', '7.5 F')
    """
    return format_seconds(value) if unit is None else f"{value:.4g} {unit}"


def _join(lines: Iterable[Text | str]) -> Text:
    texts = [Text(line) if isinstance(line, str) else line for line in lines]
    for text in texts:
        text.rstrip()
    return Text("\n", no_wrap=True, overflow="crop").join(texts)


def _chart_lines(
    timeline: Timeline,
    width: int,
    title: str,
    unit: str | None,
    *,
    ascii_only: bool,
    span: float | None = None,
    legend: bool = True,
) -> list[Text | str]:
    glyphs = ASCII if ascii_only else UNICODE
    grouped = math.ceil(timeline.ranks / 64) > 1
    last = max(timeline.ranks - 1, 0)
    margin = len(f"ranks {last}-{last} " if grouped else f"rank {last} ")
    columns = max(_LEAST_COLUMNS, width - margin - 1 - _TAIL)
    chart = draw_chart(timeline, _scale(timeline, columns, span), glyphs)
    lines: list[Text | str] = [_title_line(timeline, title, width)]
    lines += _rows(timeline, chart, margin, columns, glyphs)
    lines += _axis(chart.scale, timeline, margin, columns, unit, glyphs, span)
    if legend:
        lines += ["", *_legend(timeline, chart, width, unit, glyphs)]
    return lines


def _scale(timeline: Timeline, columns: int, span: float | None) -> Scale:
    if span is not None:
        start = min((e.start for e in timeline.events), default=0.0)
        return Scale((Segment(start, start + span, 0, columns),), (), columns)
    highest = max((e.action.microbatch for e in timeline.events), default=0)
    return choose_scale(timeline, columns, label_columns=1 + len(str(highest)))


def _title_line(timeline: Timeline, title: str, width: int) -> Text:
    kind = "measured" if timeline.measured else "predicted"
    room = width - len(kind) - 1
    left = title if cell_len(title) <= room else set_cell_size(title, max(room - 1, 0)) + "…"
    return Text.assemble((left, TITLE), " " * (width - cell_len(left) - len(kind)), (kind, AXIS))


def _rows(timeline: Timeline, chart: Chart, margin: int, columns: int, glyphs: Glyphs) -> Iterable[Text]:
    span, used = timeline.makespan, timeline.busy
    for ranks, pieces in zip(chart.ranks, chart.rows, strict=True):
        name = f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"
        row = Text(no_wrap=True)
        row.append(name.ljust(margin), Style(color=rank_color(ranks.start)))
        row.append(glyphs.wall, AXIS)
        for piece in pieces:
            row.append(piece.label, piece.style)
            row.append(piece.fill, piece.fill_style)
        row.append(" " * (columns - chart.scale.columns))
        row.append(glyphs.wall, AXIS)
        busy = sum(used[r] for r in ranks) / len(ranks)
        row.append(f"{100 * busy / span if span else 0:3.0f} %")
        yield row


def _axis(
    scale: Scale, timeline: Timeline, margin: int, columns: int, unit: str | None, glyphs: Glyphs, span: float | None
) -> list[Text]:
    """Return the line under the rows and the numbers under it."""
    start = min((e.start for e in timeline.events), default=0.0)
    total = timeline.makespan if span is None else span
    factor, suffix = _axis_unit(total, unit)
    line = [glyphs.line] * columns
    numbers = [" "] * (columns + _TAIL)
    last = f"{total * factor:.4g} {suffix}"
    end = scale.columns
    _write(numbers, min(end - len(last) // 2, columns + _TAIL - len(last)), last)
    for value in _ticks(total * factor, scale, columns):
        place = scale.column(start + value / factor)
        text = f"{value:.6g}"
        if place is None or not _free(numbers, round(place), len(text)):
            continue
        line[min(round(place), columns - 1)] = glyphs.tick
        _write(numbers, round(place), text)
    for fold in scale.folds:
        line[fold.column : fold.column + FOLD_COLUMNS] = glyphs.fold
    if end < columns:
        line[end] = glyphs.tick
    rule = " " * margin + glyphs.corner + "".join(line) + glyphs.end
    return [Text(rule, style=AXIS, no_wrap=True), Text(" " * (margin + 1) + "".join(numbers), style=AXIS, no_wrap=True)]


def _write(cells: list[str], column: int, text: str) -> None:
    cells[column : column + len(text)] = text


def _free(cells: Sequence[str], column: int, length: int) -> bool:
    return column + length < len(cells) and not "".join(cells[max(column - 2, 0) : column + length + 2]).strip()


def _axis_unit(total: float, unit: str | None) -> tuple[float, str]:
    if unit is not None:
        return 1.0, unit
    if total < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if total < 1 else (1.0, "s")


def _ticks(total: float, scale: Scale, columns: int) -> list[float]:
    """Return round numbers, at least ten columns apart."""
    if total <= 0:
        return []
    shown = sum(s.end - s.start for s in scale.segments)
    whole = scale.segments[-1].end - scale.segments[0].start
    rough = total * (shown / whole if whole else 1.0) / max(1, columns // 10)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(total / step) + 1)]


def _legend(timeline: Timeline, chart: Chart, width: int, unit: str | None, glyphs: Glyphs) -> list[Text | str]:
    kinds = sorted({e.action.kind for e in timeline.events}, key=list(ActionKind).index)
    entries = [Text.assemble((kind.value, action_style(kind)[0]), f" {_NAMES[kind]}") for kind in kinds]
    if chart.dense:
        mixed = blend_style({kind: 1 / len(kinds) for kind in kinds})[0]
        entries.append(Text.assemble((glyphs.shades, mixed), " several kinds, by time in use"))
        entries.append(Text("lower case: used less than half"))
    elif any(len(p.label) > 1 for row in chart.rows for p in row):
        entries.append(Text("numbers: micro-batches"))
    entries.append(Text.assemble((glyphs.idle, IDLE), " idle"))
    entries.append(Text("%: time in use"))
    if unit == "F":
        entries.append(Text(f"1 {unit}: one forward of one stage"))
    if chart.chunks > 1 and not chart.dense:
        more = "second stage" if chart.chunks == 2 else "2nd, 4th, ... stage"
        entries.append(Text(f"lower case: a rank's {more}"))
    return [*_flow(entries, width), *_notes(timeline, chart, width, unit, glyphs), *_stage_lines(timeline, width)]


def _notes(timeline: Timeline, chart: Chart, width: int, unit: str | None, glyphs: Glyphs) -> list[Text | str]:
    """Say what the drawing leaves out."""
    notes = [
        Text(f"{fold.periods} equal periods of {format_time(fold.period, unit)} are left out at {glyphs.fold.strip()}")
        for fold in chart.scale.folds
    ]
    if chart.folded:
        notes.append(Text(f"{chart.folded} actions are in the folds"))
    if chart.hidden:
        are = "action is" if chart.hidden == 1 else "actions are"
        notes.append(Text(f"{chart.hidden} {are} shorter than a column and not drawn"))
    if chart.dense:
        each = format_time(timeline.makespan / chart.scale.columns, unit)
        notes.append(Text(f"{len(timeline.events)} actions; a column is {each} and shows what takes most of it"))
    return [*_flow(notes, width)]


def _stage_lines(timeline: Timeline, width: int) -> list[Text | str]:
    """Say which stages a rank has, when its number does not say it."""
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        stages.setdefault(event.rank, set()).add(event.action.stage)
    plain = all(found == {rank} and _stage_name(timeline, rank) == str(rank) for rank, found in stages.items())
    if plain or len(stages) > 16:
        return []
    entries = [Text("stages")]
    for rank, found in sorted(stages.items()):
        names = " ".join(_stage_name(timeline, s) for s in sorted(found))
        entries.append(Text.assemble((f"rank {rank}:", Style(color=rank_color(rank))), f" {names}"))
    return [*_flow(entries, width)]


def _stage_name(timeline: Timeline, stage: int) -> str:
    label = timeline.stage_labels[stage] if stage < len(timeline.stage_labels) else str(stage)
    return label if label == str(stage) else f"{stage}={label}"


def _flow(entries: Sequence[Text], width: int) -> Iterable[Text]:
    """Set entries side by side, three columns apart, in as few lines as fit."""
    line = Text(no_wrap=True)
    for entry in entries:
        if line and cell_len(line.plain) + 3 + cell_len(entry.plain) > width:
            yield line
            line = Text(no_wrap=True)
        if line:
            line.append("   ")
        entry.truncate(width, overflow="ellipsis")
        line.append_text(entry)
    if line:
        yield line


def _figures(
    timeline: Timeline, width: int, unit: str | None, bound: float | None, peaks: Sequence[int] | None
) -> Iterable[Text]:
    span = timeline.makespan
    entries = [
        Text.assemble("makespan ", (format_time(span, unit), LABEL)),
        Text.assemble("bubble ", (f"{100 * timeline.bubble:.1f} %", LABEL)),
    ]
    if bound is not None and span:
        share = 100 * min(1.0, bound / span)
        entries.append(Text.assemble((f"{share:.3g} %", LABEL), f" of the lower bound {format_time(bound, unit)}"))
    if peaks:
        same = len(set(peaks)) == 1
        held = f"{peaks[0]} on each rank" if same else f"{max(peaks)} (rank {list(peaks).index(max(peaks))})"
        entries.append(Text.assemble("most activations held ", (held, LABEL)))
    return _flow(entries, width)


def _differences(predicted: Timeline, measured: Timeline) -> list[Text | str]:
    """Return a small table: mean time of each kind, makespan and bubble, predicted and measured."""
    rows: list[tuple[str, str, str, str]] = [("", "predicted", "measured", "difference")]
    for kind in ActionKind:
        first, second = (_durations(t, kind) for t in (predicted, measured))
        if first and second:
            a, b = sum(first) / len(first), sum(second) / len(second)
            rows.append((f"{kind.value} {_NAMES[kind]}, mean", format_time(a), format_time(b), _change(a, b)))
    a, b = predicted.makespan, measured.makespan
    rows.append(("makespan", format_time(a), format_time(b), _change(a, b)))
    a, b = 100 * predicted.bubble, 100 * measured.bubble
    rows.append(("bubble", f"{a:.1f} %", f"{b:.1f} %", f"{_signed(b - a)} points"))
    first_column = max(len(row[0]) for row in rows)
    return [
        Text.assemble((f"{name:{first_column}} {a:>11} {b:>11} {c:>13}", LABEL if position == 0 else ""))
        for position, (name, a, b, c) in enumerate(rows)
    ]


def _durations(timeline: Timeline, kind: ActionKind) -> list[float]:
    return [e.end - e.start for e in timeline.events if e.action.kind is kind]


def _change(before: float, after: float) -> str:
    return f"{_signed(100 * (after / before - 1))} %" if before else "-"


def _signed(number: float) -> str:
    """Return a number with its sign and one digit; zero is `0.0`, whichever side it came from."""
    rounded = round(number, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"
