"""Traps in time: several steps, modes in any order, two pipelines over one model, hooks, what is left behind."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.schedule.csv_text import from_rows
from tests.trust.entry import ROWS, Setup, part_of, pipeline_of, plain_loop
from tests.trust.graphs import WIDTH, Layers, Norms, SkipToTwo, mean_square, numbers

MICROBATCHES = 3


def setup_of(model: nn.Module, microbatches: int = MICROBATCHES, seed: int = 0) -> Setup:
    x, y = numbers(microbatches, WIDTH, seed=seed), numbers(microbatches, WIDTH, seed=seed + 1)
    return Setup(model, (x,), targets=(y,), loss=mean_square)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    for name, gradient in theirs.items():
        mine = ours[name]
        assert (mine is None) == (gradient is None), name
        if mine is not None and gradient is not None:
            torch.testing.assert_close(mine, gradient, rtol=1e-10, atol=1e-10)


def test_several_steps_add_to_the_gradients() -> None:  # UR-040
    setup, plain = setup_of(SkipToTwo()), setup_of(SkipToTwo())
    pipe = pipeline_of(setup, MICROBATCHES)
    for seed in (0, 10, 20):
        batch = setup_of(setup.model, seed=seed)
        pipe.step(*batch.args, targets=batch.targets)
        batch.model = plain.model
        plain_loop(batch, MICROBATCHES)
    assert_close(gradients(setup.model), gradients(plain.model))


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_the_number_of_micro_batches_does_not_scale_a_loss(microbatches: int) -> None:  # UR-044
    whole = setup_of(SkipToTwo(), 8)
    mean_square(whole.model(*whole.args), *whole.targets).backward()
    model = SkipToTwo()
    rows = ROWS * 8 // microbatches
    x, y = whole.args[0], whole.targets[0]
    pipe = pp.pipeline(model, (x[:rows],), targets=(y[:rows],), loss=mean_square, microbatches=microbatches)
    pipe.step(x, targets=y)
    assert_close(gradients(model), gradients(whole.model))


MODES = ("train", "eval", "no_grad", "evaluate", "inference", "call")


@settings(max_examples=15)
@given(modes=st.lists(st.sampled_from(MODES), min_size=2, max_size=6))
def test_modes_follow_each_other_in_any_order(modes: list[str]) -> None:  # UR-087, UR-088, UR-089, UR-090
    setup, plain = setup_of(Norms()), setup_of(Norms())
    pipe = pipeline_of(setup, MICROBATCHES)
    for mode in modes:
        one_mode(mode, pipe, setup)
        one_mode(mode, None, plain)
    assert_close(gradients(setup.model), gradients(plain.model))
    for (name, ours), theirs in zip(setup.model.named_buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def one_mode(mode: str, pipe: pp.Pipeline | None, setup: Setup) -> None:
    setup.model.train(mode != "eval")
    parts = [part_of(setup, number, MICROBATCHES)[0] for number in range(MICROBATCHES)]
    match mode:
        case "train" | "eval":
            if pipe is None:
                plain_loop(setup, MICROBATCHES)
            else:
                pipe.step(*setup.args, targets=setup.targets)
        case "no_grad" | "inference":
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                if pipe is None:
                    for part in parts:
                        setup.model(*part)
                else:
                    pipe.step(*setup.args, targets=setup.targets)
        case _:
            with torch.no_grad():
                if pipe is None:
                    for part in parts:
                        setup.model(*part)
                elif mode == "call":
                    pipe(*setup.args)
                else:
                    pipe.evaluate(*setup.args, targets=setup.targets)


def test_one_submodule_alone_in_another_mode_is_heard() -> None:  # UR-090
    setup, plain = setup_of(Norms()), setup_of(Norms())
    pipe = pipeline_of(setup, MICROBATCHES)
    for one in (setup, plain):
        one.model.norm.eval()
    pipe.step(*setup.args, targets=setup.targets)
    plain_loop(plain, MICROBATCHES)
    assert torch.equal(setup.model.norm.running_mean, plain.model.norm.running_mean)
    assert torch.equal(setup.model.late.running_mean, plain.model.late.running_mean)
    assert_close(gradients(setup.model), gradients(plain.model))


def test_two_pipelines_over_one_model_do_not_disturb_each_other() -> None:  # UR-091
    model, twin = SkipToTwo(), SkipToTwo()
    before = [id(p) for p in model.parameters()]
    small, large = setup_of(model, 2), setup_of(model, 5, seed=7)
    pipes = [pipeline_of(small, 2), pipeline_of(large, 5, schedule="gpipe")]
    assert [id(p) for p in model.parameters()] == before
    for _ in range(2):
        for pipe, setup, count in zip(pipes, (small, large), (2, 5), strict=True):
            pipe.step(*setup.args, targets=setup.targets)
            theirs = copy.copy(setup)
            theirs.model = twin
            plain_loop(theirs, count)
    assert_close(gradients(model), gradients(twin))


def test_an_own_order_may_run_backwards_in_another_order() -> None:  # UR-078, UR-079
    rows = ["0F0 0F1 0F2 0B2 0B0 0B1".split(), "1F0 1F1 1F2 1B2 1B0 1B1".split()]

    class Two(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                return self.b(h)

    setup, plain = setup_of(Two()), setup_of(Two())
    pipe = pipeline_of(setup, MICROBATCHES, schedule=from_rows(rows, name="own"))
    result = pipe.step(*setup.args, targets=setup.targets)
    losses = [mean_square(plain.model(x), y).item() for (x,), _, (y,) in (part_of(plain, m, 3) for m in range(3))]
    assert list(result.losses) == pytest.approx(losses, rel=1e-12)
    plain_loop(plain, MICROBATCHES)
    assert_close(gradients(setup.model), gradients(plain.model))


def live_tensors() -> Counter[str]:
    gc.collect()
    # Exact types: what torch keeps of earlier recordings is of others, with shapes that are no numbers.
    return Counter(str(tuple(o.shape)) for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter))


def test_nothing_is_left_behind_by_a_step() -> None:  # UR-085, UR-126, UR-127
    setup = setup_of(Norms(), 4)
    pipe = pipeline_of(setup, 4)
    kept = [pipe.step(*setup.args, targets=setup.targets, outputs="all") for _ in range(2)]
    assert kept[-1].loss.grad_fn is None
    assert not kept[-1].outputs.requires_grad
    del kept
    before = live_tensors()
    for _ in range(5):
        pipe.step(*setup.args, targets=setup.targets, outputs="all")
    assert live_tensors() == before


def test_an_input_is_left_as_it_was() -> None:  # UR-031
    setup = setup_of(SkipToTwo())
    before = setup.args[0].clone()
    pipeline_of(setup, MICROBATCHES).step(*setup.args, targets=setup.targets)
    assert not setup.args[0].requires_grad
    assert setup.args[0].grad is None
    assert torch.equal(setup.args[0], before)


def counting(model: nn.Module, counts: Counter[str]) -> None:
    """Lay every kind of hook on the second layer."""

    def note(kind: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[kind] += 1

        return hook

    model.b.register_forward_pre_hook(note("before forward"))
    model.b.register_forward_hook(note("after forward"))
    model.b.register_full_backward_pre_hook(note("before backward"))
    model.b.register_full_backward_hook(note("after backward"))
    model.b.weight.register_hook(note("gradient"))
    model.b.weight.register_post_accumulate_grad_hook(note("accumulated"))


def test_each_hook_fires_as_often_as_in_the_plain_loop() -> None:  # UR-084, UR-099
    setup, plain = setup_of(SkipToTwo()), setup_of(SkipToTwo())
    pipe = pipeline_of(setup, MICROBATCHES)
    ours: Counter[str] = Counter()
    theirs: Counter[str] = Counter()
    counting(setup.model, ours)
    counting(plain.model, theirs)
    pipe = pipeline_of(setup, MICROBATCHES)
    ours.clear()
    pipe.step(*setup.args, targets=setup.targets)
    plain_loop(plain, MICROBATCHES)
    assert ours == theirs
    assert set(theirs.values()) == {MICROBATCHES}


def test_a_batch_with_too_few_rows_is_refused_with_both_numbers() -> None:  # UR-053
    setup = setup_of(SkipToTwo(), 4)
    pipe = pipeline_of(setup, 4, dynamic=False)
    with pytest.raises(pp.CallError, match="micro-batch"):
        pipe.step(setup.args[0][:2], targets=setup.targets[0][:2])


@pytest.mark.parametrize("rows", [7, 10])
def test_rows_that_do_not_divide_are_refused_or_right(rows: int) -> None:  # UR-052, UR-054
    setup = setup_of(SkipToTwo(), 4)
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    with pytest.raises(pp.CallError) as refused:
        pipeline_of(setup, 4, dynamic=False).step(x, targets=x)
    assert str(rows) in str(refused.value)
    loss = pipeline_of(setup, 4).step(x, targets=x.clone()).loss
    torch.testing.assert_close(loss, setup.loss(setup.model(x), x).detach(), rtol=1e-12, atol=1e-12)
