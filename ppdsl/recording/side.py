"""What a model says beside its output, `pp.aux_loss` and `pp.metric`, while it is recorded."""

from __future__ import annotations

from typing import Any

import torch

from ppdsl.annotate.losses import REDUCTIONS, aux_loss, metric
from ppdsl.diagnostics import Diagnostic, Label, MarkError
from ppdsl.recording import compat
from ppdsl.recording.structure import unpack
from ppdsl.recording.tape import Record, RecordKind
from ppdsl.source import Place

__all__ = ["SideRecorder", "check_loss", "check_metric", "is_loss", "is_side"]


class SideRecorder:
    """Hears auxiliary losses and metrics for a recorder: each becomes a call that the stage's program repeats.

    Code that is not recorded call by call says them again itself whenever it runs; of it only the fact is noted.

    Args:
        recorder: Whose records get them.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def add_loss(self, tensor: Any, weight: float, place: Place) -> None:
        """An auxiliary loss was said."""
        check_loss(tensor, weight, place)
        self._note(aux_loss, (tensor, weight), tensor)

    def add_metric(self, name: str, tensor: Any, reduce: str, place: Place) -> None:
        """A metric was said."""
        check_metric(name, tensor, reduce, place)
        self._note(metric, (name, tensor, reduce), tensor)

    def _note(self, function: Any, args: tuple[Any, ...], tensor: torch.Tensor) -> None:
        recorder = self._recorder
        with recorder.noting(), compat.no_torch_function():
            if recorder.paused:
                recorder.frames.current.said.append(function is aux_loss and tensor.requires_grad)
                return
            value = recorder.ledger.value_of(recorder.ledger.stand_in(tensor))
            record = recorder.append(RecordKind.CALL, function, unpack((args, {})).template, (value,))
            record.effect = True


def is_side(record: Record) -> bool:
    """Whether a record says an auxiliary loss or a metric."""
    return record.target is aux_loss or record.target is metric


def is_loss(record: Record) -> bool:
    """Whether a record says an auxiliary loss."""
    return record.target is aux_loss


def check_loss(tensor: Any, weight: Any, place: Place) -> None:
    """Look at what was given to `pp.aux_loss`.

    Raises:
        MarkError: It cannot be added to a loss.
    """
    if not _is_scalar(tensor) or not tensor.is_floating_point():
        message = f"An auxiliary loss is {_what(tensor)}, not a scalar tensor of floating-point numbers."
        raise MarkError(
            Diagnostic("loss-not-scalar", message, (Label(place.span),), "reduce it, for example with .mean()")
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        message = f"The weight of an auxiliary loss is {_what(weight)}, not a number."
        advice = "multiply the loss by the tensor before it is given to pp.aux_loss"
        raise MarkError(Diagnostic("wrong-weight", message, (Label(place.span),), advice))


def check_metric(name: Any, tensor: Any, reduce: Any, place: Place) -> None:
    """Look at what was given to `pp.metric`.

    Raises:
        MarkError: It is no number, or cannot be combined as asked.
    """
    if not isinstance(name, str):
        message = f"A metric has a text as its name, not {name!r}."
        raise MarkError(Diagnostic("bad-metric", message, (Label(place.span),), 'write pp.metric("name", tensor)'))
    if not _is_scalar(tensor) or tensor.is_complex():
        message = f"Metric {name!r} is {_what(tensor)}, not a scalar tensor."
        advice = "reduce it, for example with .mean(); make a tensor of a Python number"
        raise MarkError(Diagnostic("bad-metric", message, (Label(place.span),), advice))
    if reduce not in REDUCTIONS:
        message = f"Metric {name!r} cannot be combined by {reduce!r}."
        raise MarkError(Diagnostic("bad-metric", message, (Label(place.span),), f"one of: {', '.join(REDUCTIONS)}"))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"of type {type(value).__name__}"
