"""Toys about the modes code runs in: gradients on and off, inference, autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, toy

__all__: list[str] = []


@toy("3.21")
class NoGradRegion(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            with torch.no_grad():
                frozen = self.b(h)
        with pp.stage(1):
            return self.c(h) + frozen


@toy("3.21")
class NoGradRegionOverABorder(Net):
    """The whole of stage 0 and the start of stage 1 run without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                h = self.b(h)
        with pp.stage(1):
            return self.c(h)


@torch.no_grad()
def without_gradient(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h) * 2


@toy("3.21")
class NoGradDecorator(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) + without_gradient(self.c, h)


@toy("3.21")
class EnableGradInsideNoGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1), torch.no_grad():
            y = self.b(h)
            with torch.enable_grad():
                z = self.c(h)
        with pp.stage(1):
            return y + z if z.requires_grad and not y.requires_grad else y


@toy("3.21")
class SetGradEnabledStatement(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            torch.set_grad_enabled(False)
            y = self.b(h)
            torch.set_grad_enabled(True)
            return self.c(h) + y


@toy("3.21")
class InferenceRegion(Net):
    """An inference tensor may not be saved for backward; cloned outside, it may."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            with torch.inference_mode():
                scores = self.b(h).softmax(-1)
            scores = scores.clone()
        with pp.stage(1):
            return self.c(h) * scores


@toy("3.21")
class DetachStopsTheGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            target = self.b(h).detach()
        with pp.stage(2):
            return self.c(h) - target


@toy("3.21")
class NoGradientOverABorder(Net):
    """Only a detached value crosses: stage 0 has no backward at all in this output."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).detach()
        with pp.stage(1):
            return self.b(h)


@toy("3.21")
class AutocastRegion(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                h = self.b(h)
        return h.float()


@toy("3.21")
class AutocastUsesAWeightTwice(Net):
    """The region caches the cast weight: its gradient is summed in bfloat16, as in the plain run."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1), torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(h).relu()
            h = self.b(h).relu()
            return self.b(h)


@toy("3.21")
class SeveralAutocastRegions(Net):
    """One weight in two regions: cast once in each. A region without autocast lies inside."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.a(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.a(h.float())
        with pp.stage(1), torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(h)
            with torch.autocast("cpu", enabled=False):
                y = self.c(y.float())
            return self.b(y)


@toy("3.21")
class AutocastOfTheCaller(Net):
    """Glue in an autocast region: matmul is cast, softmax is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pp.stage(0):
                h = x @ self.a.weight
            with pp.stage(1):
                return torch.einsum("ij,kj->ik", h, self.b.weight), h.softmax(-1)


@toy("3.21")
class AutocastInsideAModule(Net):
    def setup(self) -> None:
        self.mixed = MixedPrecision()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.mixed(self.a(x))
        with pp.stage(1):
            return self.b(self.mixed(h))


class MixedPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.requires_grad_(False)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x)).float()


@toy("3.10", "3.21")
class FunctionWithMaterializedGradients(Net):
    """Only one of two results is used: backward gets None for the other."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            left, right = OneUnused.apply(self.a(x))
        with pp.stage(1):
            return self.b(left) + right.detach()


class OneUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is None:
            return right
        return left * 2 if right is None else left + right
