"""Where the plain model has no gradient, the pipeline has none: over random graphs with detached and unused edges."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.diagnostics import RunError
from ppdsl.plan.messages import Direction, Send
from ppdsl.schedule.flow import carries_gradient
from tests.trust.graphs import mean_square

WIDTH = 3
ROWS = 2
WAYS = ("as it is", "detached", "without gradient", "as a number", "not at all")
FAMILIES = ("1f1b", "gpipe", "sequential", "zbv", "interleaved")


@dataclass(frozen=True)
class Use:
    """How a stage uses a value that an earlier one made."""

    value: int
    way: str


@dataclass(frozen=True)
class Plan:
    """A random model.

    Attributes:
        uses: For each stage after the first what it uses.
        beside: For each stage whether it adds something to the loss.
        frozen: For each stage whether its layer is frozen.
        ends: The values that the output is made of; the loss looks at the last one alone, if `last`.
    """

    uses: tuple[tuple[Use, ...], ...]
    beside: tuple[bool, ...]
    frozen: tuple[bool, ...]
    ends: tuple[int, ...]
    last: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(2, 5))
    uses = tuple(
        tuple(
            Use(value, draw(st.sampled_from(WAYS)))
            for value in sorted(draw(st.sets(st.integers(0, stage - 1), min_size=1)))
        )
        for stage in range(1, stages)
    )
    flags = st.lists(st.booleans(), min_size=stages, max_size=stages).map(tuple)
    ends = tuple(sorted(draw(st.sets(st.integers(0, stages - 1), min_size=1))))
    return Plan(uses, draw(flags), draw(flags), ends, draw(st.booleans()))


class Random(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plan = plan
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in plan.frozen)
        for layer, frozen in zip(self.layers, plan.frozen, strict=True):
            layer.requires_grad_(not frozen)
        self.last = nn.Parameter(torch.ones(()))  # some loss always has a gradient
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                h = x
                for use in self.plan.uses[number - 1] if number else ():
                    h = h + self.used(made[use.value], use.way)
                made.append(layer(h).tanh())
                if self.plan.beside[number]:
                    pp.aux_loss(made[-1].square().mean(), 0.5)
        with pp.stage(len(self.layers)):
            ends = torch.stack([made[end] for end in self.plan.ends]) * self.last
            return ends.sum(0), ends[-1]

    def used(self, value: Tensor, way: str) -> Tensor:
        match way:
            case "as it is":
                return value
            case "detached":
                return value.detach()
            case "without gradient":
                with torch.no_grad():
                    return value * 2
            case "as a number":
                return (value > 0).double() + value.argmax(-1, keepdim=True)
            case _:
                return torch.zeros_like(value)


def loss_of(plan: Plan) -> object:
    return lambda output, target: mean_square(output[1] if plan.last else output[0], target)


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS * microbatches, WIDTH, generator=chance, dtype=torch.float64)
    return x, y


@settings(max_examples=25, deadline=None)
@given(plan=plans(), schedule=st.sampled_from(FAMILIES), microbatches=st.sampled_from((2, 4)))
def test_a_gradient_is_none_where_the_plain_model_has_none(plan: Plan, schedule: str, microbatches: int) -> None:
    model, plain = Random(plan), Random(plan)
    x, y = batch(microbatches)
    keys = len(plan.frozen) + 1
    placement = None if schedule == "zbv" else {key: key % 2 for key in range(keys)}
    if schedule in ("zbv", "interleaved") and keys % 2:
        schedule = "1f1b"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PpdslWarning)
        pipe = pp.pipeline(
            model, (x[:ROWS],), targets=y[:ROWS], loss=loss_of(plan), schedule=schedule, microbatches=microbatches,
            placement=placement,
        )  # fmt: skip
    result = pipe.step(x, targets=y)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(microbatches):
        rows = slice(ROWS * number, ROWS * (number + 1))
        with pp.collect_losses() as added:
            loss = loss_of(plan)(plain(x[rows]), y[rows])
        loss = (loss + sum(added)) / microbatches
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(result.loss, total, rtol=1e-10, atol=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)
    messages = [s.message for row in pipe.plan.rows for s in row if isinstance(s, Send)]
    flowing = [
        (edge.index, consumer)
        for edge in pipe.graph.edges
        for consumer in edge.consumers
        if carries_gradient(pipe.graph, edge, consumer)
    ]
    for message in messages:
        if message.direction is Direction.BACKWARD:
            assert any(edge == message.edge for edge, _ in flowing)
    for stage in pipe.graph.stages:
        actions = [a for row in pipe.schedule.rows for a in row if a.stage == stage.index]
        assert (len(actions) > microbatches) == stage.has_backward


class Switched(nn.Module):
    """Uses a value with its gradient only when told to by something that no recording sees."""

    switch = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), Sometimes()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h if Switched.switch else h.detach())


def test_a_gradient_that_was_not_recorded_is_an_error_and_not_lost() -> None:
    x, y = batch(2)
    pipe = pp.pipeline(Switched(), (x[:ROWS],), targets=y[:ROWS], loss=mean_square)
    pipe.step(x, targets=y)
    assert pipe.module.a.weight.grad is None
    try:
        Switched.switch = True
        with pytest.raises(RunError, match=r"gives `a` .*a gradient in micro-batch 0, but gave it none"):
            pipe.step(x, targets=y)
    finally:
        Switched.switch = False


def test_frozen_stages_get_no_message_and_no_backward() -> None:  # UR-022, UR-025
    plan = Plan(tuple((Use(n, "as it is"),) for n in range(3)), (False,) * 4, (True, True, False, False), (3,), True)
    x, y = batch(4)
    pipe = pp.pipeline(Random(plan), (x[:ROWS],), targets=y[:ROWS], loss=loss_of(plan), microbatches=4)
    assert [stage.has_backward for stage in pipe.graph.stages] == [False, False, True, True, True]
    sends = [step.message for row in pipe.plan.rows for step in row if isinstance(step, Send)]
    back = [message for message in sends if message.direction is Direction.BACKWARD]
    assert len(back) == 8
    assert {pipe.graph.edges[message.edge].producer for message in back} == {2, 3}
