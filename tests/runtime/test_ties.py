from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp

WORDS, WIDTH = 7, 4


class Language(nn.Module):
    """The table of words is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.adapter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        with pp.stage(0):
            h = self.table(x)
        with pp.stage(1):
            h = torch.tanh(self.inner(h)) + h
        with pp.stage(2):
            h = torch.tanh(self.adapter(h)) + h
        with pp.stage(3):
            return self.head(h)


class Nest(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.core = nn.ModuleDict({"inner": inner})


class Nested(nn.Module):
    """Three ties with nested names, met in one order by the first stage and in the other by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Nest(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.ModuleList(Nest(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        for one, two in zip(self.first, reversed(self.last), strict=True):
            two.core["inner"].weight = one.core["inner"].weight

    def forward(self, x):
        h = functional.one_hot(x, WIDTH + 3)[:, :WIDTH].double()
        with pp.stage(0):
            for nest in self.first:
                h = torch.tanh(nest.core["inner"](h))
        with pp.stage(1):
            h = torch.tanh(self.middle(h))
        with pp.stage(2):
            for nest in self.last:
                h = torch.tanh(nest.core["inner"](h))
        with pp.stage(3):
            return torch.cat([h, h[:, :3]], 1)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randint(WORDS, (8,)), torch.randint(WORDS, (8,))


def piped(model: nn.Module, **options: Any) -> pp.Pipeline:
    x, y = batch()
    return pp.pipeline(model, (x[:2],), targets=y[:2], loss=functional.cross_entropy, microbatches=4, **options)


def trained(pipe: pp.Pipeline, whole: nn.Module, steps: int, thaw: int | None = None) -> None:
    """Train both for so many steps with weight decay, and hold this process's parameters to the whole model's."""
    x, y = batch()
    model = pipe.module
    one = torch.optim.AdamW(pipe.parameters(), lr=0.05, weight_decay=0.1)
    two = torch.optim.AdamW(whole.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(steps):
        if step == thaw:
            for target in (model, whole):
                target.table.weight.requires_grad_(True)
        pipe.step(x, targets=y)
        functional.cross_entropy(whole(x), y).backward()
        for name, parameter in pipe.named_parameters():
            expected = whole.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), name
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-9, atol=1e-12)


PLACEMENTS = {"loop": {0: 0, 1: 1, 2: 0, 3: 1}, "v": {0: 0, 1: 1, 2: 1, 3: 0}, "one each": {0: 0, 1: 1, 2: 2, 3: 3}}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tied_table_and_head_train_like_one_parameter(placement: str) -> None:  # UR-010, UR-011
    trained(piped(made(Language), placement=PLACEMENTS[placement]), made(Language), 5)


def test_several_ties_with_nested_names_are_kept_in_any_order() -> None:  # UR-015
    pipe = piped(made(Nested))
    assert len(pipe.graph.ties) == 3
    trained(pipe, made(Nested), 4)


def test_a_frozen_tie_has_no_gradient_until_it_is_thawed() -> None:  # UR-016
    model, whole = made(Language), made(Language)
    for target in (model, whole):
        target.table.weight.requires_grad_(False)
    trained(piped(model), whole, 4, thaw=2)
