"""Stages whose backward is hard to split, each as a function of a module and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Hard:
    """A module, its input, and what its stage says about itself."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 4)
    whole: tuple[str, ...] = ()
    # The order in which autograd adds more than two parts of one gradient may differ.
    exact: bool = True


class Call(nn.Module):
    """A function over parts."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


class Twice(torch.autograd.Function):
    """A product whose backward computes both gradients whatever is asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Plain(torch.autograd.Function):
    """A custom function without weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def square(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (4, 4))) * 0.5)


def _views(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :2] = m.w[:3, :2]
    y[:, 1:].mul_(m.b[1:])
    return torch.tanh((y @ m.w).add_(m.b))


def _hooked(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.one(x)
    h.register_hook(lambda gradient: gradient * 2)
    return m.two(torch.tanh(h))


def _sparse(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + m.table(torch.tensor([1, 0, 1])))


def _bag(m: Any, x: torch.Tensor) -> torch.Tensor:
    index = torch.tensor([[0, 1, 2, 0], [1, 1, 2, 2], [2, 0, 1, 0]])
    return functional.embedding_bag(index, m.w, per_sample_weights=x, mode="sum", sparse=True)


def _lengths(m: Any, x: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0]


def _in_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.vmap(lambda row: row @ m.w)(x)


HARD: dict[str, Hard] = {
    "linear": Hard(lambda: nn.Linear(4, 4)),
    "deep": Hard(
        lambda: nn.Sequential(*[p for _ in range(4) for p in (nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))])
    ),
    "residual": Hard(lambda: Call(lambda m, x: x + m.a(x + m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))),
    "weight used twice on one path": Hard(lambda: Call(lambda m, x: torch.tanh(x @ m.w) @ m.w, w=square())),
    "weight used twice through linear": Hard(lambda: Call(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(4, 4))),
    "weight used five times": Hard(
        lambda: Call(lambda m, x: [x := torch.tanh(m.a(x)) for _ in range(5)][-1], a=nn.Linear(4, 4))
    ),
    "weight shared by branches": Hard(lambda: Call(lambda m, x: m.a(x) * torch.tanh(m.a(x * 2)), a=nn.Linear(4, 4))),
    "weight times itself": Hard(lambda: Call(lambda m, x: x @ (m.w @ m.w), w=square())),
    "made weight used twice": Hard(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), exact=False
    ),
    "weight and its norm": Hard(lambda: Call(lambda m, x: (x @ m.w).sum(1) + m.w.square().sum(), w=square())),
    "broadcast": Hard(lambda: Call(lambda m, x: (x + m.b) * m.s + m.one, b=square(4), s=square(1, 4), one=square(1))),
    "expanded weight": Hard(lambda: Call(lambda m, x: x * m.b.expand(3, 4) + m.b.view(1, 4), b=square(4))),
    "other type": Hard(lambda: Call(lambda m, x: (x.float() * m.w.float()).double() + m.w, w=square(4))),
    "conv": Hard(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.ConvTranspose2d(3, 2, 3)),
        (2, 2, 5, 5),
    ),
    "group norm": Hard(
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(4), nn.InstanceNorm1d(4, affine=True)), (2, 4, 6)
    ),
    "attention": Hard(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "recurrent": Hard(lambda: Call(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 5, 2)), (3, 2, 4), exact=False),
    "packed sequence": Hard(lambda: Call(_lengths, rnn=nn.GRU(4, 3, batch_first=True)), (2, 3, 4), exact=False),
    "einsum": Hard(lambda: Call(lambda m, x: torch.einsum("ij,jk,kl->il", x, m.w, m.v), w=square(), v=square())),
    "bilinear": Hard(lambda: Call(lambda m, x: m.a(x, torch.tanh(x)), a=nn.Bilinear(4, 4, 3))),
    "embedding": Hard(lambda: Call(_sparse, table=nn.Embedding(3, 4))),
    "sparse gradient": Hard(lambda: Call(_bag, w=square())),
    "cat and index": Hard(lambda: Call(lambda m, x: torch.cat([x, m.w])[::2].cumsum(0), w=square())),
    "where": Hard(lambda: Call(lambda m, x: torch.where(x > 0, x @ m.w, m.b), w=square(), b=square(4))),
    "unbind": Hard(lambda: Call(lambda m, x: sum(map(torch.mul, x.unbind(0), m.w.unbind(0))), w=square())),
    "in place on views": Hard(lambda: Call(_views, w=square(), b=square(4))),
    "complex": Hard(lambda: Call(lambda m, x: (torch.complex(x, 2 * x) @ torch.complex(m.w, m.w)).abs(), w=square())),
    "vmap": Hard(lambda: Call(_in_rows, w=square())),
    "tensor hook": Hard(lambda: Call(_hooked, one=nn.Linear(4, 4), two=nn.Linear(4, 4))),
    "no weights": Hard(lambda: nn.GELU()),
    "passes its input": Hard(lambda: Call(lambda m, x: (x, m.a(x)), a=nn.Linear(4, 4))),
    "gives a weight": Hard(lambda: Call(lambda m, x: (x @ m.w, torch.tanh(m.w)), w=square())),
    "ignores its input": Hard(lambda: Call(lambda m, x: (torch.tanh(m.w), x.detach()), w=square())),
    "frozen in part": Hard(
        lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 4))
    ),
    "custom without weights": Hard(
        lambda: Call(lambda m, x: m.b(Plain.apply(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    ),
    "custom": Hard(
        lambda: Call(lambda m, x: m.b(Twice.apply(m.a(x), m.w)), a=nn.Linear(4, 4), b=nn.Linear(4, 4), w=square()),
        whole=("TwiceBackward",),
    ),
    "custom at the border": Hard(lambda: Call(lambda m, x: Twice.apply(x, m.w), w=square()), whole=("TwiceBackward",)),
    "custom with a shared weight": Hard(
        lambda: Call(lambda m, x: Twice.apply(torch.tanh(x @ m.w), m.w) @ m.w, w=square()),
        whole=("TwiceBackward",),
        exact=False,
    ),
    "checkpoint": Hard(
        lambda: Call(
            lambda m, x: m.b(checkpoint(nn.Sequential(m.a, nn.Tanh(), m.c), x, use_reentrant=False)),
            a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4),
        ),
        whole=("AddmmBackward0 under saved-tensor hooks",),
    ),
    "checkpoint of all": Hard(
        lambda: Call(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=nn.Linear(4, 4)),
        whole=("AddmmBackward0 under saved-tensor hooks",),
    ),
    "reentrant checkpoint": Hard(
        lambda: Call(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
        whole=("CheckpointFunctionBackward",),
    ),
    "compiled": Hard(
        lambda: Call(
            lambda m, x: m.b(torch.compile(m.a, backend="aot_eager")(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
        ),
        whole=("CompiledFunctionBackward",),
    ),
    "functional linear": Hard(lambda: Call(lambda m, x: functional.linear(x, m.w * 2, m.b), w=square(), b=square(4))),
}  # fmt: skip
