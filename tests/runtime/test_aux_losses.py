"""`pp.aux_loss` and `pp.metric`: what a stage says reaches the loss, its own parameters, and every rank."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ppdsl as pp
from ppdsl.diagnostics import MarkError, PpdslWarning, RunError
from tests.trust.graphs import Layers, mean_square, numbers
from tests.trust.losses import Balanced

WIDTH = 4


class Speaking(Layers):
    """Says whatever it is told to."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.say(0, h)
        with pp.stage(1):
            h = self.b(h)
            self.say(1, h)
        with pp.stage(2):
            return self.c(h)

    def say(self, stage: int, h: Tensor) -> None:
        """Say something."""


class Measured(Speaking):
    def say(self, stage: int, h: Tensor) -> None:
        pp.metric("mean", h.mean())
        pp.metric("sum", h.sum(), "sum")
        pp.metric("max", h.max(), "max")
        pp.metric("min", h.min(), reduce="min")
        pp.metric("positive", (h > 0).sum(), "sum")
        pp.metric(f"stage {stage}", h.float().mean())


class Weighed(Speaking):
    def say(self, stage: int, h: Tensor) -> None:
        pp.aux_loss(h.square().mean(), 0.5 + stage)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def built(model: nn.Module, microbatches: int = 3, **options: Any) -> tuple[pp.Pipeline, Tensor, Tensor]:
    x, y = numbers(microbatches, WIDTH), numbers(microbatches, WIDTH, seed=1)
    pipe = pp.pipeline(model, (x[:2],), targets=y[:2], loss=mean_square, microbatches=microbatches, **options)
    return pipe, x, y


# -- metrics -------------------------------------------------------------------------------------------------


def test_metrics_are_combined_over_stages_and_micro_batches() -> None:
    pipe, x, y = built(Measured())
    result = pipe.step(x, targets=y)
    first = pipe.module.a(x)
    both = torch.stack([first, pipe.module.b(first)]).detach()
    wanted = {
        "mean": both.mean(), "sum": both.sum(), "max": both.max(), "min": both.min(), "positive": (both > 0).sum(),
        "stage 0": both[0].mean().float(), "stage 1": both[1].mean().float(),
    }  # fmt: skip
    assert result.metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(result.metrics[name], value, msg=name)
        assert not result.metrics[name].requires_grad
    assert result.aux is None


def test_metrics_change_no_gradient() -> None:
    loud, quiet = built(Measured()), built(Speaking())
    for pipe, x, y in (loud, quiet):
        pipe.step(x, targets=y)
    for ours, theirs in zip(loud[0].parameters(), quiet[0].parameters(), strict=True):
        assert same(ours.grad, theirs.grad)


def test_a_mean_weighs_micro_batches_as_the_loss_does() -> None:
    class Counts(Speaking):
        def say(self, stage: int, h: Tensor) -> None:
            if stage == 0:
                pp.metric("first", h[0, 0])

    x, y = torch.randn(6, WIDTH).double(), torch.tensor([1, -100, 2, 3, -100, -100])
    pipe = pp.pipeline(
        Counts(), (x[:2],), targets=y[:2], loss=cross_entropy, microbatches=3, reduction="token_mean"
    )  # fmt: skip
    result = pipe.step(x, targets=y)
    values = pipe.module.a(x)[::2, 0].detach()
    torch.testing.assert_close(result.metrics["first"], values[0] / 3 + values[1] * 2 / 3)


def test_metrics_are_given_without_a_loss_too() -> None:
    model = Measured()
    x = numbers(3, WIDTH)
    pipe = pp.pipeline(model, (x[:2],), microbatches=3)
    result = pipe.evaluate(x)
    assert (result.loss, result.aux) == (None, None)
    torch.testing.assert_close(result.metrics["stage 0"], model.a(x).mean().float().detach())


def test_a_metric_may_be_reported_in_some_micro_batches_only() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            if h[0, 0] > 0:
                pp.metric("seen", h[0, 0])
            return self.layer(h)

    class Some(Layers):
        def extra(self) -> None:
            self.odd = Odd()

        def forward(self, x: Tensor) -> Tensor:
            with pp.stage(0):
                h = self.odd(x)
                pp.metric("always", h.mean())
            with pp.stage(1):
                return self.a(h)

    pipe, x, y = built(Some(), 4)
    x[::2, 0] = torch.tensor([1.0, -1.0, 2.0, -5.0])
    torch.testing.assert_close(pipe.step(x, targets=y).metrics["seen"], torch.tensor(1.5).double())
    assert "seen" not in pipe.step(-x.abs(), targets=y).metrics


# -- the loss ------------------------------------------------------------------------------------------------


def test_the_loss_has_its_auxiliary_part_and_gives_it_apart() -> None:
    pipe, x, y = built(Weighed())
    result, evaluated = pipe.step(x, targets=y), pipe.evaluate(x, targets=y)
    first = pipe.module.a(x)
    second = pipe.module.b(first)
    aux = first.square().mean() * 0.5 + second.square().mean() * 1.5
    main = mean_square(pipe.module.c(second), y)
    torch.testing.assert_close(result.aux, aux.detach())
    torch.testing.assert_close(result.loss, (main + aux).detach())
    torch.testing.assert_close(torch.tensor(result.losses).double().mean(), result.loss)
    assert torch.equal(result.loss, evaluated.loss)
    assert result.losses == evaluated.losses


class Padded(nn.Module):
    """A loss that is a mean over the targets that count, and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = Balanced(), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.one(x)
        with pp.stage(1):
            return self.two(h)


@settings(max_examples=4, deadline=None)
@given(ignored=st.sets(st.integers(0, 7), max_size=7), of=st.sampled_from(["mean", "sum"]))
def test_what_is_added_weighs_as_the_loss_of_its_micro_batch(ignored: set[int], of: str) -> None:  # UR-042, UR-045
    x, y = numbers(4, WIDTH), torch.arange(8) % WIDTH
    y[list(ignored)] = -100

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction=of)

    ours, plain = Padded(), Padded()
    reduction = pp.TokenMean(of=of)
    pipe = pp.pipeline(ours, (x[:2],), targets=torch.arange(2), loss=loss, microbatches=4, reduction=reduction)
    result = pipe.step(x, targets=y)
    total = torch.zeros(()).double()
    for number in range(4):
        part, target = x[number * 2 : number * 2 + 2], y[number * 2 : number * 2 + 2]
        every = int((y != -100).sum())
        weight = int((target != -100).sum()) / every if of == "mean" else 1 / every
        if weight:
            with pp.collect_losses() as added:
                one = loss(plain(part), target)
            one = (one + sum(added)) * weight
            one.backward()
            total += one.detach()
    torch.testing.assert_close(result.loss, total)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        got = torch.zeros_like(mine) if mine.grad is None else mine.grad
        torch.testing.assert_close(got, wanted)


def test_several_steps_add_up() -> None:  # UR-040
    ours, plain = Weighed(), Weighed()
    pipe, x, y = built(ours)
    for factor in (1.0, 2.0, 3.0):
        pipe.step(x * factor, targets=y)
        for number in range(3):
            rows = slice(number * 2, number * 2 + 2)
            with pp.collect_losses() as added:
                loss = mean_square(plain(x[rows] * factor), y[rows])
            ((loss + sum(added)) / 3).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_the_loss_that_a_model_returns_stays_its_own() -> None:
    class Own(Weighed):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x).square().mean()}

    model = Own()
    x = numbers(2, WIDTH)
    pipe = pp.pipeline(model, (x[:2],), microbatches=2)
    result = pipe.step(x, outputs="all")
    torch.testing.assert_close(result.outputs["loss"], result.loss - result.aux)
    torch.testing.assert_close(result.outputs["loss"], model(x)["loss"].detach())


def test_a_mixture_of_types_is_added_in_the_widest_one() -> None:
    class Mixed(Speaking):
        def __init__(self) -> None:
            super().__init__()
            self.to(torch.bfloat16)

        def say(self, stage: int, h: Tensor) -> None:
            pp.aux_loss(h.float().square().mean(), 0.1)

    ours, plain = Mixed(), Mixed()
    x, y = (tensor.to(torch.bfloat16) for tensor in (numbers(3, WIDTH), numbers(3, WIDTH, seed=1)))
    pipe = pp.pipeline(ours, (x[:2],), targets=y[:2], loss=mean_square, microbatches=3)
    result = pipe.step(x, targets=y)
    for number in range(3):
        rows = slice(number * 2, number * 2 + 2)
        with pp.collect_losses() as added:
            loss = mean_square(plain(x[rows]), y[rows])
        ((loss + sum(added)) / 3).backward()
    assert result.loss.dtype == torch.float32
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert same(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:warning.backward-not-split")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
def test_recomputation_and_split_backwards_say_nothing_twice(schedule: str, recompute: bool) -> None:
    class Four(Weighed):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            with pp.stage(3):
                return self.d(h.tanh())

    plain, _, _ = built(Four(), 4)
    pipe, x, y = built(Four(), 4, schedule=schedule, recompute=recompute)
    with pp.collect_losses() as added:
        results = [one.step(x, targets=y) for one in (plain, pipe)]
    assert added == []
    assert torch.equal(results[0].loss, results[1].loss)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_a_loss_that_is_no_number_is_reported_with_its_stage() -> None:
    class Broken(Speaking):
        def say(self, stage: int, h: Tensor) -> None:
            pp.aux_loss(h.sum() * (float("inf") if stage else 1.0))

    pipe, x, y = built(Broken())
    with pytest.warns(PpdslWarning, match=r"What stage 1 adds to the loss is not finite \(micro-batches: 0, 1, 2\)"):
        pipe.step(x, targets=y)


# -- errors --------------------------------------------------------------------------------------------------


class Wrong(Speaking):
    what: Any = None

    def say(self, stage: int, h: Tensor) -> None:
        if stage == 1:
            type(self).what(h)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda h: pp.aux_loss(h), r"An auxiliary loss is a tensor float64\[2, 4\], not a scalar"),
        (lambda h: pp.aux_loss((h > 0).sum()), r"An auxiliary loss is a tensor int64\[\], not a scalar"),
        (lambda h: pp.aux_loss(h.sum(), h.mean()), "The weight of an auxiliary loss is a tensor"),
        (lambda h: pp.aux_loss(1.0), "An auxiliary loss is of type float"),
        (lambda h: pp.metric("x", h), r"Metric 'x' is a tensor float64\[2, 4\], not a scalar"),
        (lambda h: pp.metric("x", 1.0), "Metric 'x' is of type float"),
        (lambda h: pp.metric("x", h.sum(), "median"), "Metric 'x' cannot be combined by 'median'"),
        (lambda h: pp.metric(3, h.sum()), "A metric has a text as its name, not 3"),
    ],
)
def test_what_cannot_be_said_is_an_error_with_its_line(what: Any, message: str) -> None:
    model = type("Wrong", (Wrong,), {"what": staticmethod(what)})()
    with pytest.raises(MarkError, match=message) as caught:
        pp.record(model, numbers(1, WIDTH))
    assert "test_aux_losses.py" in str(caught.value)


def test_a_metric_has_one_way_to_be_combined() -> None:
    class Two(Speaking):
        def say(self, stage: int, h: Tensor) -> None:
            pp.metric("x", h.sum(), "max" if stage else "min")

    pipe, x, y = built(Two())
    with pytest.raises(MarkError, match="Metric 'x' is combined by 'min' in one place and by 'max' in another"):
        pipe.step(x, targets=y)


class Late(nn.Module):
    """Says something only for numbers that the example has not."""

    said: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        y = self.layer(h)
        if h.max() > 1e6:
            type(self).said(y)
        return y


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (lambda y: pp.aux_loss(y.sum()), "an auxiliary loss with a gradient"),
        (lambda y: pp.aux_loss(y.detach().sum()), "an auxiliary loss"),
        (lambda y: pp.metric("rare", y.sum()), "metric 'rare'"),
    ],
)
def test_what_was_not_recorded_is_an_error_when_it_is_said(said: Any, what: str) -> None:
    class Model(Layers):
        def extra(self) -> None:
            self.late = type("Late", (Late,), {"said": staticmethod(said)})()

        def forward(self, x: Tensor) -> Tensor:
            with pp.stage(0):
                h = self.late(x)
            with pp.stage(1):
                return self.a(h)

    pipe, x, y = built(Model())
    pipe.step(x, targets=y)
    with pytest.raises(RunError, match=f"Stage 0 says {what} in micro-batch 2, which it did not"):
        pipe.step(torch.cat([x[:4], x[4:] + 1e7]), targets=y)


# -- outside a pipeline --------------------------------------------------------------------------------------


def test_outside_everything_they_do_nothing() -> None:
    given = object()
    assert pp.aux_loss(given, 3.0) is given
    pp.metric("x", given)


def test_they_load_no_torch() -> None:
    code = "import sys, ppdsl as pp; pp.aux_loss(1); pp.metric('x', 1); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_collectors_nest_and_end() -> None:
    with pp.collect_losses() as outer:
        pp.aux_loss(1.0)
        with pp.collect_losses() as inner:
            pp.aux_loss(2.0, 0.5)
        with pytest.raises(ZeroDivisionError), pp.collect_losses():
            pp.aux_loss(8.0 / 0)
        pp.aux_loss(4.0)
    pp.aux_loss(16.0)
    assert (outer, inner) == ([1.0, 4.0], [1.0])


def test_a_model_may_collect_its_own_losses() -> None:
    class Collects(Weighed):
        def forward(self, x: Tensor) -> Tensor:
            with pp.collect_losses() as added:
                y = super().forward(x)
            with pp.stage(3):
                return y + sum(added)

    ours, plain = Collects(), Collects()
    pipe, x, y = built(ours)
    result = pipe.step(x, targets=y)
    assert result.aux is None
    torch.testing.assert_close(result.loss, sum(mean_square(plain(x[i : i + 2]), y[i : i + 2]) for i in (0, 2, 4)) / 3)
