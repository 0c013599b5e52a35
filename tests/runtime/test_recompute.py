"""Stages that run forward again in backward: the same numbers, the same state, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp

MICROBATCHES, ROWS, WIDTH = 4, 3, 8


class Tracks(nn.Module):
    """Its output follows from numbers that it changes at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * h.detach().abs().mean(0)
        return h * self.mean


class Accumulates(nn.Module):
    """Writes its buffer in place, and saves what it read of it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.seen.add_(h.detach().sum(0))
        return h * (self.seen * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), Tracks())
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Accumulates(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("first"):
            h = self.a(x)
        with pp.stage("second"):
            self.calls += h.detach().mean(0)
            return self.b(h * (self.calls + 0)) + h


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.append(nn.Dropout(0.5))


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=chance, dtype=torch.float64)
    return x, y


def trained(model: nn.Module, steps: int = 2, **options: Any) -> tuple[list[float], nn.Module]:
    x, y = batch()
    pipe = pp.pipeline(
        model, (x[:ROWS],), targets=y[:ROWS], loss=nn.functional.mse_loss, microbatches=MICROBATCHES, **options
    )
    torch.manual_seed(5)
    losses = [pipe.step(x, targets=y).loss.item() for _ in range(steps)]
    return losses, model


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for (name, ours), theirs in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, ours), theirs in zip(one.named_buffers(), two.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.filterwarnings("ignore:.*backward-not-split")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble(h1)"])
@pytest.mark.parametrize("recompute", [True, ["first"], ["second"]], ids=["all", "first", "second"])
def test_nothing_but_memory_changes(recompute: Any, schedule: str) -> None:  # UR-124
    losses, model = trained(Net(), schedule=schedule, recompute=recompute)
    expected, plain = trained(Net(), schedule=schedule)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert_same(model, plain)


def test_the_second_forward_drops_what_the_first_one_dropped() -> None:  # UR-125
    losses, model = trained(Dropping(), recompute=True)
    expected, plain = trained(Dropping())
    assert losses == pytest.approx(expected, rel=1e-12)
    assert_same(model, plain)


def test_evaluating_and_no_grad_run_forward_once() -> None:
    x, y = batch()
    model = Net()
    pipe = pp.pipeline(
        model, (x[:ROWS],), targets=y[:ROWS], loss=nn.functional.mse_loss, microbatches=MICROBATCHES, recompute=True
    )
    plain = Net()
    pipe.evaluate(x, targets=y)
    with torch.no_grad():
        for part in x.chunk(MICROBATCHES):
            plain(part)
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(pp.CallError, match=r"recompute names stage 'secnd'(.|\n)*did you mean 'second'"):
        trained(Net(), recompute=["secnd"])


def test_a_spec_says_which_stages_recompute(tmp_path: Any) -> None:
    path = tmp_path / "net.ppspec"
    path.write_text("pipeline net { stage first { a } stage second { rest } with { recompute = full } }")
    losses, model = trained(Net(), spec=path)
    expected, plain = trained(Net())
    assert losses == pytest.approx(expected, rel=1e-12)
    assert_same(model, plain)
