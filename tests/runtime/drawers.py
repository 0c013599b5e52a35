"""Small models that draw random numbers, in every way that torch offers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Own(nn.Module):
    """A block: a linear layer, and something that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)
        self.other = nn.Dropout(0.2)


class Once(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(self.linear(x)))


class SameTwice(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(self.drop(self.linear(x))))


class Calls(Own):
    """Draws by its own code, more than once, and between the calls of modules."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.linear(x), 0.3, self.training)
        h = functional.dropout(h, 0.3, training=False) + self.drop(h)
        return functional.dropout(self.inner(h), 0.2, self.training)


class OwnThenChild(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(functional.dropout(self.linear(x), 0.3, self.training)))


class Noise(Own):
    """Draws out of nothing, in place, and integers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) + torch.rand_like(x) * torch.randn(WIDTH, dtype=x.dtype)
        keep = torch.empty_like(x).bernoulli_(0.7)
        h = self.inner(h * keep)
        return h[:, torch.randperm(WIDTH)] + torch.randint(3, (1,)) + torch.normal(0.0, 1.0, (WIDTH,)).to(x)


class Kinds(Own):
    def forward(self, x: Tensor) -> Tensor:
        h = functional.rrelu(self.linear(x), training=self.training)
        h = functional.alpha_dropout(h, 0.1, self.training)
        h = self.inner(h) * functional.gumbel_softmax(h)
        return h + functional.feature_alpha_dropout(h[:, :, None], 0.2, self.training)[:, :, 0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x)[:, None].expand(-1, 3, -1)).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x)[:, None].expand(-1, 3, -1))[0].sum(1)


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.3) * torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Custom(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(_Noisy.apply(self.linear(x))))


class Checkpointed(Own):
    """Recomputes code that draws twice by itself and by a module that it calls twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.part, self.linear(x), use_reentrant=False)
        return functional.dropout(checkpoint(self.part, self.inner(h), use_reentrant=False), 0.2, self.training)

    def part(self, x: Tensor) -> Tensor:
        h = self.drop(functional.dropout(x, 0.3, self.training))
        return h.sin() + functional.dropout(self.drop(h.cos()), 0.1, self.training)


class CheckpointedModules(Own):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(self.drop, self.inner, self.other, nn.GELU(), self.drop)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.part, self.linear(x), use_reentrant=False)
        return checkpoint(self.part, h, use_reentrant=False)


class ByNumbers(nn.Module):
    """Decides by numbers what it does, so that it is never cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = Deciding()

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.inner(self.linear(x)), 0.1, self.training)


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(x, 0.3, self.training)
        if float(h.detach().sum()) > 0:
            h = functional.dropout(h, 0.1, self.training)
        return functional.dropout(h, 0.2, self.training)


class Seeding(nn.Module):
    """A module inside seeds torch by itself, as some do to make a fixed table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = Table()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(self.drop(self.linear(x))))


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        torch.manual_seed(3)
        table = torch.rand(WIDTH).to(x)
        torch.set_rng_state(state)
        return x * table


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Once, SameTwice, Calls, OwnThenChild, Noise, Kinds, Attention, Recurrent, Custom, Checkpointed,
        CheckpointedModules, ByNumbers, Seeding,
    )
}  # fmt: skip


class Net(nn.Module):
    """Blocks in a row; the loss function draws, too."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(KINDS[kind]() for kind in kinds)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(functional.dropout(output, 0.1), target)
