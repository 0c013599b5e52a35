from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.utils import _pytree as pytree

import ppdsl as pp
from ppdsl.plan.lowering import lower
from ppdsl.plan.messages import Compute, MessagePlan, Recv, Wait
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.schedule.registry import build_schedule
from tests.runtime.hand_made import Part, hand_made
from tests.runtime.models import CASES, batch_of, pipeline_of, plain_step

# Sums whose order differs from the plain loop's: a tied parameter, or a value used in several stages.
ANOTHER_ORDER = {
    "fan_out",
    "branches",
    "tied",
    "reentered",
    "integer_edges",
    "dtypes",
    "strided",
    "in_place",
    "dict_output",
}


def assert_same(name: str, actual: torch.Tensor | None, expected: torch.Tensor | None, *, exact: bool) -> None:
    assert (actual is None) == (expected is None), name
    if actual is None or expected is None:
        return
    if exact:
        assert torch.equal(actual, expected), name
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential", "zero_bubble(h1)", "zero_bubble(h2)"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_plain_loop(name: str, schedule: str) -> None:
    case = CASES[name]
    model, reference = case.model(), case.model()
    pipe = pipeline_of(case, model, schedule=schedule)
    inputs, targets = batch_of(case)
    result = pipe.step(*inputs, targets=targets or None, outputs="all")
    loss, outputs = plain_step(case, reference)
    assert torch.equal(result.loss, loss)
    exact = name not in ANOTHER_ORDER
    for (key, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name == "detached_use" and parameter.grad is None:
            continue
        assert_same(key, parameter.grad, other.grad, exact=exact)
    for (key, buffer), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, other), key
    whole = pytree.tree_leaves(result.outputs)
    parts = [pytree.tree_leaves(output) for output in outputs]
    for index, leaf in enumerate(whole):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            assert torch.equal(leaf, torch.cat([part[index] for part in parts]).detach())


@pytest.mark.parametrize("name", CASES)
def test_the_placement_changes_no_bit(name: str) -> None:
    case = CASES[name]
    inputs, targets = batch_of(case)
    results = []
    for placement in (None, dict.fromkeys(case.keys, 0), {key: i % 2 for i, key in enumerate(case.keys)}):
        model = case.model()
        result = pipeline_of(case, model, placement=placement, schedule="gpipe").step(*inputs, targets=targets or None)
        results.append((result.loss, [p.grad for p in model.parameters()]))
    for loss, gradients in results[1:]:
        assert torch.equal(loss, results[0][0])
        for actual, expected in zip(gradients, results[0][1], strict=True):
            assert_same(name, actual, expected, exact=True)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_any_number_of_microbatches_trains(microbatches: int) -> None:
    case = CASES["fan_out"]
    model, reference = case.model(), case.model()
    inputs, targets = batch_of(case, microbatches)
    result = pipeline_of(case, model, microbatches).step(*inputs, targets=targets)
    loss, _ = plain_step(case, reference, microbatches)
    assert torch.equal(result.loss, loss)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same("grad", parameter.grad, other.grad, exact=False)


@pytest.mark.parametrize("name", ["chain", "tied"])
def test_several_steps_accumulate_and_nothing_is_rescaled(name: str) -> None:
    case = CASES[name]
    model, reference = case.model(), case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    for _ in range(3):
        pipe.step(*inputs, targets=targets)
        plain_step(case, reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same("grad", parameter.grad, other.grad, exact=False)


def test_a_training_run_equals_the_plain_one() -> None:
    case = CASES["tied"]
    model, reference = case.model(), case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    one = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    two = torch.optim.AdamW(reference.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        losses.append(pipe.step(*inputs, targets=targets).loss.item())
        plain_step(case, reference)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-10, atol=1e-10)
    assert losses[-1] < losses[0]


def test_a_missing_gradient_is_filled_with_zeros_only_for_the_edge_that_expects_one() -> None:
    case = CASES["detached_use"]
    model, reference = case.model(), case.model()
    inputs, targets = batch_of(case)
    pipeline_of(case, model).step(*inputs, targets=targets)
    plain_step(case, reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same("grad", parameter.grad, other.grad, exact=True)


def test_unused_and_frozen_parameters_keep_no_gradient() -> None:
    case = CASES["frozen"]
    model = case.model()
    inputs, targets = batch_of(case)
    pipeline_of(case, model).step(*inputs, targets=targets)
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == ["a.weight", "a.bias", "c.bias", "unused.weight", "unused.bias"]


def test_an_input_that_requires_a_gradient_gets_it() -> None:
    case = CASES["chain"]
    model, reference = case.model(), case.model()
    inputs, targets = batch_of(case)
    x = inputs[0].clone().requires_grad_(True)
    pipe = pp.pipeline(
        model, (x[:2].detach().requires_grad_(True),), targets=targets[0][:2], loss=case.loss, microbatches=4
    )
    pipe.step(x, targets=targets)
    y = inputs[0].clone().requires_grad_(True)
    for m in range(4):
        rows = slice(2 * m, 2 * m + 2)
        (case.loss(reference(y[rows]), targets[0][rows]) / 4).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_value_without_gradient_is_dropped_when_its_last_consumer_has_used_it() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []
    model = torch.nn.Linear(3, 3)

    def one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = model(x)
        return (value, value.detach() * 2)

    def two(h: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(d.untyped_storage()))
        return ((h + d).sum(),)

    x = torch.randn(8, 3)
    parts = [Part(0, one, ["x"], ["h", "d"], ["weight", "bias"]), Part(1, two, ["h", "d"], ["loss"])]
    recording = hand_made(model, parts, {"x": x[:1]}, loss="loss")
    alive.clear()
    seen.clear()
    world = InProcessWorld()
    plan = lower(build_schedule("gpipe", recording.graph, (0, 1), 8), recording.graph)
    compiled = Compiled(recording, plan, world)
    compiled.begin([(x[m : m + 1],) for m in range(8)], [1.0] * 8, keep_outputs=False, measure=False)
    world.run(compiled.executors)
    # All forwards of the first rank run before the second's: what waits there is alive, what was used is not.
    assert alive == [0] * 8


def test_a_plan_in_which_all_wait_is_an_error_that_says_for_what() -> None:
    model = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    parts = [
        Part(0, lambda x: (model(x),), ["x"], ["h"], ["weight", "bias"]),
        Part(1, lambda h: (h.sum(),), ["h"], ["loss"]),
    ]
    recording = hand_made(model, parts, {"x": x}, loss="loss")
    plan = lower(build_schedule("gpipe", recording.graph, (0, 1), 1), recording.graph)
    rows = [list(row) for row in plan.rows]
    rows[0].sort(key=lambda step: not isinstance(step, Recv | Wait))
    stuck = MessagePlan(plan.graph, plan.schedule, tuple(map(tuple, rows)))
    world = InProcessWorld()
    compiled = Compiled(recording, stuck, world)
    compiled.begin([(x,)], [1.0], keep_outputs=False, measure=False)
    with pytest.raises(pp.RunError) as caught:
        world.run(compiled.executors)
    assert str(caught.value) == (
        "error[deadlock]: Every rank waits for another one, so the step cannot go on.\n"
        "rank 0 | waits at the gradient of `h` for stage 0, micro-batch 0\n"
        "rank 1 | waits at the forward of `h` for stage 1, micro-batch 0"
    )
    assert any(isinstance(step, Compute) for step in stuck.rows[0])


def test_two_pipelines_over_one_model_do_not_disturb_each_other() -> None:
    case = CASES["chain"]
    model = case.model()
    inputs, targets = batch_of(case)
    one, two = pipeline_of(case, model), pipeline_of(case, model, microbatches=2)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    first = one.step(*inputs, targets=targets).loss
    two.step(inputs[0][:4], targets=targets[0][:4])
    assert torch.equal(one.step(*inputs, targets=targets).loss, first)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_a_deep_copy_is_not_needed_and_the_model_is_the_users_own() -> None:
    case = CASES["chain"]
    model = case.model()
    state = copy.deepcopy(model.state_dict())
    pipe = pipeline_of(case, model)
    assert pipe.module is model
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert list(pipe.parameters()) == list(model.parameters())
