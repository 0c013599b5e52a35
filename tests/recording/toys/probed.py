"""Toys about modules that need numbers while they run: tried on real tensors, then called whole."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, Outcome, matrix, tensors, toy

__all__: list[str] = []


class SkipsByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.inner(x)
        return x


@toy("3.3", "3.14", inputs=lambda: ((torch.randn(4, 4) + torch.randn(()).sign() * 3,), {}))
class ModuleReturnsItsInputByValue(Net):
    """Skips in one micro-batch and not in the other: decided anew each time it runs."""

    def setup(self) -> None:
        self.skips = SkipsByValue()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + x
        with pp.stage(1):
            return self.b(self.skips(h))


class ItemInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return self.inner(x) / (1 + scale)


@toy("3.14")
class ItemInsideAModule(Net):
    def setup(self) -> None:
        self.item = ItemInside()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.item(h))


class NumpyInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = np.argsort(x.detach().numpy()[:, 0]).tolist()
        return self.inner(x)[order]


@toy("3.14")
class NumpyInsideAModule(Net):
    def setup(self) -> None:
        self.sorter = NumpyInside()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.sorter(self.a(x))
        with pp.stage(1):
            return self.b(h)


class Routed(nn.Module):
    """Sends each row to one of its experts: sizes inside depend on values, the size outside does not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return out


@toy("3.14", inputs=tensors((16, 4)))
class MixtureOfExpertsInsideAModule(Net):
    def setup(self) -> None:
        self.moe1, self.moe2 = Routed(), Routed()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.moe1(self.a(x))
        with pp.stage(1):
            return self.b(self.moe2(h) + h)


class BranchInsideWithBuffer(nn.Module):
    """Probed on random numbers: its buffer must not remember them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return self.norm(x) if x.mean() > -100 else x


@toy("3.14")
class ProbedModuleWithBuffers(Net):
    def setup(self) -> None:
        self.branch = BranchInsideWithBuffer()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.branch(self.a(x))
        with pp.stage(1):
            return self.b(h)


class BranchDeepInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(ItemInside(), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x


@toy("3.14", outcome="sum-order")
class DataDependentDeepInside(Net):
    """The smallest module around it is probed, its parents are recorded as usual."""

    def setup(self) -> None:
        self.deep = BranchDeepInside()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.deep(self.a(x))
        with pp.stage(1):
            return self.deep(self.b(h))


@toy(
    "3.14",
    inputs=lambda: (
        (torch.randn(6, 2, 4), torch.randint(1, 4, (2, 3)), torch.tensor([6, 6]), torch.tensor([3, 2])),
        {},
    ),
)
class ProbedSingleCall(Net):
    """ctc_loss reads its lengths on the host."""

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).log_softmax(-1)
        with pp.stage(1):
            return F.ctc_loss(self.b(h).log_softmax(-1), labels, lengths, label_lengths)


class DynamicRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


@toy("6.3", "3.14", outcome=Outcome.REFUSED, inputs=matrix)
class SizeOverABorderDependsOnValues(Net):
    def setup(self) -> None:
        self.rows = DynamicRows()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.rows(self.a(x))
        with pp.stage(1):
            return self.b(h).sum(0)


@torch.library.custom_op("ppdsl_toys::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3)


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Cubes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cube(x)


@toy("3.14")
class CustomOperatorWithoutFake(Net):
    """Nobody can say what it gives without running it."""

    def setup(self) -> None:
        self.cubes = Cubes()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.cubes(self.a(x))
        with pp.stage(1):
            return self.b(h)
