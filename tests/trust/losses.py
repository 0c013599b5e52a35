"""Traps in what is added to a loss and in where gradients flow: auxiliary losses, detached values, None gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ppdsl as pp
from tests.trust.entry import Entry, Setup
from tests.trust.graphs import WIDTH, Layers, mean_square, numbers, plain

__all__ = ["LOSS_ENTRIES", "Balanced"]


class Balanced(nn.Module):
    """A router over experts which decides by numbers, and says how uneven it is after each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        share = self.route(h).softmax(-1)
        pp.aux_loss(share.mean(0).square().sum(), 0.3)
        best = share.argmax(-1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                out[chosen] = expert(h[chosen]) * share[chosen, number, None]
            pp.metric("load", chosen.double().mean(), "max")
        return out


class TwoSides(Layers):
    """Losses in the first and the third stage, the main one in the last."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            pp.aux_loss(h.square().mean(), 0.5)
        with pp.stage(1):
            h = self.b(h).tanh()
        with pp.stage(2):
            h = self.c(h)
            for row in range(2):
                pp.aux_loss(h[row].abs().sum(), 0.1)
        with pp.stage(3):
            return self.d(h)


class Experts(Layers):
    def extra(self) -> None:
        self.one, self.two, self.three = Balanced(), Balanced(), Balanced()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.one(self.a(x))
        with pp.stage(1):
            h = self.three(self.two(h)) + h
        with pp.stage(2):
            return self.d(h)


class OnlyBeside(Layers):
    """Stages whose parameters get a gradient from what they say alone."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            k = self.b(h.detach())
            pp.aux_loss(mean_square(k, x))
        with pp.stage(2):
            m = self.c(k.detach())
        with pp.stage(3):
            return self.d(h) + m.detach()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        y = self.layer(x)
        pp.aux_loss(y.square().mean(), weight)
        return y.tanh()


class Surrounded(Layers):
    """Said inside modules that are called whole, twice, under a checkpoint, and in blocks without gradients."""

    def extra(self) -> None:
        self.inner, self.kept = Inside(), Inside()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            with torch.no_grad():
                pp.aux_loss(h.square().sum(), 0.01)
                pp.aux_loss(self.b(x).square().sum())
        with pp.stage(1):
            h = self.inner(self.inner(h), 0.5)
        with pp.stage(2):
            h = checkpoint(self.kept, h, use_reentrant=False)
        with pp.stage(3):
            return self.d(h)


class Parts(Layers):
    """Losses of a parameter, of a stage's input, of one tensor twice, and of a frozen layer."""

    def extra(self) -> None:
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            size = h.square().mean()
            pp.aux_loss(self.frozen(x).square().mean())
        with pp.stage(1):
            h = self.b(h) * self.scale
            pp.aux_loss(pp.aux_loss(size, 0.2), 0.3)
            pp.aux_loss(self.scale, 0.5)
        with pp.stage(2):
            return self.c(h) + size.detach()


def sums(model: type[Layers]) -> Any:
    """Return the setup of a model whose losses are added up."""

    def make(microbatches: int) -> Setup:
        setup: Setup = plain(model)(microbatches)  # type: ignore[operator]
        setup.loss, setup.reduction = (lambda y, t: (y - t).square().sum() / 10), "sum"
        return setup

    return make


class OwnAndBeside(Layers):
    """The model computes its loss itself, in the first of two stages, and goes on."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with pp.stage(0):
            h = self.a(x)
            loss = mean_square(h, labels)
        with pp.stage(1):
            y = self.b(h.detach())
            pp.aux_loss(y.square().mean())
            return {"loss": loss, "logits": y}


def denominators(microbatches: int) -> Setup:
    """The loss is normalised by a count over the whole batch, given as a tensor without axes, and by a number."""
    x, y = numbers(microbatches, WIDTH), numbers(microbatches, WIDTH, seed=1)

    def loss(output: Tensor, target: Tensor, count: Tensor, share: float) -> Tensor:
        return (output - target).square().sum() / count * share

    return Setup(TwoSides(), (x,), targets=(y, torch.tensor(float(x.numel())), 0.5), loss=loss, reduction="sum")


def own_and_beside(microbatches: int) -> Setup:
    return Setup(OwnAndBeside(), (numbers(microbatches, WIDTH),), {"labels": numbers(microbatches, WIDTH, seed=1)})


# ---------------------------------------------------------------- where gradients flow


class Detached(Layers):
    """A value that crosses two borders and is used without its gradient only."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h, k = self.a(x), self.b(x)
        with pp.stage(1):
            h = self.c(h) + k.detach()
        with pp.stage(2):
            return self.d(h) * (k > 0) + k.argmax(-1, keepdim=True)


class Halves(Layers):
    """One stage uses a value with its gradient, another without; a third one passes it on."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h.detach())
            passed = h
        with pp.stage(2), torch.no_grad():
            y = y + self.c(h)
        with pp.stage(3):
            return self.d(y) + passed


class NoLooker(Layers):
    """Outputs that the loss does not look at, of stages that have parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
        with pp.stage(2):
            z = self.c(y)
        with pp.stage(3):
            return h, y, self.d(z)


def no_looker(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    return Setup(NoLooker(), (x,), targets=(x,), loss=lambda output, target: mean_square(output[1], target))


class Written(Layers):
    """Values written over, with and without what was there before, and views of them."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h, k = self.a(x) * 1, self.b(x) * 1
            view = h[:, :2]
            h[:, 2:] = 0.0
        with pp.stage(1):
            y = torch.zeros_like(x)
            y[:, :2] = view
            y[:, 2:] = k.detach()[:, 2:]
        with pp.stage(2):
            return self.c(y) + k.mul(0)


class WrittenView(Layers):
    """A stage receives a view alone and writes into it."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).sin()
            part = h[:, :2]
        with pp.stage(1):
            part += 1
            y = torch.cat([part, part], 1) * self.b(x)
        with pp.stage(2):
            return self.c(y)


class Rounded(torch.autograd.Function):
    """Its second argument gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x * 8).round() / 8 + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class StraightThrough(Layers):
    """A gradient that goes around a step function, by `detach` and by a Function of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = h + (h.sign() - h).detach()
        with pp.stage(2):
            h = Rounded.apply(self.b(h), x)
        with pp.stage(3):
            return self.c(h)


class SomeBatches(Layers):
    """A value counts in every other row only, by a mask: where it does not, its gradient is 0 and not None."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with pp.stage(0):
            h, t = self.a(x), self.b(x)
        with pp.stage(1):
            h = self.c(h)
        with pp.stage(2):
            return self.d(h) + t * mask


def some_batches(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    mask = (torch.arange(len(x)) // 2 % 2 == 1).double()[:, None]
    return Setup(SomeBatches(), (x, mask), targets=(x,), loss=mean_square)


class InputsWithoutGradient(Layers):
    """Raw inputs, floats and integers, that several stages read: none of them is made to require a gradient."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        with pp.stage(0):
            assert not x.requires_grad
            h = self.a(x)
        with pp.stage(1):
            scale = x.mean(-1, keepdim=True)
            h = self.b(h) + F.one_hot(places, WIDTH)
        with pp.stage(2):
            return self.c(h) * scale + places[:, None] + x


def inputs_without_gradient(microbatches: int) -> Setup:
    x = numbers(microbatches, WIDTH)
    return Setup(InputsWithoutGradient(), (x, torch.arange(len(x)) % WIDTH), targets=(x,), loss=mean_square)


class Waves(Layers):
    """Complex values with a gradient, and a complex table without, cross borders."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            turns = torch.polar(torch.ones(WIDTH, dtype=x.dtype), torch.arange(WIDTH, dtype=x.dtype))
            wave = torch.complex(self.a(x), self.b(x))
        with pp.stage(1):
            wave = wave * turns
        with pp.stage(2):
            wave = torch.fft.fft(wave * turns.conj())
        with pp.stage(3):
            return self.c(wave.real) + wave.imag


LOSS_ENTRIES = (
    Entry("two_sides", ("UR-045",), plain(TwoSides)),
    Entry("two_sides_summed", ("UR-045",), sums(TwoSides)),
    Entry("balanced_experts", ("UR-045",), plain(Experts)),
    Entry("only_beside", ("UR-045", "UR-020"), plain(OnlyBeside)),
    Entry("surrounded", ("UR-045",), plain(Surrounded)),
    Entry("parts", ("UR-045",), plain(Parts)),
    Entry("denominators", ("UR-041",), denominators),
    Entry("own_and_beside", ("UR-045",), own_and_beside),
    Entry("detached", ("UR-019", "UR-020"), plain(Detached)),
    Entry("halves", ("UR-019", "UR-022"), plain(Halves)),
    Entry("no_looker", ("UR-020",), no_looker),
    Entry("written", ("UR-019",), plain(Written)),
    Entry("written_view", ("UR-019",), plain(WrittenView)),
    Entry("straight_through", ("UR-020",), plain(StraightThrough)),
    Entry("some_batches", ("UR-019",), some_batches),
    Entry("inputs_without_gradient", ("UR-026", "UR-031"), inputs_without_gradient),
    Entry("waves", ("UR-030",), plain(Waves)),
)
