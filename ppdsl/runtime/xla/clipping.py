"""Norms and scaling of gradients on XLA devices: one program for each device, and numbers that are data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppdsl.runtime.xla import adapter as xla_adapter

__all__ = ["norms_on_xla", "scale_on_xla"]


def norms_on_xla(gradients: Sequence[torch.Tensor | None], norm_type: float) -> list[float | None]:
    """Return each gradient's norm; waits for the devices once each."""
    norms: list[float | None] = [None] * len(gradients)
    places: dict[torch.device, list[int]] = {}
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            places.setdefault(gradient.device, []).append(number)
    for numbers in places.values():
        found = [gradient for number in numbers if (gradient := gradients[number]) is not None]
        wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in found) else torch.float32
        row = torch.stack([torch.linalg.vector_norm(gradient.detach(), norm_type).to(wide) for gradient in found])
        for number, norm in zip(numbers, xla_adapter.host_copy(row).tolist(), strict=True):
            norms[number] = norm
    return norms


def scale_on_xla(gradients: Sequence[torch.Tensor | None], max_norm: float, total: torch.Tensor) -> None:
    """Scale gradients as `torch.nn.utils.clip_grads_with_norm_` does."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).reshape(1)
    there: dict[torch.device, torch.Tensor] = {}
    for gradient in gradients:
        if gradient is None:
            continue
        if gradient.device not in there:
            # A row of one: a scalar of exactly 1 would become part of the program.
            there[gradient.device] = factor.to(gradient.device)
        gradient.detach().mul_(there[gradient.device].to(gradient.dtype).reshape(()))
