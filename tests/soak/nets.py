"""Random models with marks: skips, ties, frozen weights, values without a gradient, integers, views."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp
from tests.runtime.shapes import SHAPES, Shape
from tests.trust.entry import ROWS, Entry, Setup

__all__ = ["random_entry", "shape_entry"]

WIDTH = 4
EXTRAS = ("none", "none", "half", "detached", "integer", "transposed", "mask")


@dataclass(frozen=True)
class Drawn:
    """One stage: which earlier values it takes, and what it makes beside its activation."""

    takes: tuple[int, ...]
    extra: str
    tied: bool
    frozen: bool


class RandomNet(nn.Module):
    """A graph of stages."""

    def __init__(self, stages: tuple[Drawn, ...], seed: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)

        def matrix() -> Tensor:
            return torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=chance)

        self.stages = stages
        self.tied = nn.Parameter(matrix())
        self.weights = nn.ParameterList(nn.Parameter(matrix(), requires_grad=not one.frozen) for one in stages)

    def forward(self, x: Tensor) -> Tensor:
        made: list[tuple[Tensor, ...]] = []
        for key, (drawn, weight) in enumerate(zip(self.stages, self.weights, strict=True)):
            with pp.stage(key):
                value = x if not drawn.takes else sum(_joined(made[index]) for index in drawn.takes)
                value = torch.tanh(value @ weight)
                if drawn.tied:
                    value = torch.tanh(value @ self.tied)
                made.append((value, *_extra(drawn.extra, value)))
        return made[-1][0]


def _joined(values: tuple[Tensor, ...]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total * 0.5 + (value.t() if value.shape[0] == WIDTH != value.shape[1] else value).double()
    return total


def _extra(kind: str, value: Tensor) -> tuple[Tensor, ...]:
    match kind:
        case "half":
            return (value * 0.5,)
        case "detached":
            return (value.detach(),)
        case "integer":
            return ((value * 9).long(),)
        case "transposed":
            return (value.t(),)
        case "mask":
            return (value > 0,)
        case _:
            return ()


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def random_entry(chance: random.Random, stages: int) -> Entry:
    """Return a random model of that many stages."""
    drawing = []
    for index in range(stages):
        # The one before is among them, so that every stage is needed.
        takes = {index - 1, *chance.sample(range(index), chance.randint(0, min(index, 2)))} if index else set()
        drawing.append(
            Drawn(tuple(sorted(takes)), chance.choice(EXTRAS), chance.random() < 0.3, chance.random() < 0.15)
        )
    if all(one.frozen and not one.tied for one in drawing):
        drawing[0] = Drawn(drawing[0].takes, drawing[0].extra, True, False)
    seed = chance.getrandbits(30)

    def make(microbatches: int) -> Setup:
        batch = torch.Generator().manual_seed(seed + 1)
        x, y = (torch.randn(ROWS * microbatches, WIDTH, dtype=torch.float64, generator=batch) for _ in range(2))
        return Setup(RandomNet(tuple(drawing), seed), (x,), targets=(y,), loss=_mean_square)

    return Entry(f"random graph of {stages}", (), make)


def shape_entry(name: str, stages: int) -> Entry:
    """Return one of the fixed shapes with that many stages."""
    shape: Shape = SHAPES[name]

    def make(microbatches: int) -> Setup:
        inputs, target = shape.batch(microbatches)
        return Setup(shape.model(stages), tuple(inputs), targets=(target,), loss=_mean_square)

    return Entry(f"{name} of {stages}", (), make)
