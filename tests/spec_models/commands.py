"""Models for commands: `--model tests/spec_models/commands.py:chain`."""

from __future__ import annotations

from torch import Tensor, nn

from tests.spec_models.nets import Annotated, Branches, Chain, made, tokens, vectors


def chain() -> tuple[nn.Module, tuple[Tensor]]:
    """A chain of four blocks."""
    return made(Chain), (tokens(),)


def branches() -> tuple[nn.Module, tuple[Tensor]]:
    """Two branches and a join."""
    return made(Branches), (vectors(),)


def annotated() -> tuple[nn.Module, tuple[Tensor]]:
    """A model with marks of its own."""
    return made(Annotated), (vectors(),)


class Block(nn.Module):
    """Part of a model that is called as people call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mlp(h)


class Body(nn.Module):
    """Embedding, twelve blocks, norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.h = nn.ModuleList(Block() for _ in range(12))
        self.ln_f = nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        h = self.wte(words)
        for block in self.h:
            h = block(h)
        return self.ln_f(h)


class Gpt(nn.Module):
    """`transformer.h[0]` to `transformer.h[11]`."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.lm_head = Body(), nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.transformer(words))


def twelve() -> tuple[nn.Module, tuple[Tensor]]:
    """A model of twelve blocks."""
    return made(Gpt), (tokens(),)
