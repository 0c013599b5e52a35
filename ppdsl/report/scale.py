"""From seconds to columns: how much time a drawing shows, and where it leaves equal periods out.

Four ways, the first that fits::

    whole    every action has a whole number of columns: times are multiples of a common quantum
    folded   the same, with the repeating middle of the step cut out:   F0F1 ... ⋯ ... B30B31
    squeezed time is proportional, with the repeating middle cut out; actions share columns
    plain    time is proportional; short actions may share a column
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ppdsl.schedule.action import ActionKind
from ppdsl.timeline import Event, Timeline

__all__ = ["FOLD_COLUMNS", "Fold", "Scale", "Segment", "choose_scale", "time_quantum"]

FOLD_COLUMNS = 3
_QUANTUM_PARTS = (1, 2, 3, 4, 5, 6, 8, 10)
_MOST_PERIODS_SHOWN = 1000
_LEAST_PERIODS = 4
_LEAST_HIDDEN = 0.3  # a cut that hides less of the step only disturbs
_MOST_OF_IT = 0.5  # when so much of a step repeats, longer patterns are not looked for
_STEADY_SHARE = 0.08  # of what does not repeat: how much of what repeats is drawn on each side of a cut


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time drawn without a cut.

    Attributes:
        start: First moment, in seconds.
        end: Last moment, in seconds.
        column: Its first column.
        columns: Its width.
    """

    start: float
    end: float
    column: int
    columns: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Equal periods that are not drawn.

    Attributes:
        start: First moment left out, in seconds.
        end: First moment drawn again, in seconds.
        periods: Number of equal periods left out.
        column: First column of the mark, which is `FOLD_COLUMNS` wide.
    """

    start: float
    end: float
    periods: int
    column: int

    @property
    def period(self) -> float:
        """Length of one period, in seconds."""
        return (self.end - self.start) / self.periods


@dataclass(frozen=True, slots=True)
class Scale:
    """The map from seconds to columns.

    Attributes:
        segments: Stretches that are drawn, in order.
        folds: Cuts between them.
        columns: Columns in use, at most those offered.
    """

    segments: tuple[Segment, ...]
    folds: tuple[Fold, ...]
    columns: int

    def column(self, moment: float) -> float | None:
        """Return where a moment is drawn, as a fraction of columns, or None inside a fold."""
        for segment in self.segments:
            if segment.start <= moment <= segment.end:
                span = segment.end - segment.start
                return segment.column + (0.0 if span == 0 else segment.columns * (moment - segment.start) / span)
        return None


@dataclass(frozen=True, slots=True)
class _Window:
    """A stretch in which everything repeats after `period`."""

    start: float
    period: float
    periods: int

    @property
    def end(self) -> float:
        return self.start + self.period * self.periods


def choose_scale(timeline: Timeline, columns: int, *, label_columns: int = 2, fold: bool = True) -> Scale:
    """Return the scale that shows most of a timeline in `columns` columns.

    Args:
        timeline: What is drawn.
        columns: Columns at hand, at least 1.
        label_columns: Columns the shortest action should have to be labelled.
        fold: Whether equal periods may be left out.
    """
    start, span = _extent(timeline)
    quantum = time_quantum(timeline)
    if quantum is None:
        return Scale((Segment(start, start + span, 0, columns),), (), columns)
    units = round(span / quantum)
    shortest = max(1, round(min(e.end - e.start for e in timeline.events if e.end > e.start) / quantum))
    wanted = max(1, math.ceil(label_columns / shortest))
    per_unit = columns // units
    if per_unit >= wanted:
        return Scale((Segment(start, start + span, 0, units * per_unit),), (), units * per_unit)
    folded = _fold(timeline, columns, quantum, range(wanted, per_unit, -1)) if fold else None
    if folded is not None:
        return folded
    if per_unit >= 1:
        return Scale((Segment(start, start + span, 0, units * per_unit),), (), units * per_unit)
    crowded = len(timeline.events) > columns * timeline.ranks
    squeezed = _squeeze(timeline, columns, quantum) if fold and crowded else None
    return squeezed or Scale((Segment(start, start + span, 0, columns),), (), columns)


def time_quantum(timeline: Timeline) -> float | None:
    """Return the longest time of which all starts and ends are multiples, or None when there is none worth having.

    Measured times have none: a clock never gives two equal durations.
    """
    origin, span = _extent(timeline)
    durations = [e.end - e.start for e in timeline.events if e.end > e.start]
    if not durations or span <= 0:
        return None
    moments = {e.start - origin for e in timeline.events} | {e.end - origin for e in timeline.events}
    shortest = min(durations)
    for parts in _QUANTUM_PARTS:
        quantum = shortest / parts
        if all(abs(m / quantum - round(m / quantum)) < 1e-4 for m in moments):
            return quantum
    return None


def _extent(timeline: Timeline) -> tuple[float, float]:
    if not timeline.events:
        return 0.0, 0.0
    return min(e.start for e in timeline.events), timeline.makespan


def _fold(timeline: Timeline, columns: int, quantum: float, widths: range) -> Scale | None:
    """Cut out so many periods that a quantum has one of the `widths` in columns; None when no width fits."""
    start, span = _extent(timeline)
    rows: dict[int, list[Event]] = {}
    for event in timeline.events:
        rows.setdefault(event.rank, []).append(event)
    filling = max(min(e.start for e in row) for row in rows.values()) - start
    draining = start + span - min(max(e.end for e in row) for row in rows.values())
    if round((filling + draining) / quantum) > columns:
        return None
    windows = _windows(timeline, start, quantum)
    for per_unit in widths:
        shown = _most_periods(windows, span, columns, quantum, per_unit)
        if shown is not None:
            return _cut(windows, shown, start, span, quantum, per_unit)
    return None


def _most_periods(windows: Sequence[_Window], span: float, columns: int, quantum: float, per_unit: int) -> int | None:
    """Return how many periods on each side of a cut fit, or None if not even one does."""
    best = None
    for shown in range(1, _MOST_PERIODS_SHOWN):
        cuts = [w for w in windows if w.periods > 2 * shown]
        if not cuts:
            break
        left = span - sum((w.periods - 2 * shown) * w.period for w in cuts)
        if round(left / quantum) * per_unit + FOLD_COLUMNS * len(cuts) > columns:
            break
        best = shown
    return best


def _cut(windows: Sequence[_Window], shown: int, start: float, span: float, quantum: float, per_unit: int) -> Scale:
    segments: list[Segment] = []
    folds: list[Fold] = []
    moment, column = start, 0
    for window in windows:
        hidden = window.periods - 2 * shown
        if hidden <= 0:
            continue
        first = window.start + shown * window.period
        width = round((first - moment) / quantum) * per_unit
        segments.append(Segment(moment, first, column, width))
        folds.append(Fold(first, first + hidden * window.period, hidden, column + width))
        moment, column = folds[-1].end, column + width + FOLD_COLUMNS
    width = round((start + span - moment) / quantum) * per_unit
    segments.append(Segment(moment, start + span, column, width))
    return Scale(tuple(segments), tuple(folds), column + width)


def _squeeze(timeline: Timeline, columns: int, quantum: float) -> Scale | None:
    """Cut the repeating middle out of a step whose actions are too many to be drawn one by one."""
    start, span = _extent(timeline)
    windows = _windows(timeline, start, quantum)
    rest = span - sum(w.period * w.periods for w in windows)
    cuts = []
    for window in windows:
        shown = max(1, math.ceil(_STEADY_SHARE * rest / window.period))
        hidden = window.periods - 2 * shown
        if hidden * window.period > _LEAST_HIDDEN * span:
            cuts.append((window.start + shown * window.period, hidden * window.period, hidden))
    room = columns - FOLD_COLUMNS * len(cuts)
    if not cuts or room < len(cuts) + 1:
        return None
    per_second = room / (span - sum(length for _, length, _ in cuts))
    segments: list[Segment] = []
    folds: list[Fold] = []
    moment, column, used = start, 0, 0.0
    for first, length, periods in [*cuts, (start + span, 0.0, 0)]:
        stop = round((used + first - moment) * per_second) + FOLD_COLUMNS * len(folds)
        segments.append(Segment(moment, first, column, max(1, stop - column)))
        used += first - moment
        if periods:
            folds.append(Fold(first, first + length, periods, stop))
        moment, column = first + length, stop + FOLD_COLUMNS
    return Scale(tuple(segments), tuple(folds), columns)


def _windows(timeline: Timeline, origin: float, quantum: float) -> tuple[_Window, ...]:
    """Return stretches, in order and without overlap, in which each action repeats some micro-batches later."""
    ordered = sorted(timeline.events, key=_moment)
    starts = [round((e.start - origin) / quantum) for e in ordered]
    ends = [round((e.end - origin) / quantum) for e in ordered]
    found: list[_Window] = []
    for delta in sorted({1, 2, timeline.ranks, 2 * timeline.ranks}):
        for window in _periodic(starts, ends, _later(ordered, delta)):
            if all(window.end <= other.start or other.end <= window.start for other in found):
                found.append(window)
        if sum(w.period * w.periods for w in found) > _MOST_OF_IT * ends[-1]:
            break
    return tuple(
        _Window(origin + w.start * quantum, w.period * quantum, w.periods) for w in sorted(found, key=lambda w: w.start)
    )


def _moment(event: Event) -> tuple[float, int]:
    return event.start, event.rank


def _later(ordered: Sequence[Event], delta: int) -> list[int]:
    """Return for each position that of the same computation `delta` micro-batches later, or -1."""
    series: dict[tuple[int, ActionKind], dict[int, int]] = {}
    for position, event in enumerate(ordered):
        action = event.action
        series.setdefault((action.stage, action.kind), {})[action.microbatch] = position
    later = [-1] * len(ordered)
    for positions in series.values():
        for microbatch, position in positions.items():
            later[position] = positions.get(microbatch + delta, -1)
    return later


def _periodic(starts: Sequence[int], ends: Sequence[int], later: Sequence[int]) -> list[_Window]:
    """Return the stretches that repeat when each action gives way to its `later` one, in quanta."""
    shifts = [0] * len(starts)
    before = [-1] * len(starts)
    for i, other in enumerate(later):
        if other >= 0:
            before[other] = i
            shift = starts[other] - starts[i]
            shifts[i] = shift if ends[other] - ends[i] == shift else 0
    windows: list[_Window] = []
    for period, _ in Counter(s for s in shifts if s > 0).most_common(3):
        good = [s == period for s in shifts]
        windows += _runs(starts, good, [i >= 0 and good[i] for i in before], period)
    return windows


def _runs(starts: Sequence[int], good: Sequence[bool], same: Sequence[bool], period: int) -> list[_Window]:
    """Return the windows of one period, in quanta.

    In a window `[a, b)` each action that starts before `b - period` comes again one period later, and each that
    starts after `a + period` was there one period earlier.
    """
    windows: list[_Window] = []
    position = 0
    while position < len(starts):
        tied = position > 0 and starts[position - 1] == starts[position]
        if tied or not good[position]:
            position += 1
            continue
        stop = position
        while stop < len(starts) and good[stop]:
            stop += 1
        end = (starts[stop] if stop < len(starts) else starts[-1] + 1) + period
        windows += _between_strangers(starts, same, (position, stop), end, period)
        position = stop
    return windows


def _between_strangers(
    starts: Sequence[int], same: Sequence[bool], run: tuple[int, int], end: int, period: int
) -> list[_Window]:
    """Split a run of actions that come again where an action stands that was not there one period earlier."""
    first, last = starts[run[0]], bisect_left(starts, end)
    strangers = [starts[i] for i in range(run[0], last) if not same[i]]
    begins = [first] + [max(first, s - period + 1) for s in strangers]
    ends = [max(s, first) for s in strangers] + [end]
    windows = []
    for begin, finish in zip(begins, ends, strict=True):
        begin = starts[min(bisect_left(starts, begin), len(starts) - 1)]
        if (finish - begin) // period >= _LEAST_PERIODS:
            windows.append(_Window(begin, period, (finish - begin) // period))
    return windows
