"""Toys about the shape of the stage graph: visits, skips, branches, joins, stages without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, tensors, toy

__all__: list[str] = []


@toy("3.4", "5.9", stages="0 1 2", edges="0>1 1>2")
class PositionsGoToEachConsumer(Net):
    """Made of constants only: repeated where it is used, never sent."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1)
        with pp.stage(0):
            h = self.a(x) + positions
        with pp.stage(1):
            h = self.b(h) * positions
        with pp.stage(2):
            return self.c(h) - positions


@toy("5.9", inputs=lambda: ((torch.randn(4, 4), torch.tensor([4, 3, 2, 1])), {}), stages="0 1", edges="0>1")
class MaskOfAnInputGoesToEachConsumer(Net):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
        with pp.stage(0):
            h = self.a(x).masked_fill(~mask, 0.0)
        with pp.stage(1):
            return self.b(h).masked_fill(~mask, -1.0)


@toy("3.5", stages="0 1 0'", edges="0>1 1>0'")
class ReturnToAnEarlierStage(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(0):
            return self.c(h)


@toy("3.5", stages="0 1", edges="0>1 0>1")
class ReturnWithoutADependencyIsOneVisit(Net):
    """The second block of stage 0 does not wait for stage 1: joining it closes no cycle."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
        with pp.stage(0):
            g = self.c(h)
        with pp.stage(1):
            return self.d(y) + g


@toy("3.5", stages="0 1 0' 1'", edges="0'>1' 0>1,1' 1>0'")
class PingPong(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            skip = self.a(x)
        with pp.stage(1):
            h = self.b(skip)
        with pp.stage(0):
            h = self.c(h)
        with pp.stage(1):
            return self.d(h) + skip


@toy("3.5", stages="0 1 2 1' 0'", edges="0>1,0' 1'>0' 1>2,1' 2>1'")
class SmallUnet(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            e0 = self.a(x).relu()
        with pp.stage(1):
            e1 = self.b(e0).relu()
        with pp.stage(2):
            h = self.c(e1)
        with pp.stage(1):
            h = torch.cat([h, e1], dim=-1)[:, ::2]
        with pp.stage(0):
            return self.d(h + e0)


@toy("5.9", stages="0 1 2 3", edges="0>1,3 1>2 2>3")
class SkipOverTwoStages(Net):
    """One value, one edge, sent directly to both consumers."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            skip = self.a(x)
        with pp.stage(1):
            h = self.b(skip)
        with pp.stage(2):
            h = self.c(h)
        with pp.stage(3):
            return self.d(h + skip)


@toy("3.24", outcome="sum-order", stages="0 1 2 3", edges="0>1,2,3 1>3 2>3")
class FanOutToThree(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            left = self.b(h)
        with pp.stage(2):
            right = self.c(h)
        with pp.stage(3):
            return self.d(left * right + h)


@toy("4", stages="in left right out", edges="in>left,right left>out right>out")
class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("in"):
            h = self.a(x)
        with pp.stage("left"):
            left = self.b(h)
        with pp.stage("right"):
            right = self.c(h)
        with pp.stage("out"):
            return self.d(left + right)


@toy("4", inputs=tensors((4, 4), (4, 4)), stages="image text join", edges="image>join text>join")
class TwoTowers(Net):
    """Two starts: neither stage waits for the other."""

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        with pp.stage("image"):
            image = self.a(image)
        with pp.stage("text"):
            text = self.b(text)
        with pp.stage("join"):
            return image @ text.T


@toy("4", stages="0 1 2 3 4", edges="0>1,2,3 1>4 2>4 3>4")
class ExpertsInALoop(Net):
    """One float64 sum over three experts, so that the order of the sum cannot be seen."""

    def setup(self) -> None:
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        outputs = []
        for number, expert in enumerate(self.experts):
            with pp.stage(1 + number):
                outputs.append(expert(h.detach()))
        with pp.stage(4):
            return self.d(torch.stack(outputs).sum(0))


@toy("3.8", stages="0 1 2", edges="0>1 0>2")
class SeveralResultsOfOneStage(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
            gate = self.b(x).sigmoid()
        with pp.stage(1):
            y = self.c(h)
        with pp.stage(2):
            return y, self.d(gate)


@toy("3.8", outcome="sum-order", stages="0 1 2", edges="0>1,2 1>2")
class OutputsFromEveryStage(Net):
    """Also an intermediate value is both an output and an edge: its gradient is the sum of both."""

    def forward(self, x: Tensor) -> list[Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            g = self.b(h)
        with pp.stage(2):
            y = self.c(g) * h
        return [h, g, y]


@toy("3.8")
class SameTensorTwiceInTheOutput(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
        return {"y": y, "again": y}


@toy("3.8", stages="0 1", edges="0>1")
class SameValueUnderTwoNamesCrossesOnce(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            alias = h
        with pp.stage(1):
            return self.b(h) + self.c(alias)


@toy("4", stages="0 1 2", edges="0>2 1>2")
class UnusedStageOutput(Net):
    """What stage 1 makes besides is never used: it is run, and not sent."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.d(x)
        with pp.stage(1):
            g = self.b(x)
        with pp.stage(2):
            return self.c(h + g)


@toy("4", stages="0 1 2", edges="0>1 1>2")
class StageWithoutParameters(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = h.softmax(-1) * 2
        with pp.stage(2):
            return self.c(h)


@toy("4", stages="0 1 2")
class FrozenStage(Net):
    """Gradients pass through a stage that has nothing to train."""

    def setup(self) -> None:
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(2):
            return self.c(h)


@toy("4", stages="0 1")
class FrozenFirstStage(Net):
    """Nothing before the border needs a gradient: none flows back."""

    def setup(self) -> None:
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("4")
class MixedRequiresGrad(Net):
    def setup(self) -> None:
        self.a.weight.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("4")
class Float64(Net):
    def setup(self) -> None:
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x.double())
        with pp.stage(1):
            return self.b(h)


def needs_gradient() -> Any:
    return (torch.randn(4, 4, requires_grad=True),), {}


@toy("4", inputs=needs_gradient, outcome="sum-order")
class InputNeedsGradient(Net):
    """The caller's tensor gets its gradient from both stages that use it."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) + self.c(x) * x


@toy("5.9", stages="0 1", edges="0>1")
class EdgeThatIsAProperty(Net):
    """An edge must not take the name of a builtin in the program that receives it."""

    def setup(self) -> None:
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).T
        with pp.stage(1):
            return self.blocks[0](h)
