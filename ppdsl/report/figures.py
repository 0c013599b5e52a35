"""The figures under a Gantt chart, and the differences between a predicted and a measured step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.cells import cell_len
from rich.text import Text

from ppdsl.report.palette import LABEL
from ppdsl.schedule.action import ActionKind
from ppdsl.timeline import Timeline
from ppdsl.units import format_bytes, format_seconds

__all__ = ["KIND_NAMES", "Figures", "draw_differences", "draw_figures", "flow_text", "format_time", "four_digits"]

KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}
_MOST_PEAKS = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a step beside its timeline.

    Attributes:
        bound: Lower bound of the makespan, in seconds or the unit.
        period: Length of a step when steps follow each other without a barrier.
        peaks: For each rank the most activations it holds at once.
        peak_bytes: For each rank the most bytes of its stages' inputs and outputs it holds, when sizes are known.
    """

    bound: float | None = None
    period: float | None = None
    peaks: Sequence[int] = ()
    peak_bytes: Sequence[int] = ()


def format_time(value: float, unit: str | None = None) -> str:
    """Return a time in seconds, or in the unit it is counted in.

    >>> format_time(0.0125), format_time(33, "F"), format_time(7.5, "F"), format_time(12_480.5, "F")
    ('12.5 ms', '33 F', '7.5 F', '12480 F')
    """
    return format_seconds(value) if unit is None else f"{four_digits(value)} {unit}"


def four_digits(value: float) -> str:
    """Return a number with up to four significant digits, and never with an exponent when it is large.

    >>> four_digits(0.123456), four_digits(1725.0), four_digits(524_288.4)
    ('0.1235', '1725', '524288')
    """
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def flow_text(entries: Sequence[Text], width: int) -> Iterable[Text]:
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


def draw_figures(timeline: Timeline, figures: Figures, width: int, unit: str | None) -> Iterable[Text]:
    """Return makespan, bubble, distance from the bound, period and peaks, in as few lines as fit."""
    span = timeline.makespan
    entries = [
        Text.assemble("makespan ", (format_time(span, unit), LABEL)),
        Text.assemble("bubble ", (f"{100 * timeline.bubble:.1f} %", LABEL)),
    ]
    if figures.bound is not None and span:
        share = 100 * min(1.0, figures.bound / span)
        bound = f" of the lower bound {format_time(figures.bound, unit)}"
        entries.append(Text.assemble((f"{share:.3g} %", LABEL), bound))
    yield from flow_text(entries, width)
    if figures.period is not None:
        yield from flow_text(list(_period(timeline, figures.period, unit)), width)
    yield from flow_text(list(_peaks("most activations held ", figures.peaks, str)), width)
    yield from flow_text(list(_peaks("stages' inputs and outputs at most ", figures.peak_bytes, format_bytes)), width)


def _period(timeline: Timeline, period: float, unit: str | None) -> Iterable[Text]:
    busy = sum(timeline.busy) / max(1, timeline.ranks)
    share = 100 * max(0.0, 1 - busy / period) if period else 0.0
    yield Text.assemble("without a barrier between steps: period ", (format_time(period, unit), LABEL))
    yield Text.assemble("bubble ", (f"{share:.1f} %", LABEL))


def _peaks(name: str, peaks: Sequence[int], write: Callable[[int], str]) -> Iterable[Text]:
    if not peaks:
        return
    most = max(peaks)
    if len(set(peaks)) == 1:
        yield Text.assemble(name, (f"{write(most)} on each rank", LABEL))
        return
    yield Text.assemble(name, (f"{write(most)} (rank {list(peaks).index(most)})", LABEL))
    if len(peaks) <= _MOST_PEAKS:
        yield Text(f"by rank: {', '.join(map(write, peaks))}")


def draw_differences(predicted: Timeline, measured: Timeline) -> list[Text]:
    """Return a small table: times of each kind, makespan and bubble, predicted, measured, and how far apart."""
    rows: list[tuple[str, str, str, str]] = [("", "predicted", "measured", "difference")]
    for kind in ActionKind:
        first, second = (_durations(timeline, kind) for timeline in (predicted, measured))
        if first and second:
            for name, number in (("mean", fmean), ("median", median), ("total", sum)):
                a, b = float(number(first)), float(number(second))
                rows.append((f"{kind.value} {KIND_NAMES[kind]}, {name}", format_time(a), format_time(b), _change(a, b)))
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
