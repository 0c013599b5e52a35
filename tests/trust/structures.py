"""Traps in how a model is called and what it returns: containers, keywords, labels, axes, losses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ppdsl as pp
from tests.trust.entry import ROWS, Entry, Setup
from tests.trust.graphs import WIDTH, Layers, mean_square, numbers

__all__ = ["STRUCTURE_ENTRIES"]


class Mode(Enum):
    """A choice that is no tensor."""

    FAST = 1


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Record:
    hidden: Tensor
    note: str
    more: Any = None


class Containers(Layers):
    def forward(self, batch: Any, mode: Mode = Mode.FAST, *, scale: float = 2.0) -> dict[str, Any]:
        with pp.stage(0):
            pair = Pair(self.a(batch["x"][0]), {"mask": batch["mask"], "none": None, "number": 3, "empty": []})
        with pp.stage(1):
            record = Record(self.b(pair.left) * scale, "kept", (pair.right["mask"], mode.value))
        with pp.stage(2):
            hidden = self.c(record.hidden) * record.more[0]
            return {
                "logits": hidden,
                "hidden": (record.hidden, None),
                "note": record.note,
                "number": pair.right["number"],
            }


def containers(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    batch = {"x": [x, None], "mask": x > 0}
    return Setup(
        Containers(), (batch,), {"scale": 3.0}, (numbers(microbatches, WIDTH, seed=1),),
        lambda output, target: mean_square(output["logits"], target),
    )  # fmt: skip


class ByName(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            made = {"b": self.b(x), "a": self.a(x)}
        with pp.stage(1):
            return self.c(made["a"]) - self.d(made["b"])


class OwnLoss(Layers):
    """Labels are used by the last stage alone; the loss is in the output."""

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
            loss = None if labels is None else mean_square(h, labels)
            return OrderedDict(loss=loss, logits=h)


def own_loss(microbatches: int) -> Setup:
    x, labels = numbers(microbatches, WIDTH), numbers(microbatches, WIDTH, seed=1)
    return Setup(OwnLoss(), (x,), {"labels": labels})


class ByMapping(Layers):
    def forward(self, x: Tensor, *rest: Tensor, **named: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + sum(rest)
        with pp.stage(1):
            return self.b(h) * named["factor"]


def by_mapping(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    return Setup(ByMapping(), (x, x * 2, x * 3), {"factor": x * 4}, (x,), mean_square)


class SequenceFirst(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).cumsum(0)
        with pp.stage(1):
            return self.b(h)


def sequence_first(microbatches: int) -> Setup:
    x = numbers(microbatches, 3, WIDTH).transpose(0, 1).contiguous()
    return Setup(SequenceFirst(), (), {"x": x}, loss=lambda y: y.square().mean(), batch_axis={"x": 1, "output": 1})


class LateArgument(Layers):
    """One argument goes to the last stage, another to none."""

    def forward(self, x: Tensor, late: Tensor, unused: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(2):
            return self.c(h + late)


def late_argument(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    return Setup(LateArgument(), (x, x * 2, x * 3), targets=(x,), loss=mean_square)


class Sums(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


def sum_reduction(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    count = x.numel()
    return Setup(Sums(), (x,), targets=(x,), loss=lambda y, t: (y - t).square().sum() / count, reduction="sum")


class NamesOfItsOwn(nn.Module):
    """Attributes that a tool might take for its own, and a block without gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.submod_0, self.stage_0 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._pp = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.submod_0(x)
            with torch.no_grad():
                scale = self._pp(h).abs().mean()
        with pp.stage(1):
            return self.stage_0(h) * scale


def names_of_its_own(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    return Setup(NamesOfItsOwn(), (x,), targets=(x,), loss=mean_square)


class Experts(Layers):
    """A router that decides by numbers inside one stage."""

    def extra(self) -> None:
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.router(h)
        with pp.stage(2):
            return self.b(h)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for number, expert in enumerate((self.one, self.two)):
            chosen = (h[:, 0] > 0) == bool(number)
            if chosen.any():
                out[chosen] = expert(h[chosen])
        return out


def _simple(model: type[nn.Module]) -> Any:
    def make(microbatches: int) -> Setup:
        x = numbers(microbatches, WIDTH)
        return Setup(model(), (x,), targets=(numbers(microbatches, WIDTH, seed=1),), loss=mean_square)

    return make


class Positions(Layers):
    """Positions of the form [3, batch, width] are cut on their second axis."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) * F.softmax(pos, 0).sum(0) + pos[1]


def positions(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    pos = torch.stack([x, x * 2, x * 3])
    return Setup(Positions(), (), {"x": x, "pos": pos}, (x,), mean_square, {"pos": 1, "x": 0})


STRUCTURE_ENTRIES = (
    Entry("containers", ("UR-032", "UR-035", "UR-051"), containers),
    Entry("by_name", ("UR-033",), _simple(ByName)),
    Entry("own_loss", ("UR-036",), own_loss),
    Entry("by_mapping", ("UR-037", "UR-096"), by_mapping),
    Entry("late_argument", ("UR-036",), late_argument),
    Entry("sequence_first", ("UR-047",), sequence_first),
    Entry("positions", ("UR-048",), positions),
    Entry("sum_reduction", ("UR-044",), sum_reduction),
    Entry("names_of_its_own", ("UR-098",), names_of_its_own),
    Entry("experts", ("UR-100",), _simple(Experts)),
)

assert ROWS == 2  # the shapes above rely on it
