"""Timelines for other tools: JSON, CSV, Chrome and Perfetto traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ppdsl.timeline import Event, Timeline

__all__ = ["to_chrome_trace", "to_csv", "to_json"]


def to_json(timeline: Timeline, facts: Mapping[str, object] | None = None) -> str:
    """Return a timeline as one JSON object on one line.

    Args:
        timeline: Times are those of its events: seconds, or the unit of the costs it was simulated with.
        facts: What else to say of it (`schedule`, `lower_bound`, ...), before the actions.

    >>> json.loads(to_json(Timeline((), ranks=2), {"schedule": "1f1b"}))["schedule"]
    '1f1b'
    """
    return json.dumps(
        {
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
    )


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


def to_chrome_trace(timelines: Sequence[Timeline], *, name: str = "ppdsl") -> str:
    """Return timelines as a trace that chrome://tracing and ui.perfetto.dev open: a process each, a thread a rank.

    Args:
        timelines: Predicted, measured or both; their times count as seconds.
        name: Said in front of `predicted` and `measured`.
    """
    events: list[dict[str, object]] = []
    for process, timeline in enumerate(timelines):
        kind = "measured" if timeline.measured else "predicted"
        events.append(_metadata("process_name", process, 0, f"{name} {kind}".strip()))
        events += [_metadata("thread_name", process, rank, f"rank {rank}") for rank in range(timeline.ranks)]
        events += [_trace_event(event, process, timeline) for event in timeline.events]
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


def _metadata(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


_COLORS = {"F": "thread_state_running", "B": "thread_state_iowait", "I": "rail_animation", "W": "good"}


def _trace_event(event: Event, process: int, timeline: Timeline) -> dict[str, object]:
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
        "pid": process,
        "tid": event.rank,
        "args": {"stage": stage, "microbatch": action.microbatch},
    }
