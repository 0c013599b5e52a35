"""Ties under adapters, in many stages, on meta, after `.to()`; and what would let the copies differ is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.runtime.tie_checks import aliases_of
from tests.runtime.launch import Finished, launch, said
from tests.runtime.test_ties import WIDTH, Language, batch, made, piped, trained

WORKER = Path(__file__).with_name("tie_worker.py")


class Adapted(nn.Module):
    """A frozen layer beside which two small ones learn what to add to it (LoRA, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class AdaptedLanguage(Language):
    """The table is frozen, as the head that it is tied to is an adapter's base."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Adapted(self.head)
        self.inner = Adapted(self.inner)


class Recurrent(nn.Module):
    """One square weight in three of four stages, twice in one of them, and beside others of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x):
        with pp.stage(0):
            h = torch.tanh(self.cell(self.table(x)))
        with pp.stage(1):
            h = torch.tanh(self.cell(torch.tanh(self.cell(h)))) + h
        with pp.stage(2):
            h = torch.tanh(self.own(h)) + h
        with pp.stage(3):
            return self.head(torch.tanh(self.cell(h)))


class Aliased(nn.Module):
    """Two parameters over the same memory, which is not what torch calls tied."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = nn.Parameter(self.a.weight.detach().t() if transposed else self.a.weight.detach())

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


class Neighbours(Aliased):
    """Two parameters that lie in one buffer, one behind the other: nobody sees the other's values."""

    def __init__(self) -> None:
        super().__init__(transposed=False)
        flat = torch.randn(32)
        self.a.weight, self.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))


SCHEDULES = ("1f1b", "gpipe", "zbv", "interleaved_zero_bubble", "zero_bubble(h1)")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [AdaptedLanguage, Recurrent])
def test_they_train_like_one_parameter_under_every_kind_of_schedule(
    kind: type[nn.Module], schedule: str
) -> None:  # UR-011, UR-012, UR-016
    trained(piped(made(kind), schedule=schedule), made(kind), 4)


def test_a_tie_of_three_stages_is_one_of_three_stages() -> None:
    pipe = piped(made(Recurrent))
    assert [(tie.names[0], tie.stages) for tie in pipe.graph.ties] == [
        ("cell.weight", (0, 1, 3)),
        ("cell.bias", (0, 1, 3)),
    ]
    assert [name for name, _ in pipe.named_parameters()].count("cell.weight") == 1


def test_its_norm_counts_once_and_it_is_saved_once(tmp_path: Path) -> None:  # UR-118
    model, whole = made(Recurrent), made(Recurrent)
    pipe = piped(model)
    x, y = batch()
    pipe.step(x, targets=y)
    functional.cross_entropy(whole(x), y).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0.0)
    pp.export_safetensors(made_language := piped(made(Language)), tmp_path / "all.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "all.safetensors", "pt") as opened:
        assert {"table.weight", "head.weight"} & set(opened.keys()) == {"table.weight"}
    assert made_language.graph.ties


@pytest.mark.parametrize("move", ["cpu", "share", "half and back"])
def test_what_keeps_the_objects_keeps_the_tie(move: str) -> None:
    model, whole = made(Language), made(Language)
    pipe = piped(model)
    if move == "cpu":
        model.to("cpu")
    elif move == "share":
        model.share_memory()
    else:
        for target in (model, whole):
            target.half().double()
    trained(pipe, whole, 3)


def test_a_tie_on_meta_is_filled_once_and_trains() -> None:  # UR-014
    with torch.device("meta"):
        model = Language().double()
    whole = made(Language)
    pipe = piped(model)
    assert len(pipe.graph.ties) == 1
    pp.materialize(pipe, whole.state_dict())
    assert model.head.weight is model.table.weight
    trained(pipe, whole, 3)


@pytest.mark.parametrize("how", ["to_empty", "to"])
def test_a_tie_that_was_lost_is_named(how: str) -> None:
    with torch.device("meta" if how == "to_empty" else "cpu"):
        model = Language().double()
    pipe = piped(model)
    if how == "to_empty":
        model.to_empty(device="cpu")
    else:
        for module in (model.table, model.head):
            module.weight = nn.Parameter(module.weight.detach().clone())
    x, y = batch()
    with pytest.raises(pp.CallError, match=r"`head.weight` was tied to `table.weight` when the pipeline was built"):
        pipe.step(x, targets=y)
    # Tied again, it goes on.
    model.head.weight = model.table.weight
    torch.manual_seed(1)
    whole = Language().double()
    model.load_state_dict(whole.state_dict())
    trained(pipe, whole, 2)


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_that_share_memory_without_being_one_are_refused_on_two_ranks(transposed: bool) -> None:
    x = torch.zeros(2, 4)

    def build(model: nn.Module, **options: Any) -> pp.Pipeline:
        return pp.pipeline(model, (x,), loss=lambda y: y.mean(), microbatches=1, **options)

    with pytest.raises(pp.CallError, match=r"`a.weight` and `b.weight` are different parameters that share memory"):
        build(Aliased(transposed=transposed))
    build(Aliased(transposed=transposed), placement={0: 0, 1: 0}).step(x)
    build(Aliased(transposed=transposed).requires_grad_(False))
    build(Neighbours()).step(x)


def test_all_names_of_a_tied_parameter_are_found() -> None:
    assert aliases_of(made(AdaptedLanguage)) == (("table.weight", "head.base.weight"),)


# -------------------------------------------------------------------- in three processes


@pytest.fixture(scope="module")
def three() -> Finished:
    names = ("equal", "meta", "beside", "forgotten", "groups", "refilled", "lost")
    return launch(3, *names, seconds=180.0, worker=WORKER)


@pytest.mark.distributed
@pytest.mark.parametrize("scenario", ["equal", "meta", "beside"])
def test_three_ranks_copies_train_like_one_parameter(
    three: Finished, scenario: str
) -> None:  # UR-010, UR-011, UR-014, UR-016, UR-091
    assert [said(three, rank, scenario) for rank in range(3)] == ["equal"] * 3, three.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("scenario", ["forgotten", "groups", "refilled"])
def test_copies_that_went_apart_end_the_next_step_on_every_rank(
    three: Finished, scenario: str
) -> None:  # UR-017, UR-018, UR-111
    for rank in range(3):
        text = said(three, rank, scenario)
        assert text.startswith("RunError: error["), three.stderr
        assert "copy of the tied parameter `table.weight` is not that of rank 0 any more: they are" in text
        assert "help: step the optimizer on every rank, with the tied parameter in a group of the same options" in text


@pytest.mark.distributed
def test_a_tie_that_one_rank_lost_is_refused_by_all(three: Finished) -> None:
    for rank in range(3):
        text = said(three, rank, "lost")
        assert text.startswith("CallError: error["), three.stderr
        assert "`head.weight` was tied to `table.weight` when the pipeline was built" in text
        assert text.endswith("\nequal")
