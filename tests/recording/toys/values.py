"""Toys about values that steer Python: constants, inputs, activations, sizes; and calls nobody can see."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, matrix, tensors, toy

__all__: list[str] = []


@functools.cache
def cached_mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@toy("3.15")
class CachedMask(Net):
    """The cache of the user's module must not keep anything made for the recording only."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * cached_mask(4)
        with pp.stage(1):
            return self.b(h) * cached_mask(4)


@toy("3.15")
class RealConstantsSteerPython(Net):
    def forward(self, x: Tensor) -> Tensor:
        limit = torch.tensor(3) * 2
        with pp.stage(0):
            h = self.a(x)
            if limit > 5 and torch.arange(3).sum().item() == 3:
                h = h * float(limit)
        with pp.stage(1):
            return self.b(h)[: int(torch.tensor([1, 2]).max())]


@toy("3.15")
class ConstantsBuiltInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            mask = torch.full((4, 4), float("-inf")).triu(1)
            h = (self.a(x) + mask).softmax(-1)
        with pp.stage(1):
            table = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
            return self.b(h) * table + torch.eye(4)


@toy("3.11", "3.15")
class FromNumpy(Net):
    """`torch.from_numpy` makes a tensor that no torch function made."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * torch.from_numpy(np.linspace(1, 2, 4, dtype=np.float32))
        with pp.stage(1):
            return self.b(h) + torch.as_tensor(np.float32([1, 2, 3, 4]))


class LayerDrop(Net):
    drop = 0.0

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        for layer in (self.b, self.c):
            with pp.stage(1):
                if torch.rand([]) < self.drop:
                    continue
                h = layer(h)
        with pp.stage(1):
            return self.d(h)


@toy("3.16")
class LayerDropOfZero(LayerDrop):
    """The random number cannot change the branch: it is taken for what it is."""


class DropsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.5 else self.inner(x)


@toy("3.16", "6.2")
class LayerDropInsideAModule(Net):
    def setup(self) -> None:
        self.layers = nn.ModuleList(DropsInside() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        for number, layer in enumerate(self.layers):
            with pp.stage(number // 3):
                h = layer(h)
        return self.b(h)


def all_true() -> Any:
    return (torch.randn(4, 4), torch.ones(4, dtype=torch.bool)), {}


def one_false() -> Any:
    return (torch.randn(4, 4), torch.tensor([True, True, False, True])), {}


@toy("3.17", inputs=all_true, violates=one_false)
class InputValueSteersABranch(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            if not mask.all():
                h = h * mask[:, None]
        with pp.stage(1):
            return self.b(h)


def lengths_to(largest: int) -> Any:
    return (torch.randn(4, 4), torch.tensor([1, largest, 2, 1])), {}


@toy("3.17", inputs=lambda: lengths_to(3), violates=lambda: lengths_to(4))
class InputValueIsASize(Net):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        with pp.stage(0):
            h = self.a(x)[:longest]
        with pp.stage(1):
            return self.b(h)


def labels_with(ignored: int) -> Any:
    return (torch.randn(4, 4), torch.tensor([0, 1, ignored, 3])), {}


@toy("3.17", inputs=lambda: labels_with(2), violates=lambda: labels_with(-100))
class InputIsCheckedInGlue(Net):
    """`if (labels == -100).any()`: an expression of the input is kept, not only the input."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            logits = self.b(h)
            if (labels == -100).any():
                logits = logits[labels != -100]
                labels = labels[labels != -100]
            return F.cross_entropy(logits, labels)


@toy("3.17", inputs=lambda: ((torch.randn(4, 4), torch.tensor([2, 0, 1])), {}))
class InputIsAnIndexOnly(Net):
    """Indexing by an input steers nothing: there is no guard."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)[rows]
        with pp.stage(1):
            return self.b(h)


@toy("3.17", inputs=lambda: ((torch.randn(4, 4), torch.tensor([1, 0, 1, 1])), {}))
class InputValueSteersInsideAModule(Net):
    """The module is called whole: it decides anew in every micro-batch."""

    def setup(self) -> None:
        self.inside = BranchesOnMask()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.inside(self.a(x), mask)
        with pp.stage(1):
            return self.b(h)


class BranchesOnMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x) if bool(mask.all()) else self.inner(x) * mask[:, None]


@toy("6.1")
class WhereOnAnActivation(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        h = torch.where(h.sum() > 0, h * 2, h)
        with pp.stage(1):
            return self.b(h)


@toy("3.27", violates=tensors((8, 4)))
class SizeIsBakedIn(Net):
    """`* x.shape[0]`: a batch of 8 through a plan for 4 would be wrong without a word."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * x.shape[0]
        with pp.stage(1):
            return self.b(h) / len(h)


@toy("3.27", violates=lambda: ((torch.randn(4, 4).double(),), {}))
class DtypeIsBakedIn(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x.float()) if x.dtype == torch.float64 else self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.27", violates=lambda: ((torch.randn(4, 4),), {"scale": 3}))
class NumberArgumentIsBakedIn(Net):
    def forward(self, x: Tensor, scale: int = 2) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * scale
        with pp.stage(1):
            return self.b(h)


@toy("3.27", violates=lambda: ((torch.randn(4, 4), torch.randn(4, 4)), {}))
class OneArgumentTooMany(Net):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) if skip is None else self.b(h) + skip


@toy("3.25")
class DeviceInGlue(Net):
    """`device=x.device` stands for the device of the stage."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + torch.zeros(4, device=x.device)
        with pp.stage(1):
            ones = torch.ones(4, 4, device=h.device, dtype=h.dtype)
            return self.b(h) + h.new_tensor([1.0, 2, 3, 4]) + ones.to(h)


@toy("3.17")
class PrintsItsShapes(Net):
    """`repr`, `len`, `in`, iteration and shape queries of activations steer nothing."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            names = f"{tuple(h.shape)} {h.dtype} {h.requires_grad} {h.dim()} {h.numel()} {h.is_floating_point()}"
        with pp.stage(1):
            rows = [self.b(row) for row in h]
            return torch.stack(rows) * len(names)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2 + 1


class UsesScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return scripted(self.inner(x))


@toy("3.29", "6.9")
class ScriptFunctionInsideAModule(Net):
    def setup(self) -> None:
        self.uses = UsesScript()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.uses(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.17", inputs=matrix)
class SizesAreComputed(Net):
    """Sizes of activations are plain numbers."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        rows, columns = h.shape
        with pp.stage(1):
            h = h.reshape(rows // 2, 2 * columns)[:, :columns]
            return self.b(h) / columns**0.5
