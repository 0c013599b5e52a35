"""Small marked models, one trap of the runtime each, all in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp

ROWS = 2


@dataclass(frozen=True)
class Case:
    """A model, and a batch of four micro-batches for it."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    targets: Callable[[int], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor] | None
    keys: tuple[int | str, ...] = (0, 1, 2)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().double()


def _wide(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 4, dtype=torch.float64),)


def _mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class Chain(Base):
    def forward(self, x):
        with pp.stage(0):
            x = torch.relu(self.a(x))
        with pp.stage(1):
            x = torch.relu(self.b(x))
        with pp.stage(2):
            return self.c(x)


class FanOut(Base):
    def forward(self, x):
        with pp.stage(0):
            h = torch.tanh(self.a(x))
        with pp.stage(1):
            k = torch.tanh(self.b(h)) * h
        with pp.stage(2):
            return self.c(k + h) * h


class Branches(Base):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(4, 4)

    def forward(self, x):
        with pp.stage("stem"):
            h = torch.tanh(self.a(x))
        with pp.stage("left"):
            one = torch.relu(self.b(h))
        with pp.stage("right"):
            two = torch.sigmoid(self.c(h))
        with pp.stage("join"):
            return self.d(one * two + h)


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x) @ self.w
        with pp.stage(1):
            h = torch.tanh(self.b(h)) @ self.w
        with pp.stage(2):
            return self.c(h) @ self.w


class Reentered(Base):
    def forward(self, x):
        with pp.stage(0):
            x = torch.tanh(self.a(x))
        with pp.stage(1):
            x = torch.tanh(self.b(x))
        with pp.stage(0):
            return self.c(self.a(x))


class IntegerEdges(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x):
        with pp.stage(0):
            index = (x.detach().abs().sum(1) * 3).long() % 7
            mask = self.a(x).detach() > 0
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h).masked_fill(mask, 0.0) + self.table(index)
        with pp.stage(2):
            return self.c(h * mask) + self.table(index)


class NoGradEdge(Base):
    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
            scale = h.detach().exp()
        with pp.stage(1):
            h = self.b(h) * scale
        with pp.stage(2):
            return self.c(h) + scale


class DetachedUse(Base):
    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            k = self.b(h)
        with pp.stage(2):
            return self.c(k) + h.detach()


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        with pp.stage(0):
            h = self.first(x.contiguous(memory_format=torch.channels_last))
            swapped = h.transpose(1, 2)
            part = h[:, :, ::2]
            wide = h[:, :1].expand(-1, 3, -1, -1)
        with pp.stage(1):
            k = self.second(h) + swapped.transpose(1, 2) + wide
        with pp.stage(2):
            return self.last((k[:, :, ::2] * part + wide[:, :, ::2]).mean((2, 3)))


class Dtypes(Base):
    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
            turned = torch.complex(h, 2 * h)
            half = h.to(torch.bfloat16)
            small = (h.detach() * 10).to(torch.int16)
            empty = h[:0]
            single = h.sum()
        with pp.stage(1):
            h = self.b(h) + turned.real * turned.imag + small
        with pp.stage(2):
            return self.c(h + half.double() * 0.5 + single) + turned.conj().imag + empty.sum()


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.a.requires_grad_(False)
        self.c.bias.requires_grad_(False)

    def forward(self, x):
        with pp.stage(0):
            x = torch.relu(self.a(x))
        with pp.stage(1):
            x = self.b(x)
        with pp.stage(2):
            return self.c(x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one, self.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        with pp.stage(0):
            x = torch.relu(self.one(self.a(x)))
        with pp.stage(1):
            return self.two(self.b(x))


class DictOutput(Base):
    def forward(self, x, mask=None):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            k = self.b(h)
        with pp.stage(2):
            return {"logits": self.c(k), "hidden": (h, k), "none": None}


class OwnLoss(Base):
    def forward(self, x, labels):
        with pp.stage(0):
            h = torch.relu(self.a(x))
        with pp.stage(1):
            h = torch.relu(self.b(h))
        with pp.stage(2):
            logits = self.c(h)
            return {"loss": _mse(logits, labels), "logits": logits}


class InPlace(Base):
    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            k = self.b(h)
            k = k.add_(h)
        with pp.stage(2):
            return self.c(k).mul_(2) + h


def _images(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 2, 6, 6, dtype=torch.float64),)


def _pairs(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 2, dtype=torch.float64),)


def _nothing(rows: int) -> tuple[torch.Tensor, ...]:
    return ()


def _logits_mse(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    return _mse(output["logits"], target) + output["hidden"][1].mean()


CASES = {
    case.name: case
    for case in (
        Case("chain", Chain, _wide, _wide, _mse),
        Case("fan_out", FanOut, _wide, _wide, _mse),
        Case("branches", Branches, _wide, _wide, _mse, ("stem", "left", "right", "join")),
        Case("tied", Tied, _wide, _wide, _mse),
        Case("reentered", Reentered, _wide, _wide, _mse, (0, 1)),
        Case("integer_edges", IntegerEdges, _wide, _wide, _mse),
        Case("no_grad_edge", NoGradEdge, _wide, _wide, _mse),
        Case("detached_use", DetachedUse, _wide, _wide, _mse),
        Case("strided", Strided, _images, _pairs, _mse),
        Case("dtypes", Dtypes, _wide, _wide, _mse),
        Case("frozen", Frozen, _wide, _wide, _mse),
        Case("norm", Norm, _wide, _wide, _mse, (0, 1)),
        Case("dict_output", DictOutput, _wide, _wide, _logits_mse),
        Case("own_loss", OwnLoss, lambda rows: (*_wide(rows), *_wide(rows)), _nothing, None),
        Case("in_place", InPlace, _wide, _wide, _mse),
    )
}


def batch_of(case: Case, microbatches: int = 4) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return inputs and targets of a batch, the same at every call."""
    torch.manual_seed(2)
    rows = ROWS * microbatches
    return case.inputs(rows), case.targets(rows)


def first(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the first micro-batch."""
    return tuple(tensor[:ROWS] for tensor in tensors)


def pipeline_of(case: Case, model: nn.Module, microbatches: int = 4, **options: Any) -> pp.Pipeline:
    inputs, targets = batch_of(case, microbatches)
    example = first(targets) if case.loss is not None else None
    return pp.pipeline(model, first(inputs), targets=example, loss=case.loss, microbatches=microbatches, **options)


def plain_step(case: Case, model: nn.Module, microbatches: int = 4) -> tuple[torch.Tensor, list[Any]]:
    """Run the plain loop over the micro-batches: the law that every pipeline is held to."""
    inputs, targets = batch_of(case, microbatches)
    total = torch.zeros((), dtype=torch.float64)
    outputs = []
    for m in range(microbatches):
        rows = slice(m * ROWS, (m + 1) * ROWS)
        output = model(*(tensor[rows] for tensor in inputs))
        loss = output["loss"] if case.loss is None else case.loss(output, *(tensor[rows] for tensor in targets))
        (loss / microbatches).backward()
        total = total + loss.detach() * (1.0 / microbatches)
        outputs.append(output)
    return total, outputs
