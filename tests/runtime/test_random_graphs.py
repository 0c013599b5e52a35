"""Random graphs of stages on random placements: always the numbers of the plain run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.plan.lowering import lower
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.runtime.ties import sum_gradients
from ppdsl.schedule.registry import build_schedule
from tests.runtime.hand_made import HandMade, Part, hand_made

MICROBATCHES = 3


@dataclass(frozen=True)
class Drawn:
    """One stage: which earlier values it takes, and what it makes beside its activation."""

    takes: tuple[int, ...]
    extra: str
    tied: bool
    frozen: bool
    key: int


@st.composite
def drawings(draw: st.DrawFn) -> tuple[Drawn, ...]:
    stages = []
    for index in range(draw(st.integers(2, 6))):
        takes = draw(st.sets(st.integers(0, index - 1), min_size=1, max_size=3)) if index else set()
        stages.append(
            Drawn(
                tuple(sorted(takes)),
                draw(st.sampled_from(["none", "half", "detached", "integer", "transposed"])),
                draw(st.booleans()),
                draw(st.integers(0, 4)) == 0,
                draw(st.integers(0, index)),
            )
        )
    return tuple(stages)


class Net(torch.nn.Module):
    def __init__(self, drawing: tuple[Drawn, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64), requires_grad=not d.frozen) for d in drawing
        )


def run_of(net: Net, drawing: tuple[Drawn, ...], index: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    drawn, last = drawing[index], index == len(drawing) - 1

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = sum(v.double().t() if v.shape == (3, 2) else v.double() for v in values)
        value = torch.tanh(total @ net.weights[index])
        if drawn.tied:
            value = value @ net.tied
        if last:
            return (value.mean(),)
        extras = {
            "none": (),
            "half": (value * 0.5,),
            "detached": (value.detach(),),
            "integer": ((value * 9).long(),),
            "transposed": (value.t(),),
        }
        return (value, *extras[drawn.extra])

    return run


def made_by(drawing: tuple[Drawn, ...], index: int) -> list[str]:
    if index == len(drawing) - 1:
        return ["loss"]
    return [f"v{index}"] + ([] if drawing[index].extra == "none" else [f"e{index}"])


def recording_of(net: Net, drawing: tuple[Drawn, ...], x: torch.Tensor) -> HandMade:
    parts: list[Part] = []
    learns: list[bool] = []
    for index, drawn in enumerate(drawing):
        takes = [name for i in drawn.takes for name in made_by(drawing, i)]
        if index == 0 or index == len(drawing) - 1:
            takes = ["x", *takes]
        uses = [f"weights.{index}"] + (["tied"] if drawn.tied else [])
        learns.append(drawn.tied or not drawn.frozen or any(learns[i] for i in drawn.takes))
        parts.append(Part(drawn.key, run_of(net, drawing, index), takes, made_by(drawing, index), uses, learns[-1]))
    return hand_made(net, parts, {"x": x}, loss="loss")


def gradients(net: Net) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


def plain(net: Net, recording: HandMade, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    losses = []
    for m in range(MICROBATCHES):
        values = {"x": x[2 * m : 2 * m + 2]}
        for program in recording.programs:
            takes = [
                values["x"] if source.kind == "input" else values[recording.graph.edges[source.index].value]
                for source in program.sources
            ]
            for result, value in zip(program.results, program.module(*takes), strict=True):
                if result.edge is not None:
                    values[recording.graph.edges[result.edge].value] = value
                if result.loss:
                    values["loss"] = value
        if values["loss"].requires_grad:
            values["loss"].backward()
        losses.append(values["loss"].detach())
    return losses, gradients(net)


def piped(
    net: Net, recording: HandMade, x: torch.Tensor, placement: tuple[int, ...], schedule: str
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    world, graph = InProcessWorld(), recording.graph
    plan = lower(build_schedule(schedule, graph, placement, MICROBATCHES, 3), graph)
    compiled = Compiled(recording, plan, world)
    inputs = [(x[2 * m : 2 * m + 2],) for m in range(MICROBATCHES)]
    compiled.begin(inputs, [1.0] * MICROBATCHES, keep_outputs=False, measure=False)
    world.run(compiled.executors)
    sum_gradients(compiled.ties, world)
    return compiled.losses(), gradients(net)


@settings(max_examples=60)
@given(drawings(), st.data())
def test_a_random_graph_gives_the_plain_numbers_and_no_placement_changes_a_bit(
    drawing: tuple[Drawn, ...], data: st.DataObject
) -> None:
    torch.manual_seed(1)
    x = torch.randn(2 * MICROBATCHES, 3, dtype=torch.float64)
    schedules = st.sampled_from(["1f1b", "gpipe", "sequential"])
    schedule = data.draw(schedules)
    results = []
    for _ in range(2):
        net = Net(drawing)
        recording = recording_of(net, drawing, x[:2])
        rank_of = data.draw(st.lists(st.integers(0, 2), min_size=len(drawing), max_size=len(drawing)))
        placement = tuple(rank_of[drawn.key] for drawn in drawing)
        results.append(piped(net, recording, x, placement, schedule))
    net = Net(drawing)
    losses, expected = plain(net, recording_of(net, drawing, x[:2]), x)
    for found, grads in results:
        assert all(torch.equal(one, two) for one, two in zip(found, losses, strict=True))
        for gradient, first, other in zip(grads, results[0][1], expected, strict=True):
            assert (gradient is None) == (first is None)
            if gradient is None or first is None:
                assert other is None
                continue
            assert torch.equal(gradient, first)
            # A gradient that autograd leaves out crosses an edge as zeros.
            reference = torch.zeros_like(gradient) if other is None else other
            torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)
