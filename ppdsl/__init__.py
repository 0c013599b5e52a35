"""ppdsl: pipeline parallelism for ordinary PyTorch models. Mark the stages, keep the code.

Marks, graphs, schedules and timelines are plain data and load at once. `record`, `pipeline` and `Pipeline` need torch;
they, and torch, load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ppdsl.annotate import begin, cutpoint, marks, place, stage, unmark
from ppdsl.diagnostics import (
    CallError,
    Diagnostic,
    GraphError,
    MarkError,
    PpdslError,
    PpdslWarning,
    RecordingError,
    RunError,
    ScheduleError,
)
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.verify import verify
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.simulator import simulate
from ppdsl.timeline import Timeline

if TYPE_CHECKING:
    from ppdsl.recording.record import record
    from ppdsl.runtime.pipeline import Pipeline, pipeline

__all__ = [
    "CallError",
    "Diagnostic",
    "GraphError",
    "MarkError",
    "Pipeline",
    "PpdslError",
    "PpdslWarning",
    "RecordingError",
    "RunError",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "Timeline",
    "begin",
    "cutpoint",
    "marks",
    "pipeline",
    "place",
    "record",
    "simulate",
    "stage",
    "unmark",
    "verify",
]

__version__ = "0.1.0"

_NEED_TORCH = {
    "Pipeline": "ppdsl.runtime.pipeline",
    "pipeline": "ppdsl.runtime.pipeline",
    "record": "ppdsl.recording.record",
}


def __getattr__(name: str) -> object:
    """Import the module of a name that needs torch, once.

    Raises:
        AttributeError: There is no such public name.
    """
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_NEED_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
