"""Tensors between the host and a stage's device, with what XLA devices need to be told.

An XLA tensor is a promise: what is done with it becomes a program when its device is told to start. So what a step's
programs read is uploaded in one form only, and what the caller gets is copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ppdsl.runtime.xla import adapter as xla_adapter

__all__ = ["fetched", "is_xla", "move_to", "recorded_autocast", "start", "weights_on"]


def is_xla(device: torch.device) -> bool:
    """Whether `device` is an XLA device."""
    return device.type == "xla"


def move_to(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter or buffer, and its gradient, to `device`; the object stays the same, whoever holds it.

    Args:
        tensor: Changed in place.
        device: Where it goes.
    """
    gradient = tensor.grad
    if is_xla(device) or is_xla(tensor.device):
        # torch refuses `data =` between a device with memory and one without.
        tensor.grad = None
        moved = tensor.detach().to(device)
        other: torch.Tensor = moved
        if isinstance(tensor, torch.nn.Parameter):
            other = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)
    else:
        tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def start(device: torch.device) -> None:
    """Let an XLA device begin what it was asked for; other devices have begun already."""
    if is_xla(device):
        xla_adapter.launch(device)


def weights_on(device: torch.device, weights: Sequence[float], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradient of each micro-batch's loss on `device`."""
    if is_xla(device):
        # A scalar of exactly 0 or 1 would become part of the program, and another one another program.
        return [torch.tensor([weight], dtype=dtype).to(device) for weight in weights]
    return [torch.tensor(weight, dtype=dtype, device=device) for weight in weights]


def recorded_autocast() -> AbstractContextManager[Any]:
    """Return the scope in which autocast for XLA devices holds for what is recorded, which happens as on the CPU."""
    if not torch.is_autocast_enabled("xla"):
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("xla"))


def fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one device where the host may use them: those of an XLA device as copies."""
    return [xla_adapter.host_copy(tensor) if is_xla(tensor.device) else tensor for tensor in tensors]
