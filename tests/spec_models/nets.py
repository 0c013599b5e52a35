"""Small models that specs are tried on; none of them knows of stages unless its name says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ppdsl as pp


class Chain(nn.Module):
    """Embedding, blocks, head: the shape of a language model."""

    def __init__(self, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.h = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


class TiedChain(Chain):
    """The head uses the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Branches(nn.Module):
    """Two branches that do not know of each other, and a join."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.join = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.join(self.left(x) * torch.tanh(self.right(x)))


class Skip(nn.Module):
    """A small U: what the first module makes is used by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.tanh(self.down(x))
        return self.up(torch.cat([self.middle(fine), fine], dim=-1))


class Twice(nn.Module):
    """One block, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Block(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.block(self.first(x))))


class Rotary(nn.Module):
    """Tables of angles: no parameter, a buffer, and an activation that is looked at for its type alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequency", 0.5 ** torch.arange(width // 2, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].to(self.frequency.dtype) @ self.frequency[None, :]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Rotated(nn.Module):
    """Blocks that all use the tables."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.rotary = Rotary(width)
        self.layers = nn.ModuleList(RotatedBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        tables = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(x)


class RotatedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = tables
        left, right = x.chunk(2, dim=-1)
        return x + self.mix(torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1))


class Annotated(nn.Module):
    """A model with marks of its own: a block, an optional cutpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("early"):
            x = self.a(x)
            x = pp.cutpoint(x, "middle", optional=True)
            x = self.b(torch.tanh(x))
        with pp.stage("late"):
            return self.c(x)


class Steered(nn.Module):
    """Numbers decide the way through `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Choice(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if float(x.sum()) > 0 else self.two(x)


def tokens(rows: int = 2, length: int = 5) -> Tensor:
    """Return token numbers, always the same."""
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(3))


def vectors(rows: int = 2) -> Tensor:
    """Return rows of eight numbers, always the same."""
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def made(kind: type[nn.Module]) -> nn.Module:
    """Return a model in float64, always with the same numbers."""
    torch.manual_seed(7)
    return kind().double()
