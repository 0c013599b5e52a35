"""What can be recorded at all: checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording import compat

__all__ = ["check_inputs", "check_model"]

_KINDS = (torch.Tensor, torch.nn.Parameter)


def check_model(model: Any) -> None:
    """Refuse what is no module, parameters without a shape, and tensors of classes that fakes cannot stand for.

    Raises:
        RecordingError: Says which.
    """
    if not isinstance(model, torch.nn.Module):
        raise RecordingError(
            Diagnostic("no-module", f"The model is a {type(model).__name__}, not a torch.nn.Module.", (), None)
        )
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise RecordingError(
                Diagnostic(
                    "lazy-parameters",
                    f"Parameter `{name}` is lazy: it has no shape yet.",
                    (),
                    "run the model once on a real micro-batch before",
                )
            )
        _check_class(f"Parameter `{name}`", parameter)
    for name, buffer in model.named_buffers():
        _check_class(f"Buffer `{name}`", buffer)


def check_inputs(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse inputs of classes that fakes cannot stand for.

    Raises:
        RecordingError: An input is of a tensor class of the user's.
    """
    for name, tensor in zip(names, tensors, strict=True):
        _check_class(f"Argument `{name}`", tensor)


def _check_class(what: str, tensor: torch.Tensor) -> None:
    """A fake is of no other class than its own, so that `isinstance` and overridden methods would go another way."""
    kind = type(tensor)
    if kind in _KINDS or compat.is_fake(tensor) or compat.is_wrapper(tensor) or kind.__module__.startswith("torch."):
        return
    raise RecordingError(
        Diagnostic(
            "tensor-subclass",
            f"{what} is a {kind.__name__}, a tensor class that a recording cannot imitate.",
            (),
            "pass it as a plain tensor, x.as_subclass(torch.Tensor)",
        )
    )
