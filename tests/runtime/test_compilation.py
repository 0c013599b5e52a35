"""Stages under `torch.compile`: the same numbers, and a word where something cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp
from tests.trust.entry import differences, keys_of
from tests.trust.graphs import GRAPH_ENTRIES
from tests.trust.structures import STRUCTURE_ENTRIES

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method", "ignore:.*backward-not-split", "ignore:.*not-carried"
)

WIDTH, MICROBATCHES, ROWS = 6, 4, 2
FAST = {"backend": "aot_eager"}


class Net(nn.Module):
    """Statistics, a skip connection, a weight in two stages."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Dropout(rate))
        self.c = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("a"):
            h = self.a(x)
        with pp.stage("b"):
            k = self.b(h) * h.sigmoid()
        with pp.stage("c"):
            k = self.c(k) + h
        with pp.stage("d"):
            return self.a[0](k)


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=chance, dtype=torch.float64)
    return x, y


def trained(model: nn.Module, **options: Any) -> tuple[list[Tensor], pp.Pipeline]:
    x, y = batch()
    given = {"loss": functional.mse_loss, "microbatches": MICROBATCHES} | options
    pipe = pp.pipeline(model, (x[:ROWS],), targets=y[:ROWS], **given)
    found = [pipe.step(x, targets=y, outputs="all") for _ in range(2)]
    state = [*(p.grad for p in model.parameters()), *model.buffers()]
    return [each for step in found for each in (step.loss, step.outputs)] + state, pipe


def plain(model: nn.Module) -> list[Tensor]:
    x, y = batch()
    found = []
    for _ in range(2):
        outputs = []
        for m in range(MICROBATCHES):
            rows = slice(m * ROWS, (m + 1) * ROWS)
            outputs.append(model(x[rows]))
            (functional.mse_loss(outputs[-1], y[rows]) / MICROBATCHES).backward()
        whole = torch.cat(outputs).detach()
        found += [functional.mse_loss(whole, y), whole]
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, {"schedule": "zbv"}, {"schedule": "zero_bubble", "recompute": ["a", "c"]}]
)
def test_compiled_stages_train_like_the_plain_loop(options: dict[str, Any]) -> None:  # UR-083
    found, pipe = trained(Net(), compile=dict.fromkeys("abcd", FAST), **options)
    assert_close(found, plain(Net()))
    said = [text for text in pipe.explain()["warnings"] if "cannot split the backward of `CompiledFunction" in text]
    # The first stage gives no gradient back, so that there is nothing to split.
    assert len(said) == (0 if options["schedule"] == "1f1b" else 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_default_compiler_compiles_a_stage() -> None:
    found, _ = trained(Net(), compile=["c"])
    assert_close(found, plain(Net()))


def test_a_stage_that_draws_is_not_compiled_and_draws_what_it_always_draws() -> None:
    expected, _ = trained(Net(0.5), seed=3)
    with pytest.warns(pp.PpdslWarning, match="stage-not-compiled") as warned:
        found, pipe = trained(Net(0.5), seed=3, compile={"b": FAST})
    text = "Stage b is not compiled: `b.3` draws random numbers"
    assert text in str(warned[0].message)
    assert text in pipe.explain()["warnings"][0]
    assert all(map(torch.equal, found, expected))


def test_a_module_that_decides_by_numbers_may_draw() -> None:
    entry = next(entry for entry in STRUCTURE_ENTRIES if entry.name == "experts")
    with pytest.warns(pp.PpdslWarning, match="`router` is called as a whole and may draw random numbers"):
        assert differences(entry, 2, steps=1, compile={1: FAST}) == []


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(pp.CallError, match=r"compile names stage 'e', which there is not(.|\n)*one of: a, b, c, d"):
        trained(Net(), compile=["e"])


def test_a_spec_says_which_stages_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_fast(module: Any) -> Any:
        compiled.append(module)
        return compiler(module, **FAST)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compile_fast)
    path = tmp_path / "net.ppspec"
    path.write_text("pipeline net { stage first { a } stage second { rest } with { compile = true } }")
    found, _ = trained(Net(), spec=path)
    assert_close(found, plain(Net()))
    assert len(compiled) == 1
    trained(Net(), spec=path, compile=False)
    assert len(compiled) == 1


@pytest.mark.parametrize("name", ["many_kinds", "tied", "containers"])
def test_traps_are_passed_compiled_too(name: str) -> None:
    entry = next(entry for entry in (*GRAPH_ENTRIES, *STRUCTURE_ENTRIES) if entry.name == name)
    assert differences(entry, 2, steps=1, compile=dict.fromkeys(keys_of(entry, 2), FAST)) == []


# ---------------------------------------------------------------- what the user has compiled


def _root(model: Net) -> nn.Module:
    return torch.compile(model, **FAST)


def _blocks(model: Net) -> nn.Module:
    model.a.compile(**FAST)
    model.b = torch.compile(model.b, **FAST)
    return model


def _function(model: Net) -> nn.Module:
    model.c.forward = torch.compile(model.c.forward, **FAST)
    return model


@pytest.mark.parametrize("how", [_root, _blocks, _function])
def test_what_the_user_has_compiled_trains_like_the_plain_loop(how: Callable[[Net], nn.Module]) -> None:  # UR-083
    found, _ = trained(how(Net()), schedule="zero_bubble")
    assert_close(found, plain(Net()))


def _module(part: nn.Module) -> nn.Module:
    return torch.compile(part, **FAST)


def _call(part: nn.Module) -> nn.Module:
    part.compile(**FAST)
    return part


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("how", [_module, _call])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_module_that_the_user_has_compiled_draws_as_a_whole(
    how: Callable[[nn.Module], nn.Module], rate: float
) -> None:
    """With a rate, other code of the stage draws, too."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(functional.dropout(output, rate), target)

    def once(*, in_two: bool) -> list[Tensor]:
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.2))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), how(part), nn.Linear(WIDTH, WIDTH)).double()
        if in_two:
            pp.begin(model[2], 1)
        return trained(model, seed=3, loss=loss)[0]

    expected = once(in_two=False)
    assert all(map(torch.equal, once(in_two=True), expected))
    assert not torch.equal(expected[1], expected[3])
