"""What a model's code says to ppdsl: marks of stages, auxiliary losses, metrics. No-ops when nobody listens."""

from ppdsl.annotate.losses import LossListener, aux_loss, collect_losses, hear, metric
from ppdsl.annotate.marks import (
    Key,
    MarkKind,
    MarkListener,
    ModuleMark,
    begin,
    cutpoint,
    listen,
    marks,
    marks_of,
    place,
    stage,
    unmark,
)

__all__ = [
    "Key", "LossListener", "MarkKind", "MarkListener", "ModuleMark", "aux_loss", "begin", "collect_losses", "cutpoint",
    "hear", "listen", "marks", "marks_of", "metric", "place", "stage", "unmark",
]  # fmt: skip
