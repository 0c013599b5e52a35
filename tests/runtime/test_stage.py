from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ppdsl.diagnostics import PpdslWarning, RunError
from ppdsl.graph.ir import Edge
from ppdsl.plan.lowering import lower
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.explanation import explain
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.schedule.action import parse_action
from ppdsl.schedule.registry import build_schedule
from ppdsl.schedule.table import Schedule
from ppdsl.source import Span
from tests.runtime.hand_made import HandMade, Part, hand_made


class Doubling:
    """A stage function that changes after it was recorded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.change = model, lambda value: value
        self.strides: list[tuple[int, ...]] = []

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.change(self.model(x)),)


def two_stages() -> tuple[HandMade, Doubling, torch.Tensor]:
    model = torch.nn.Linear(3, 3)
    first = Doubling(model)
    x = torch.randn(2, 3)

    def head(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first.strides.append(h.stride())
        return (h.sum(),)

    parts = [Part(0, first, ["x"], ["h"], ["weight", "bias"]), Part("head", head, ["h"], ["loss"])]
    return hand_made(model, parts, {"x": x}, loss="loss"), first, x


def run(recording: HandMade, x: torch.Tensor, microbatches: int = 2) -> None:
    world = InProcessWorld()
    graph = recording.graph
    ranks = range(len(graph.stages))
    plan = lower(build_schedule("gpipe", graph, tuple(ranks), microbatches), graph)
    compiled = Compiled(recording, plan, world)
    compiled.begin([(x,)] * microbatches, [1.0] * microbatches, keep_outputs=False, measure=False)
    world.run(compiled.executors)


CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "shape": (lambda h: h[:1], "float32[1, 3] with gradient"),
    "dtype": (lambda h: h.double(), "float64[2, 3] with gradient"),
    "gradient": (lambda h: h.detach(), "float32[2, 3] without gradient"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_value_that_differs_from_the_recorded_one_is_refused_before_it_is_sent(kind: str) -> None:
    recording, first, x = two_stages()
    first.change, text = CHANGES[kind]
    with pytest.raises(RunError) as caught:
        run(recording, x)
    assert str(caught.value) == (
        f"error[unexpected-output]: Output `h` of stage 0 has {text}, recorded float32[2, 3] with gradient, in "
        "micro-batch 0.\n"
        "help: values between stages must look the same in every micro-batch; keep what changes inside one stage"
    )


def test_the_source_line_of_the_value_is_named() -> None:
    recording, first, x = two_stages()
    edge = recording.graph.edges[0]
    placed = Edge(0, "h", edge.meta, 0, (1,), Span("net.py", 7, 9, 7, 20))
    object.__setattr__(recording.graph, "edges", (placed,))
    first.change = lambda h: h[:1]
    with pytest.raises(RunError) as caught:
        run(recording, x)
    assert "Output `h` of stage 0 (net.py:7) has float32[1, 3] with gradient, recorded" in str(caught.value)
    assert " --> net.py:7:9 made here" in str(caught.value)


def test_another_layout_is_put_right_instead_of_refused() -> None:
    recording, first, x = two_stages()
    run(recording, x)
    expected = [parameter.grad for parameter in recording.model.parameters()]
    recording.model.zero_grad()
    first.change = lambda h: h.t().contiguous().t()
    run(recording, x)
    for parameter, gradient in zip(recording.model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert set(first.strides) == {(3, 1)}


def test_an_error_of_the_users_names_rank_stage_micro_batch_and_line() -> None:
    recording, first, x = two_stages()
    first.change = lambda h: h.view(7)
    with pytest.raises(RunError) as caught:
        run(recording, x)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "error[stage-failed]: Rank 0 failed in the forward of stage 0, micro-batch 0: RuntimeError: shape '[7]' is "
        "invalid for input of size 6"
    )
    assert "test_stage.py" in lines[1]
    assert "first.change = lambda h: h.view(7)" in lines[3]
    assert isinstance(caught.value.__cause__, RuntimeError)


class Scaled(torch.autograd.Function):
    """Its backward gives powers that float32 cannot add in two ways alike."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 0), (3, 2, 1, 0), (0, 0, 0, 0), (1, 0, 1, 1)])
def test_gradients_of_several_consumers_are_added_in_the_order_of_stages(placement: tuple[int, ...]) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    x = torch.ones(1, 1)

    def use(factor: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        return lambda h: (Scaled.apply(h, factor),)

    parts = [
        Part(0, lambda x: (model(x),), ["x"], ["h"], ["weight"]),
        Part(1, use(1e8), ["h"], ["one"]),
        Part(2, use(-1e8), ["h"], ["two"]),
        Part(3, lambda h, one, two: ((Scaled.apply(h, 3.0) + one + two).sum(),), ["h", "one", "two"], ["loss"]),
    ]
    recording = hand_made(model, parts, {"x": x}, loss="loss")
    graph = recording.graph
    world = InProcessWorld()
    compiled = Compiled(recording, lower(build_schedule("1f1b", graph, placement, 1), graph), world)
    compiled.begin([(x,)], [1.0], keep_outputs=False, measure=False)
    world.run(compiled.executors)
    # (1e8 - 1e8) + 3; in any other order the 3 is lost in float32.
    assert model.weight.grad.item() == 3.0


def split(recording: HandMade, x: torch.Tensor, rows: tuple[tuple[str, ...], ...], microbatches: int = 2) -> Compiled:
    world = InProcessWorld()
    actions = tuple(tuple(map(parse_action, row)) for row in rows)
    plan = lower(Schedule("mine", actions, (0, 1), microbatches), recording.graph)
    compiled = Compiled(recording, plan, world)
    compiled.begin([(x,)] * microbatches, [1.0] * microbatches, keep_outputs=False, measure=False)
    world.run(compiled.executors)
    return compiled


def test_split_and_whole_backwards_of_one_stage_give_the_sum_of_whole_ones() -> None:
    recording, _, x = two_stages()
    run(recording, x)
    expected = [parameter.grad for parameter in recording.model.parameters()]
    recording.model.zero_grad()
    split(recording, x, (("0F0", "0F1", "0I0", "0B1", "0W0"), ("1F0", "1F1", "1I0", "1B1", "1W0")))
    for parameter, gradient in zip(recording.model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_weight_gradients_come_with_w_and_the_gradient_of_the_input_leaves_with_i() -> None:
    recording, _, x = two_stages()
    compiled = split(recording, x, (("0F0", "0I0", "0W0"), ("1F0", "1I0", "1W0")), microbatches=1)
    order = [str(step) for step in compiled.plan.rows[1]]
    assert order.index("1I0") < order.index("send(edge 0 B0 of stage 1)") < order.index("1W0")
    assert recording.model.weight.grad is not None


def test_a_stage_that_cannot_be_split_says_so_once() -> None:
    model = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)

    def head(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (Product.apply(h, model.weight).sum(),)

    parts = [Part(0, lambda x: (x * model.bias,), ["x"], ["h"], ["bias"]), Part(1, head, ["h"], ["loss"], ["weight"])]
    recording = hand_made(model, parts, {"x": x}, loss="loss")
    rows = (("0F0", "0F1", "0I0", "0I1", "0W0", "0W1"), ("1F0", "1F1", "1I0", "1I1", "1W0", "1W1"))
    message = (
        "Stage 1 cannot split the backward of `ProductBackward`: its weight gradients are computed with the input "
        "gradients."
    )
    with pytest.warns(PpdslWarning) as caught:
        compiled = split(recording, x, rows)
    assert [str(warning.message) for warning in caught] == [f"warning[backward-not-split]: {message}"]
    assert explain(compiled)["warnings"] == [message]
    expected = model.weight.grad
    model.zero_grad()
    run(recording, x)
    assert torch.equal(model.weight.grad, expected)


class Product(torch.autograd.Function):
    """Computes both gradients whatever is asked for."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient
