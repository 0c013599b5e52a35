"""Timelines for other tools: JSON, CSV, Chrome and Perfetto traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ppdsl.simulation.transfers import Transfer
from ppdsl.timeline import Event, Timeline

__all__ = ["to_chrome_trace", "to_csv", "to_json"]


def to_json(
    timeline: Timeline, facts: Mapping[str, object] | None = None, *, messages: Sequence[Transfer] | None = None
) -> str:
    """Return a timeline as one JSON object on one line.

    Args:
        timeline: Times are those of its events: seconds, or the unit of the costs it was simulated with.
        facts: What else to say of it (`schedule`, `lower_bound`, ...), before the actions.
        messages: Messages between the ranks, behind the actions; None: without.

    >>> json.loads(to_json(Timeline((), ranks=2), {"schedule": "1f1b"}))["schedule"]
    '1f1b'
    """
    found: dict[str, object] = {
        **(facts or {}),
        "ranks": timeline.ranks,
        "measured": timeline.measured,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "max_rank_span": max(timeline.spans, default=0.0),
        "busy": timeline.busy,
        "stage_labels": timeline.stage_labels,
        "actions": [_action_object(event) for event in timeline.events],
    }
    if messages is not None:
        found["messages"] = [_message_object(message) for message in messages]
    return json.dumps(found)


def to_csv(timeline: Timeline) -> str:
    """Return a timeline as CSV with a header: rank, action, stage, kind, micro-batch, start, end.

    >>> print(to_csv(Timeline((), ranks=1)), end="")
    rank,action,stage,kind,microbatch,start,end
    """
    lines = ["rank,action,stage,kind,microbatch,start,end"]
    for event in timeline.events:
        action = event.action
        cells = (event.rank, action, action.stage, action.kind.value, action.microbatch, event.start, event.end)
        lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"


def to_chrome_trace(
    timelines: Sequence[Timeline], *, name: str | Sequence[str] = "ppdsl", messages: Sequence[Sequence[Transfer]] = ()
) -> str:
    """Return timelines as a trace that chrome://tracing and ui.perfetto.dev open: a process for each rank.

    Args:
        timelines: Predicted, measured or both; their times count as seconds.
        name: Said in front of `predicted` and `measured`: one for all, or one for each timeline.
        messages: For each timeline its messages, drawn as arrows; shorter or empty: without.

    >>> json.loads(to_chrome_trace([Timeline((), ranks=1)]))["traceEvents"][0]["args"]
    {'name': 'ppdsl predicted, rank 0'}
    """
    events: list[dict[str, object]] = []
    names = [name] * len(timelines) if isinstance(name, str) else name
    first = 0  # process of the timeline's rank 0
    for position, timeline in enumerate(timelines):
        kind = "measured" if timeline.measured else "predicted"
        for rank in range(timeline.ranks):
            events.append(_metadata("process_name", first + rank, {"name": f"{names[position]} {kind}, rank {rank}"}))
            events.append(_metadata("process_sort_index", first + rank, {"sort_index": first + rank}))
            events.append(_metadata("thread_name", first + rank, {"name": f"rank {rank}"}))
        events += [_trace_event(event, first, timeline) for event in timeline.events]
        if position < len(messages):
            events += _arrows(timeline, messages[position], first)
        first += timeline.ranks
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _action_object(event: Event) -> dict[str, object]:
    action = event.action
    return {
        "rank": event.rank,
        "action": str(action),
        "stage": action.stage,
        "kind": action.kind.value,
        "microbatch": action.microbatch,
        "start": event.start,
        "end": event.end,
    }


def _message_object(message: Transfer) -> dict[str, object]:
    return {
        "source": message.source,
        "target": message.target,
        "made": str(message.made),
        "used": str(message.used),
        "start": message.start,
        "end": message.end,
    }


def _metadata(what: str, process: int, arguments: Mapping[str, object]) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": 0, "args": dict(arguments)}


_COLORS = {"F": "thread_state_running", "B": "thread_state_iowait", "I": "rail_animation", "W": "good"}


def _trace_event(event: Event, first: int, timeline: Timeline) -> dict[str, object]:
    action = event.action
    labels = timeline.stage_labels
    stage = labels[action.stage] if action.stage < len(labels) else str(action.stage)
    return {
        "name": str(action),
        "cat": action.kind.value,
        "cname": _COLORS[action.kind.value],
        "ph": "X",
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "pid": first + event.rank,
        "tid": 0,
        "args": {"stage": stage, "microbatch": action.microbatch},
    }


def _arrows(timeline: Timeline, messages: Sequence[Transfer], first: int) -> list[dict[str, object]]:
    """Return the two ends of an arrow for each message; an end belongs to the box around its moment."""
    events = {event.action: event for event in timeline.events}
    arrows: list[dict[str, object]] = []
    for number, message in enumerate(messages):
        made, used = events[message.made], events[message.used]
        inside = made.start + 0.999 * (made.end - made.start)  # the end itself may belong to the next box
        name = f"{message.made} to {message.used.stage}"
        common = {"name": name, "cat": "message", "id": first * 1_000_000 + number, "tid": 0}
        arrows.append({**common, "ph": "s", "ts": inside * 1e6, "pid": first + made.rank})
        arrows.append({**common, "ph": "f", "bp": "e", "ts": used.start * 1e6, "pid": first + used.rank})
    return arrows
