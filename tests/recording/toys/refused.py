"""Toys that must be refused: values that steer glue, calls nobody can see, marks that mean nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, Outcome, toy
from tests.recording.toys.values import LayerDrop

__all__: list[str] = []


@toy("3.16", "6.2", outcome=Outcome.REFUSED)
class LayerDropOfAHalf(LayerDrop):
    drop = 0.5


@toy("3.17", "6.1", outcome=Outcome.REFUSED)
class FloatOfAnInputInGlue(Net):
    """A float of an input is no guard: it would never be equal twice."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * float(x.abs().max())
        with pp.stage(1):
            return self.b(h)


@toy("6.1", outcome=Outcome.REFUSED)
class BranchOnAnActivationInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        if h.sum() > 0:
            h = h * 2
        with pp.stage(1):
            return self.b(h)


@toy("6.1", outcome=Outcome.REFUSED)
class ItemOfAnActivationInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) * h.max().item()


@toy("6.1", outcome=Outcome.REFUSED)
class FloatOfAParameterInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * float(self.b.weight[0, 0])
        with pp.stage(1):
            return self.b(h)


@toy("6.1", outcome=Outcome.REFUSED)
class NumpyOfAnActivationInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        order = np.argsort(h.detach().numpy()[:, 0])
        with pp.stage(1):
            return self.b(h)[torch.from_numpy(order)]


@toy("6.1", outcome=Outcome.REFUSED)
class ListOfAnActivationInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            best = h.argmax(-1).tolist()
        with pp.stage(1):
            return self.b(h)[best]


@toy("6.1", outcome=Outcome.REFUSED)
class NonzeroOfAnActivationInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        rows = (h[:, 0] > 0).nonzero().flatten()
        with pp.stage(1):
            return self.b(h[rows]).sum(0)


@toy("3.29", "6.9", outcome=Outcome.REFUSED)
class ScriptFunctionInGlue(Net):
    """Compiled anew for each model: how TorchScript runs a function depends on how often it ran before."""

    def setup(self) -> None:
        def twice_and_one(x: Tensor) -> Tensor:
            return x * 2 + 1

        self.scripted = torch.jit.script(twice_and_one)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.scripted(self.a(x))
        with pp.stage(1):
            return self.b(h)


@toy("3.29", "6.10", outcome=Outcome.REFUSED)
class LazyLayer(Net):
    def setup(self) -> None:
        self.lazy = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.lazy(x)
        with pp.stage(1):
            return self.b(h)


@toy("5.10", outcome=Outcome.REFUSED)
class OutputIsNoTensorTree(Net):
    """The tensor is there, but only the function knows where."""

    def forward(self, x: Tensor) -> Any:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
            return lambda: y


class Slotted:
    """Holds a tensor where no walker looks."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@toy("5.10", outcome=Outcome.REFUSED)
class OutputIsAnObjectOfAnotherKind(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Slotted]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
            return y, Slotted(y * 2)


@toy("3.30", outcome=Outcome.REFUSED)
class BegunModuleIsNeverCalled(Net):
    def setup(self) -> None:
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def mark(self) -> None:
        pp.begin(self.blocks, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.a(x))


@toy("4", outcome=Outcome.REFUSED)
class BeginInsideABlock(Net):
    def mark(self) -> None:
        pp.begin(self.b, 1)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            return self.b(self.a(x))


@toy("4", "3.30", outcome=Outcome.REFUSED)
class BeginGoesBack(Net):
    """A shared module is begun again later: the stage would go back to an earlier one."""

    def mark(self) -> None:
        pp.begin(self.a, 1)
        pp.begin(self.b, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(self.c(x))))


@toy("4", outcome=Outcome.REFUSED)
class CutpointsAndNumberedBlocks(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        h = pp.cutpoint(self.b(h))
        with pp.stage(1):
            return self.c(h)


@toy("4", outcome=Outcome.REFUSED)
class LeadingCutpoint(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = pp.cutpoint(x)
        h = pp.cutpoint(self.a(x))
        return self.b(h)


@toy("4", outcome=Outcome.REFUSED, outcome_with_loss=Outcome.EQUAL)
class TrailingCutpoint(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = pp.cutpoint(self.a(x))
        return pp.cutpoint(self.b(h))


@toy("4", outcome=Outcome.REFUSED)
class AdjacentCutpoints(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = pp.cutpoint(pp.cutpoint(self.a(x)))
        return self.b(h)


@toy("6.6", "3.20", outcome=Outcome.REFUSED)
class AssignedBufferIsWrittenInAnotherStage(Net):
    """The written tensor is stage 0's result by now, and still the model's buffer."""

    def setup(self) -> None:
        self.register_buffer("level", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.level = self.level * 0.5 + h.detach().mean(0)
        with pp.stage(1):
            self.level.mul_(0.9)
            return self.b(h)


class KeepsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.state = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.state = y.detach().mean(0)
        return y


@toy("6.7", outcome=Outcome.REFUSED)
class StateSetInsideAModuleIsReadInAnotherStage(Net):
    """What the module kept of the micro-batch before is read in glue of a stage that runs earlier."""

    def setup(self) -> None:
        self.keeps = KeepsState()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + self.keeps.state
        with pp.stage(1):
            return self.keeps(h)


@toy("3.11", "6.10", outcome=Outcome.REFUSED)
class VmapClosesOverItsOwnArgument(Net):
    """The tensor is among the arguments too, but the function finds it by a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(torch.vmap(lambda row: row * h.sum())(h))


@toy("6.7", "6.8", outcome=Outcome.REFUSED)
class StateThatIsNoneAtFirst(Net):
    """The first micro-batch finds no state, the second one does: they do not run the same code."""

    def setup(self) -> None:
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            if self.state is not None:
                h = h + self.state
            self.state = h.detach()
        with pp.stage(1):
            return self.b(h)


@toy("6.7", "6.8", outcome=Outcome.REFUSED)
class StateThatGrows(Net):
    def setup(self) -> None:
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.history.append(h.detach())
            h = h + sum(self.history)
        with pp.stage(1):
            return self.b(h)


@toy("6.8", "3.18", outcome=Outcome.REFUSED)
class FirstCallIsAnother(Net):
    """Settles after the first call, yet the first micro-batch must run what the first call ran."""

    def setup(self) -> None:
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            if self.first:
                h = h * 2
                self.first = False
        with pp.stage(1):
            return self.b(h)


@toy("6.8", "3.18", outcome=Outcome.REFUSED)
class LazyTableOfRandomNumbers(Net):
    """Built once, from numbers that a recording must not draw for the user."""

    def setup(self) -> None:
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            if self.table is None:
                self.table = torch.rand(4)
            h = h * self.table
        with pp.stage(1):
            return self.b(h)
