"""Toys about what lives longer than a call: buffers, attributes, ties, counters, caches, random streams."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, Outcome, toy

__all__: list[str] = []


@toy("3.23", "3.24", outcome="sum-order", stages="0 1", edges="0>1")
class TiedWeightsOverTwoStages(Net):
    """One Parameter under two names, used in both stages."""

    def setup(self) -> None:
        self.d.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).relu()
        with pp.stage(1):
            return self.d(h)


@toy("3.23", outcome="sum-order", inputs=lambda: ((torch.randint(0, 9, (3, 5)),), {}))
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def mark(self) -> None:
        pp.begin(self.body, 1)
        pp.begin(self.head, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)).relu())


@toy("3.23", stages="0 1", edges="0>1")
class TiedWeightsWithinOneStage(Net):
    def setup(self) -> None:
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).relu()
        with pp.stage(1):
            return self.c(self.b(h))


@toy("3.23", outcome="sum-order")
class TiedThroughGlue(Net):
    """`F.linear(h, self.a.weight)`: the parameter is used without its module."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return F.linear(h.relu(), self.a.weight) @ self.a.weight.t()


@toy("3.23")
class ParameterInGlue(Net):
    def setup(self) -> None:
        self.gain = nn.Parameter(torch.full((4,), 0.7))
        self.list_ = nn.ParameterList([torch.ones(4), torch.zeros(4)])

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * self.gain
        with pp.stage(1):
            return self.b(h * self.list_[0] + self.list_[1])


@toy("3.23", "5.9")
class ParameterOnlyValueInALaterStage(Net):
    """`weight * 2` is made in stage 0 and used in stage 1: sent, or repeated, with the same gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            doubled = self.c.weight * 2
        with pp.stage(1):
            return self.b(h) @ doubled


@toy("3.23")
class ParameterIsUsedOutsideOfAnyBlock(Net):
    def setup(self) -> None:
        self.gain = nn.Parameter(torch.full((4,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.exp()
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) * gain


@toy("6.7", outcome=Outcome.REFUSED)
class StateIsCarriedOverStages(Net):
    """Set in stage 1, read in stage 0 by the next micro-batch."""

    def setup(self) -> None:
        self.state: Tensor | None = torch.zeros(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + self.state
        with pp.stage(1):
            y = self.b(h)
            self.state = y.detach()
            return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.state = torch.zeros(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) + self.state
        self.state = y.detach()
        return y


@toy("6.7", "3.2")
class StateIsCarriedInsideAModule(Net):
    def setup(self) -> None:
        self.recurrent = Recurrent()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.recurrent(self.a(x))
        with pp.stage(1):
            return self.b(h)


@toy("3.2", lazy=True)
class AttributeIsSetAndReadWithinAStage(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            self.hidden = self.a(x)
            h = self.hidden.relu()
        with pp.stage(1):
            return self.b(h)


@toy("3.2", lazy=True)
class AttributeIsSetInOneStageAndReadInTheNext(Net):
    """Within one micro-batch the attribute is nothing but another name: it becomes an edge."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            self.hidden = self.a(x)
        with pp.stage(1):
            return self.b(self.hidden)


@toy("6.8", "3.18", outcome=Outcome.REFUSED)
class PythonCounterInGlue(Net):
    def setup(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with pp.stage(0):
            h = self.a(x) * self.calls
        with pp.stage(1):
            return self.b(h)


@toy("6.8", "3.18", outcome=Outcome.REFUSED)
class PythonRandomInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * random.random()
        with pp.stage(1):
            return self.b(h)


@toy("6.8", "3.18", outcome=Outcome.REFUSED)
class NumpyRandomInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy((np.random.rand(4, 4) > 0.5).astype(np.float32))
        with pp.stage(0):
            h = self.a(x) * mask
        with pp.stage(1):
            return self.b(h)


@toy("6.8", "3.18", outcome=Outcome.REFUSED)
class PythonRandomPicksALayer(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            for layer in random.sample([self.b, self.c, self.d], 3):
                h = layer(h)
            return h


class CountsItsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * random.random()


@toy("3.18")
class PythonRandomInsideAModule(Net):
    """Inside a module called whole it is drawn anew in every micro-batch."""

    def setup(self) -> None:
        self.counts = CountsItsCalls()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.counts(h))


class Positions(nn.Module):
    """Builds its table in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[0] * x.shape[1]).reshape(x.shape)
        return x + self.table


@toy("3.18", "3.15", lazy=True)
class LazyTableInAModule(Net):
    def setup(self) -> None:
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.positions(self.a(x))
        with pp.stage(1):
            return self.b(h)


@toy("3.18", "3.15", lazy=True)
class LazyTableInGlue(Net):
    """The first call builds it, the second finds it: both recordings must come to the same."""

    def setup(self) -> None:
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            if self.table is None:
                self.table = torch.linspace(0, 1, 4)
            h = h + self.table
        with pp.stage(1):
            return self.b(h)


@toy("3.19", lazy=True)
class HooksAreInstalledLazily(Net):
    """A flag says that hooks are there: flag and hooks must stay together."""

    def setup(self) -> None:
        self.installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.a.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


class Mailbox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.number = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1.0 + self.number)


class Writes(nn.Module):
    def __init__(self, other: Mailbox) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].number = 2.0
        return self.inner(x)


@toy("6.11", warns=("python-message",), lazy=True)
class NumberIsSentThroughAnAttribute(Net):
    """A python number set by a module of stage 0 on a module of stage 1: seen as a write, warned of."""

    def setup(self) -> None:
        self.mailbox = Mailbox()
        self.writes = Writes(self.mailbox)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.writes(x)
        with pp.stage(1):
            return self.mailbox(h)


@toy("3.18")
class RandomTensorsInGlue(Net):
    """Drawn anew in every micro-batch, from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + torch.randn(4, 4)
        with pp.stage(1):
            return self.b(h) * torch.rand(4) + torch.randperm(4)


@toy("3.18")
class RandomTensorIsUsedInTwoStages(Net):
    """It is drawn once and sent, never drawn twice."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(4, 4)
        with pp.stage(0):
            h = self.a(x) + noise
        with pp.stage(1):
            return self.b(h) - noise


@toy("3.18")
class DropoutMaskIsSharedByTwoStages(Net):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full((4, 4), 0.5))
        with pp.stage(0):
            h = self.a(x) * mask
        with pp.stage(1):
            return self.b(h) * mask


def with_generator() -> Any:
    return (torch.randn(4, 4),), {}


@toy("3.18", inputs=with_generator)
class OwnGenerator(Net):
    """A generator of the user's own, with its own state."""

    def setup(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + torch.rand(4, 4, generator=self.generator)
        with pp.stage(1):
            return self.b(h)


@toy("3.23")
class BufferOfFrozenNumbersUnderTwoNames(Net):
    """One tensor registered twice: both names are one buffer."""

    def setup(self) -> None:
        numbers = torch.linspace(1, 2, 4)
        self.register_buffer("left", numbers)
        self.register_buffer("right", numbers, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * self.left
        with pp.stage(1):
            return self.b(h) * self.right


class GrowsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.history: list[Tensor] = []
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.state is not None:
            h = h + self.state
        self.state = h.detach()
        self.history.append(self.state)
        return h + sum(self.history)


@toy("6.7", "3.2")
class StateGrowsInsideAModule(Net):
    """Nothing at first, something in the second micro-batch: the module called whole sees to it itself."""

    def setup(self) -> None:
        self.grows = GrowsInside()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.grows(x)
        with pp.stage(1):
            return self.b(h)
