"""ppdsl: pipeline parallelism for ordinary PyTorch models. Mark the stages, keep the code.

Marks, graphs, schedules and timelines are plain data and load at once. What records, runs, fills and saves a
model (`record`, `pipeline`, `materialize`, `save`, ...) needs torch, and loads with it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ppdsl.annotate import aux_loss, begin, collect_losses, cutpoint, marks, metric, place, stage, unmark
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
    SpecError,
)
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.verify import verify
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.simulator import simulate
from ppdsl.timeline import Timeline

if TYPE_CHECKING:
    from ppdsl import xla
    from ppdsl.recording.record import record
    from ppdsl.runtime.batches.mean_loss import mean_loss
    from ppdsl.runtime.batches.token_mean import TokenMean
    from ppdsl.runtime.checkpoints.checkpoint import Saving, save
    from ppdsl.runtime.checkpoints.materialize import materialize
    from ppdsl.runtime.checkpoints.resuming import Checkpoint, load
    from ppdsl.runtime.checkpoints.safetensors_io import export_safetensors
    from ppdsl.runtime.pipeline import Pipeline, pipeline
    from ppdsl.runtime.replicas.sharding import fully_shard
    from ppdsl.runtime.scaling import GradScaler

__all__ = [
    "CallError",
    "Checkpoint",
    "Diagnostic",
    "GradScaler",
    "GraphError",
    "MarkError",
    "Pipeline",
    "PpdslError",
    "PpdslWarning",
    "RecordingError",
    "RunError",
    "Saving",
    "Schedule",
    "ScheduleError",
    "SpecError",
    "StageGraph",
    "Timeline",
    "TokenMean",
    "aux_loss",
    "begin",
    "collect_losses",
    "cutpoint",
    "export_safetensors",
    "fully_shard",
    "load",
    "marks",
    "materialize",
    "mean_loss",
    "metric",
    "pipeline",
    "place",
    "record",
    "save",
    "simulate",
    "stage",
    "unmark",
    "verify",
    "xla",
]

__version__ = "0.1.0"

_NEED_TORCH = {
    "Checkpoint": "ppdsl.runtime.checkpoints.resuming",
    "GradScaler": "ppdsl.runtime.scaling",
    "Pipeline": "ppdsl.runtime.pipeline",
    "Saving": "ppdsl.runtime.checkpoints.checkpoint",
    "TokenMean": "ppdsl.runtime.batches.token_mean",
    "export_safetensors": "ppdsl.runtime.checkpoints.safetensors_io",
    "fully_shard": "ppdsl.runtime.replicas.sharding",
    "load": "ppdsl.runtime.checkpoints.resuming",
    "materialize": "ppdsl.runtime.checkpoints.materialize",
    "mean_loss": "ppdsl.runtime.batches.mean_loss",
    "pipeline": "ppdsl.runtime.pipeline",
    "record": "ppdsl.recording.record",
    "save": "ppdsl.runtime.checkpoints.checkpoint",
    "xla": "ppdsl.xla",
}


def __getattr__(name: str) -> object:
    """Import the module of a name that needs torch, once.

    Raises:
        AttributeError: There is no such public name.
    """
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_NEED_TORCH[name])
    value: object = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
