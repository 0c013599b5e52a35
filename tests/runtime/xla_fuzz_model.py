"""The random models of `xla_fuzz`: stages that take what any earlier ones made, with every trap that edges know."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import ppdsl as pp

__all__ = ["Net", "loss_of"]

_EXTRAS = ("none", "none", "half", "detached", "transposed", "no grad", "alias", "scalar")
_DISCRETE = ("integer", "mask")
"""Rounding makes of two nearly equal numbers two different ones, so only where numbers are equal to 15 digits."""


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    return y.square().mean()


class Net(nn.Module):
    """A random graph of stages.

    Args:
        chance: Draws everything.
        exact: Whether numbers are float64.
        dropout: How much each stage drops.
    """

    def __init__(self, chance: random.Random, *, exact: bool, dropout: float) -> None:
        super().__init__()
        count = chance.randint(2, 8)
        self.width = width = chance.randint(3, 6)
        # Most stages go on with what the one before made; some take others alone, so that there are branches.
        self.takes = [_takes(chance, i) for i in range(count)]
        extras = _EXTRAS + _DISCRETE if exact else _EXTRAS
        self.extras = [chance.choice(extras) for _ in range(count)]
        # A key that comes again is a stage that is visited twice.
        self.keys = [chance.randint(0, i) if chance.random() < 0.3 else i for i in range(count)]
        self.tied = [chance.random() < 0.25 for _ in range(count)]
        self.tabled = [chance.random() < 0.2 for _ in range(count)]
        self.shared = nn.Linear(width, width, bias=False)
        self.register_buffer("table", torch.randn(width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.norms = nn.ModuleList(_norm(chance, width, exact=exact) for _ in range(count))
        self.drops = nn.ModuleList(nn.Dropout(dropout) for _ in range(count))
        for layer in self.layers:
            layer.requires_grad_(chance.random() > 0.2)
        self.layers[0].requires_grad_(True)

    @property
    def normed(self) -> bool:
        """Whether a batch norm is in it."""
        return any(isinstance(norm, nn.BatchNorm1d) for norm in self.norms)

    @property
    def text(self) -> str:
        """What was drawn."""
        return f"takes={self.takes} extras={self.extras} keys={self.keys} tied={self.tied} norms={self.norms}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last stage makes."""
        made: list[list[torch.Tensor]] = []
        for number, layer in enumerate(self.layers):
            with pp.stage(self.keys[number]):
                parts = [value for i in self.takes[number] for value in made[i]]
                total: Any = sum(self._fitting(part, x) for part in parts) if parts else x
                if self.tabled[number]:
                    total = total + self.table
                h = torch.tanh(self.drops[number](self.norms[number](layer(total))))
                if self.tied[number]:
                    h = self.shared(h)
                made.append([h, *self._extra(number, h)])
        with pp.stage(self.keys[-1]):
            return made[-1][0]

    def _fitting(self, part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if part.dim() == 3:
            part = part[0].t()
        return part.to(x.dtype)

    def _extra(self, number: int, h: torch.Tensor) -> list[torch.Tensor]:
        match self.extras[number]:
            case "half":
                return [h * 0.5]
            case "detached":
                return [h.detach() + 1]
            case "transposed":
                return [h.t()[None] * 1]
            case "no grad":
                with torch.no_grad():
                    return [h.sin()]
            case "alias":
                return [h]
            case "scalar":
                return [h.mean()]
            case "integer":
                return [(h * 9).round().long()]
            case "mask":
                return [h > 0]
        return []


def _takes(chance: random.Random, number: int) -> list[int]:
    if number == 0:
        return []
    others = chance.sample(range(number), min(number, chance.randint(0, 2)))
    return sorted({number - 1, *others}) if not others or chance.random() < 0.7 else sorted(others)


def _norm(chance: random.Random, width: int, *, exact: bool) -> nn.Module:
    kind = chance.random()
    if kind < 0.15 and exact:
        # Of two rows it makes 1 and -1, whatever they are: in float32 its gradients are nothing but rounding.
        return nn.BatchNorm1d(width)
    return nn.LayerNorm(width) if kind < 0.3 else nn.Identity()
