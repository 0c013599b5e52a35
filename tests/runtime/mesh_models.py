"""A model with a skip connection and two tied parameters, its batches, and the plain loop that replicas must equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp

ROWS = 2
WORDS = 7
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Talk(nn.Module):
    """Four stages; the table is used by the first and the last one, the gain by the second and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.gain = nn.Parameter(torch.rand(6) + 0.5)
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.LayerNorm(6)

    def forward(self, tokens):
        with pp.stage(0):
            skip = x = self.table(tokens)
        with pp.stage(1):
            x = torch.tanh(self.a(x)) * self.gain
        with pp.stage(2):
            x = torch.tanh(self.b(x))
        with pp.stage(3):
            return functional.linear(self.norm(x + skip) * self.gain, self.table.weight)


class Block(nn.Module):
    """Two layers that tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Tall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(4)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            with pp.stage(number):
                x = block(x)
        with pp.stage(1):
            return self.norm(x)


def tall(seed: int = 2) -> Tall:
    torch.manual_seed(seed)
    return Tall().double()


def cross_entropy(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def summed(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")


def made(seed: int = 5) -> Talk:
    torch.manual_seed(seed)
    return Talk().double()


def batch(number: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step, that of all replicas."""
    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(WORDS, (rows, 3), generator=generator)
    return tokens, torch.randint(WORDS, (rows, 3), generator=generator)


def share(tensors: Iterable[Tensor], replica: int, replicas: int) -> list[Tensor]:
    """Return what one replica gets of a batch."""
    return [tensor.chunk(replicas)[replica] for tensor in tensors]


def piped(model: nn.Module, microbatches: int, loss: Any = cross_entropy, **options: Any) -> pp.Pipeline:
    tokens, words = batch(0, ROWS)
    given = {"timeout": 20.0, **options}
    return pp.pipeline(model, (tokens,), targets=words, loss=loss, microbatches=microbatches, **given)


def assert_trained_alike(pipe: pp.Pipeline, whole: nn.Module, what: str) -> None:
    """Compare what this rank holds with the plain model: parameters, and gradients with their None-ness."""
    for name, parameter in pipe.named_parameters():
        other = whole.get_parameter(name)
        assert_close(full(parameter), other.detach(), f"{what}: {name}")
        assert (parameter.grad is None) == (other.grad is None), f"{what}: {name}"
        if other.grad is not None:
            assert_close(full(parameter.grad), other.grad, f"{what}: gradient of {name}")


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, theirs, **TIGHT, msg=lambda text: f"{what}: {text}")


def full(tensor: Any) -> Tensor:
    """Return the whole of a tensor, also of one whose shards lie on several ranks."""
    found: Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found
