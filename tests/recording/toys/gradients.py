"""Toys about what autograd sees: hooks, custom Functions, gradient modes, autocast, checkpoints, transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ppdsl as pp
from tests.recording.toys.base import Net, Outcome, tensors, toy

__all__: list[str] = []


@toy("3.9")
class TensorHookInGlue(Net):
    """Changes the gradient in the stage that made the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            h.register_hook(lambda grad: grad * 3)
        with pp.stage(1):
            return self.b(h.relu())


@toy("3.9")
class TensorHookOnAReceivedTensor(Net):
    """Registered in the consumer, yet it belongs to the producer: it sees the sum of all gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
            y = self.b(h)
        with pp.stage(2):
            return self.c(y) + h


@toy("3.9")
class RetainGradInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            h.retain_grad()
        with pp.stage(1):
            return self.b(h)


@toy("3.9")
class RequiresGradInGlue(Net):
    """A frozen embedding whose output is made to need a gradient, as PEFT does."""

    def setup(self) -> None:
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            h.requires_grad_(True)
        with pp.stage(1):
            return self.b(h)


@toy("3.9")
class AttributeSetOnATensor(Net):
    """`requires_grad = True` is a `__set__`: it returns no tensor, and must not be lost."""

    def setup(self) -> None:
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            h.requires_grad = True
            y = (h * h).sum()
            (slope,) = torch.autograd.grad(y, h, create_graph=True)
        with pp.stage(1):
            return self.b(slope)


class Doubling(torch.autograd.Function):
    """Forward is the identity, backward is not: only the recorded Function knows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor, x.exp()

    @staticmethod
    def backward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return left * ctx.factor * 5 + right * x.exp(), None


@toy("3.10")
class CustomFunctionInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = Doubling.apply(self.a(x))
        with pp.stage(1):
            left, right = TwoResults.apply(self.b(h), 0.5)
            return left + right


bound_apply = Doubling.apply


@toy("3.10")
class CustomFunctionUnderAnotherName(Net):
    """`fn = F.apply`, taken before the recording."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = bound_apply(self.a(x))
        with pp.stage(1):
            local = TwoResults.apply
            return local(self.b(h), 2.0)[0]


class UsesFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(self.inner(x))


@toy("3.10")
class CustomFunctionInAModule(Net):
    def setup(self) -> None:
        self.uses = UsesFunction()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.uses(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.11")
class CheckpointInGlue(Net):
    """Activation checkpointing is kept: the call is run again in backward."""

    def block(self, h: Tensor) -> Tensor:
        return self.b(F.dropout(h, 0.5, self.training)).relu()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = checkpoint(self.a, x, use_reentrant=False)
        with pp.stage(1):
            h = checkpoint(self.block, h, use_reentrant=False)
            return self.c(h)


@toy("3.11", outcome="sum-order")
class CheckpointClosesOverTheLoopVariable(Net):
    """The program runs when the loop is over, and must still add each round's number."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            with pp.stage(number):
                x = checkpoint(lambda h: self.a(h).tanh() + number, x, use_reentrant=False)  # noqa: B023
        return x


@toy("3.11")
class ReentrantCheckpoint(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = checkpoint(self.b, h, use_reentrant=True)
        with pp.stage(2):
            return self.c(h)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@toy("3.11")
class CheckpointInAModule(Net):
    def setup(self) -> None:
        self.block1, self.block2 = Checkpointed(), Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.block1(x)
        with pp.stage(1):
            return self.block2(h)


@toy("3.11")
class VmapInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(torch.vmap(lambda row, other: row * other.sum())(h, x))


@toy("3.11", "6.10", outcome=Outcome.REFUSED)
class VmapClosesOverATensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            g = self.b(h)
            return torch.vmap(lambda row: row * g.sum())(h)


@toy("3.11")
class FunctionalGradInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            slope = torch.func.grad(lambda z: (z.sin() * z).sum())(h)
            return self.b(slope)


@toy("3.11")
class FunctionalCallOfAModule(Net):
    """`torch.func.functional_call` with the module's own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            doubled = {name: p * 2 for name, p in self.b.named_parameters()}
            return torch.func.functional_call(self.b, doubled, (h,))


@toy("3.11", inputs=lambda: ((torch.randn(4, 4), torch.tensor(True)), {}))
class CondInGlue(Net):
    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = torch.cond(flag, lambda t: t.sin(), lambda t: t.cos(), (h,))
            return self.b(h)


@toy("3.31")
class GradientPenaltyWithinAStage(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            z = h.detach().requires_grad_()
            score = self.b(z).tanh().sum()
            (slope,) = torch.autograd.grad(score, z, create_graph=True)
            return self.c(h), slope.pow(2).mean()


@toy("3.31", "6.10", outcome=Outcome.REFUSED)
class GradientPenaltyOverABorder(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h.tanh())
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y, slope.pow(2).mean()


@toy("3.9", "6.5")
class FullBackwardHookWithinOneStage(Net):
    def setup(self) -> None:
        self.b.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.c(self.b(h))


@toy("3.9", "6.5")
class FullBackwardPreHook(Net):
    def setup(self) -> None:
        self.b.register_full_backward_pre_hook(lambda module, got: (got[0].sign(),))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.c(self.b(h))


class Spans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.first(x)
        with pp.stage(1):
            return self.second(h)


@toy("6.5", outcome=Outcome.REFUSED)
class FullBackwardHookOnAModuleThatSpansStages(Net):
    def setup(self) -> None:
        self.spans = Spans()
        self.spans.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.spans(self.a(x))


@toy("6.12", warns=("saved-tensors-hooks",))
class SavedTensorsHooksAroundGlue(Net):
    """Packing to the same numbers: nothing to see in the gradients, and the user is told."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            with pp.stage(0):
                h = self.a(x).sin()
            with pp.stage(1):
                return self.b(h)


def halve_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@toy("3.9")
class PostAccumulateHookOnAParameter(Net):
    """The user's own Parameter objects are used: their hooks fire."""

    def setup(self) -> None:
        self.a.weight.register_post_accumulate_grad_hook(halve_gradient)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.9")
class HookOnAParameter(Net):
    def setup(self) -> None:
        self.b.weight.register_hook(lambda grad: grad * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.10")
class StraightThrough(Net):
    """`x + (hard - x).detach()`, the gradient of one with the value of the other."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            soft = self.a(x).softmax(-1)
            hard = F.one_hot(soft.argmax(-1), 4).to(soft.dtype)
        with pp.stage(1):
            return self.b(hard - soft.detach() + soft)


@toy("3.14", inputs=tensors((2, 3, 4)))
class AttentionInGlue(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            q, k = self.a(x), self.b(x)
        with pp.stage(1):
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None], is_causal=True)
            return self.c(mixed[:, 0])


@toy("3.9")
class BackwardWhileRunning(Net):
    """A backward of its own inside forward: it adds to `.grad` of the layer it used."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            z = h.detach().requires_grad_()
            self.b(z).pow(2).sum().backward()
            return self.c(h) + z.grad


@toy("3.9")
class ParametersAreFrozenForOneCall(Net):
    """As GAN generators do with their critic."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            self.b.requires_grad_(False)
            h = self.b(h)
            self.b.requires_grad_(True)
            return self.c(h)


@toy("3.9")
class DetachInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            target = self.b(h)
            target.detach_()
            return self.c(h) - target
