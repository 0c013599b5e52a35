"""Half precision: autocast in the model and around the step, types on the wire, the same numbers as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp
from tests.trust.graphs import mean_square

WIDTH = 4
HALVES = (torch.bfloat16, torch.float16)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class RegionOverBorders(Layers):
    """An autocast region begins in the first stage and ends in the third; inside is one without."""

    dtype = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                h = self.b(h)
                with torch.autocast("cpu", enabled=False):
                    k = self.c(h.float())
            with pp.stage(2):
                h = self.b(h) + self.c(k)
        with pp.stage(3):
            return self.d(h.float())


class Around(Layers):
    """Runs under whatever autocast is around the step; a norm in single precision in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.norm(self.b(h).float())
        with pp.stage(2):
            return self.d(self.c(h))


class HalfThenSingle(Layers):
    """Parameters of half precision below a head of single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a.to(torch.bfloat16), self.b.to(torch.float16), self.c.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x.to(torch.bfloat16))
        with pp.stage(1):
            h = self.b(h.half())
        with pp.stage(2):
            h = self.c(h.bfloat16())
        with pp.stage(3):
            return self.d(h.float())


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 2 * microbatches, WIDTH, generator=chance)
    return x, y


def assert_trains_alike(
    ours: nn.Module, plain: nn.Module, pipe: pp.Pipeline, microbatches: int, rounded: tuple[str, ...] = ()
) -> None:
    x, y = batch(microbatches)
    result = pipe.step(x, targets=y, outputs="all")
    total = torch.zeros(())
    for number in range(microbatches):
        rows = slice(2 * number, 2 * number + 2)
        output = plain(x[rows])
        loss = mean_square(output.float(), y[rows]) / microbatches
        loss.backward()
        total += loss.detach()
        assert torch.equal(result.outputs[rows], output)
    torch.testing.assert_close(result.loss, total)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs[1].grad is None), name
        if mine.grad is not None:
            assert mine.grad.dtype == theirs[1].grad.dtype, name
            tolerance = 1e-6 if mine.dtype == torch.float32 and name not in rounded else 1e-2
            torch.testing.assert_close(mine.grad, theirs[1].grad, rtol=tolerance, atol=tolerance, msg=name)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output.float(), target)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_region_may_cross_borders(dtype: torch.dtype, schedule: str) -> None:
    x, y = batch(4)
    ours, plain = RegionOverBorders(), RegionOverBorders()
    ours.dtype = plain.dtype = dtype
    pipe = pp.pipeline(ours, (x[:2],), targets=y[:2], loss=loss_of, microbatches=4, schedule=schedule)
    half = str(dtype).removeprefix("torch.")
    assert sorted(edge.meta.dtype for edge in pipe.graph.edges) == sorted([half, half, "float32", half])
    # One device casts a weight once in a region and adds the gradients of all its uses in half precision; two stages
    # cast it twice, and their gradients are added in single precision.
    assert_trains_alike(ours, plain, pipe, 4, rounded=("b.weight", "b.bias", "c.weight", "c.bias"))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_around_the_step_is_that_of_the_model(dtype: torch.dtype) -> None:
    x, y = batch(3)
    ours, plain = Around(), Around()
    pipe = pp.pipeline(ours, (x[:2],), targets=y[:2], loss=loss_of, microbatches=3)
    assert [edge.meta.dtype for edge in pipe.graph.edges] == ["float32", "float32"]
    with torch.autocast("cpu", dtype):
        assert_trains_alike(ours, plain, pipe, 3)
    assert [edge.meta.dtype for edge in pipe.graph.edges] == [str(dtype).removeprefix("torch."), "float32"]
    ours.zero_grad(), plain.zero_grad()
    assert_trains_alike(ours, plain, pipe, 3)


def test_the_type_on_the_wire_is_the_recorded_one() -> None:  # UR-121
    x, y = batch(2)
    ours, plain = HalfThenSingle(), HalfThenSingle()
    pipe = pp.pipeline(ours, (x[:2],), targets=y[:2], loss=loss_of, microbatches=2)
    assert [edge.meta.dtype for edge in pipe.graph.edges] == ["bfloat16", "float16", "bfloat16"]
    assert [edge.bytes for edge in pipe.graph.edges] == [2 * WIDTH * 2] * 3
    assert_trains_alike(ours, plain, pipe, 2)


def test_a_loss_of_half_precision_is_given_as_it_is() -> None:
    x, y = batch(2)
    model = Around().to(torch.bfloat16)
    model.norm.float()
    model.c.float(), model.d.to(torch.float32)
    pipe = pp.pipeline(
        model, (x[:2].bfloat16(),), targets=y[:2], microbatches=2,
        loss=lambda output, target: mean_square(output, target).bfloat16(),
    )  # fmt: skip
    result = pipe.step(x.bfloat16(), targets=y)
    assert result.loss.dtype == torch.bfloat16
    assert len(set(result.losses)) == 2
