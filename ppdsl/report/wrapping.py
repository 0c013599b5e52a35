"""A chart in several lines, one below the other, as music is written."""

from __future__ import annotations

import math

from ppdsl.report.scale import Scale, Segment, time_quantum
from ppdsl.timeline import Timeline

__all__ = ["wrap_scales"]


def wrap_scales(timeline: Timeline, columns: int, *, label_columns: int) -> tuple[Scale, ...]:
    """Return scales that show a timeline in lines of about equal length, with room to label every action.

    Args:
        timeline: What is drawn.
        columns: Columns at hand, at least 1.
        label_columns: Columns the shortest action should have to be labelled.

    Returns:
        A scale for each line; empty where times have no common quantum or one line is enough.

    >>> from ppdsl.schedule.action import parse_action
    >>> from ppdsl.timeline import Event
    >>> events = tuple(Event(0, parse_action(f"0F{m}"), float(m), m + 1.0) for m in range(9))
    >>> [scale.columns for scale in wrap_scales(Timeline(events, ranks=1), 8, label_columns=2)]
    [6, 6, 6]
    """
    quantum = time_quantum(timeline)
    if quantum is None:
        return ()
    start = min(event.start for event in timeline.events)
    units = round(timeline.makespan / quantum)
    shortest = max(1, round(min(e.end - e.start for e in timeline.events if e.end > e.start) / quantum))
    per_unit = max(1, math.ceil(label_columns / shortest))
    lines = math.ceil(units / max(1, columns // per_unit))
    if lines < 2:
        return ()
    length = math.ceil(units / lines)
    scales = []
    for first in range(0, units, length):
        last = min(first + length, units)
        width = (last - first) * per_unit
        scales.append(Scale((Segment(start + first * quantum, start + last * quantum, 0, width),), (), width))
    return tuple(scales)
