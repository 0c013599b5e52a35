"""`pp.GradScaler` gives the scales, the skipped steps and the parameters of torch's scaler over the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.diagnostics import CallError, PpdslWarning
from tests.trust.graphs import mean_square

WIDTH = 4
MICROBATCHES = 2


class Net(nn.Module):
    """Three stages in single precision; under autocast in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.norm(self.b(h.tanh()))
            pp.aux_loss(h.float().square().mean(), 0.1)
        with pp.stage(2):
            return self.c(h).float()


def batch(seed: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=chance)
    return x * factor, y


def plain_step(model: nn.Module, scaler: torch.amp.GradScaler, x: Tensor, y: Tensor) -> None:
    for number in range(MICROBATCHES):
        rows = slice(2 * number, 2 * number + 2)
        with pp.collect_losses() as added:
            loss = mean_square(model(x[rows]), y[rows])
        scaler.scale((loss + sum(added)) / MICROBATCHES).backward()


class Both:
    """The same model in a pipeline and on one device, each with its scaler and optimizer."""

    def __init__(self, *, autocast: torch.dtype | None = None, **scaling: Any) -> None:
        self.autocast = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
        self.ours, self.plain = Net(), Net()
        x, y = batch(0)
        with self.autocast:
            self.pipe = pp.pipeline(self.ours, (x[:2],), targets=y[:2], loss=mean_square, microbatches=MICROBATCHES)
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (self.ours, self.plain)]
        self.scaler, self.torchs = pp.GradScaler(self.pipe, **scaling), torch.amp.GradScaler("cpu", **scaling)

    def train(self, x: Tensor, y: Tensor, *, spoil: str | None = None, clip: bool = False) -> None:
        """Make one step of both; `spoil` names a parameter whose gradient overflows."""
        with self.autocast:
            self.pipe.step(x, targets=y, scaler=self.scaler)
            plain_step(self.plain, self.torchs, x, y)
        norms = []
        for model, scaler, optimizer in self.each():
            if spoil is not None:
                model.get_parameter(spoil).grad.view(-1)[0] = float("inf")
            if clip:
                scaler.unscale_(optimizer)
                parameters = model.parameters()
                mine = scaler is self.scaler
                norm = self.pipe.clip_grad_norm_(0.5) if mine else nn.utils.clip_grad_norm_(parameters, 0.5)
                norms.append(norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if clip:
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-6, equal_nan=True)
        assert self.scaler.get_scale() == self.torchs.get_scale()
        assert self.scaler.state_dict() == self.torchs.state_dict()
        for (name, mine), theirs in zip(self.ours.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)

    def each(self) -> list[tuple[nn.Module, Any, torch.optim.Optimizer]]:
        return [(self.ours, self.scaler, self.optimizers[0]), (self.plain, self.torchs, self.optimizers[1])]


@settings(max_examples=8)
@given(
    steps=st.lists(st.tuples(st.sampled_from([None, None, "a.weight", "c.bias"]), st.booleans()), max_size=7),
    interval=st.integers(1, 3),
)
def test_scales_and_parameters_are_those_of_one_device(steps: list[tuple[str | None, bool]], interval: int) -> None:
    both = Both(init_scale=1024.0, growth_interval=interval, growth_factor=4.0)
    for seed, (spoil, clip) in enumerate(steps):
        both.train(*batch(seed), spoil=spoil, clip=clip)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflows_of_half_precision_shrink_the_scale(dtype: torch.dtype) -> None:
    both = Both(autocast=dtype, init_scale=2.0**22, growth_interval=2)
    scales = []
    for seed in range(10):
        scales.append(both.scaler.get_scale())
        both.train(*batch(seed), clip=seed % 2 == 0)
    assert (scales[-1] < scales[0]) == (dtype is torch.float16)


def test_several_steps_before_one_of_the_optimizer() -> None:
    both = Both(init_scale=8.0)
    for seed in range(3):
        x, y = batch(seed)
        both.pipe.step(x, targets=y, scaler=both.scaler)
        plain_step(both.plain, both.torchs, x, y)
    both.train(*batch(9), clip=True)


def test_the_loss_that_is_given_is_not_scaled() -> None:
    both = Both()
    x, y = batch(1)
    scaled, plain = both.pipe.step(x, targets=y, scaler=both.scaler), both.pipe.evaluate(x, targets=y)
    assert torch.equal(scaled.loss, plain.loss)
    assert torch.equal(scaled.aux, plain.aux)
    with torch.no_grad():
        assert torch.equal(both.pipe.step(x, targets=y, scaler=both.scaler).loss, plain.loss)


def test_a_scale_too_big_for_any_number_ends_in_small_ones() -> None:
    both = Both(init_scale=2.0**127)
    x, y = batch(2, 1e4)
    before = [parameter.clone() for parameter in both.ours.parameters()]
    both.train(x, y)
    assert both.scaler.get_scale() == 2.0**126
    assert all(torch.equal(*pair) for pair in zip(both.ours.parameters(), before, strict=True))


def test_a_scaler_that_is_not_enabled_takes_every_step() -> None:
    both = Both(enabled=False)
    assert not both.scaler.is_enabled()
    for seed in range(2):
        both.train(*batch(seed), clip=True)
    assert (both.scaler.get_scale(), both.scaler.state_dict()) == (1.0, {})


def test_its_state_is_torchs() -> None:
    both = Both(init_scale=64.0, growth_interval=3)
    both.train(*batch(0))
    state = both.torchs.state_dict()
    fresh = pp.GradScaler(both.pipe)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(fresh.state_dict())
    assert theirs.get_scale() == 64.0
    with pytest.raises(CallError, match="not enabled"):
        fresh.load_state_dict({})
    fresh.update(16.0)
    assert fresh.get_scale() == 16.0


def test_sparse_gradients_are_unscaled() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            with pp.stage(0):
                h = self.table(x)
            with pp.stage(1):
                return self.head(h).square().mean()

    ours, plain = Words(), Words()
    x = torch.tensor([1, 1, 2, 4])
    pipe = pp.pipeline(ours, (x[:2],), microbatches=2)
    scaler = pp.GradScaler(pipe)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    pipe.step(x, scaler=scaler)
    scaler.unscale_(optimizer)
    ((plain(x[:2]) + plain(x[2:])) / 2).backward()
    torch.testing.assert_close(ours.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())


# -- misuse --------------------------------------------------------------------------------------------------


def test_what_is_called_in_a_wrong_order_is_an_error() -> None:
    both = Both()
    x, y = batch(0)
    optimizer = both.optimizers[0]
    with pytest.raises(CallError, match="no step since the latest update"):
        both.scaler.update()
    both.pipe.step(x, targets=y)
    with pytest.raises(CallError, match=r"were scaled by 1\.0, not by 65536\.0"):
        both.scaler.step(optimizer)
    both.pipe.step(x, targets=y, scaler=both.scaler)
    both.scaler.unscale_(optimizer)
    with pytest.raises(CallError, match="unscaled already"):
        both.scaler.unscale_(optimizer)
    both.scaler.step(optimizer)
    with pytest.raises(CallError, match="made its step already"):
        both.scaler.step(optimizer)


def test_a_scaler_of_torch_is_refused_as_it_knows_one_rank_only() -> None:
    both = Both()
    x, y = batch(0)
    with pytest.raises(CallError, match="scaler= is of type GradScaler, which does not know of other ranks"):
        both.pipe.step(x, targets=y, scaler=both.torchs)


def test_gradients_of_half_precision_are_refused() -> None:
    model = Net().half()
    x, y = batch(0)
    pipe = pp.pipeline(model, (x[:2].half(),), targets=y[:2], loss=mean_square, microbatches=2)
    scaler = pp.GradScaler(pipe, init_scale=2.0)
    pipe.step(x.half(), targets=y, scaler=scaler)
    with pytest.raises(CallError, match=r"shape \[4, 4\] has a gradient of float16"):
        scaler.step(torch.optim.SGD(pipe.parameters(), lr=0.1))


@pytest.mark.parametrize("wrong", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"init_scale": 0.0}])
def test_factors_that_do_not_scale_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(CallError, match="is no loss scale"):
        pp.GradScaler(Both().pipe, **wrong)


def test_an_odd_loss_is_still_warned_of() -> None:
    both = Both()
    x, y = batch(0)
    with pytest.warns(PpdslWarning, match="computed in stage 2, is inf"):
        both.pipe.step(x, targets=y + 1e30, scaler=both.scaler)
