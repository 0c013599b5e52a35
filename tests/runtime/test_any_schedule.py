"""Any order of actions that `verify` accepts runs to its end with the right numbers; what it refuses never starts."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.lowering import lower
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.ties import sum_gradients
from ppdsl.schedule.action import Action, ActionKind, action_of
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.table import Schedule
from tests.runtime.delays import SlowWorld
from tests.runtime.hand_made import HandMade
from tests.runtime.test_random_graphs import MICROBATCHES, Drawn, Net, drawings, gradients, plain, recording_of

RANKS = 3


def any_order(graph: StageGraph, placement: tuple[int, ...], chance: random.Random) -> Schedule:
    """Return a legal schedule in which nothing else has a reason: at each moment any action that can run may be next.

    Each micro-batch of each stage has a whole backward or a split one, as chance will have it.
    """
    flow = flow_of(graph)
    todo: list[Action] = []
    for stage in graph.stages:
        for m in range(MICROBATCHES):
            kinds = [ActionKind.FORWARD]
            if stage.has_backward:
                halves = [ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD]
                kinds += halves if chance.random() < 0.7 else [ActionKind.BACKWARD]
            todo += [action_of(stage.index, kind, m) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(RANKS)]
    made: set[object] = set()
    while todo:
        ready = [a for a in todo if all(need in made for need in flow.needs(a)) and _after_forward(a, todo)]
        chosen = chance.choice(ready)
        todo.remove(chosen)
        rows[placement[chosen.stage]].append(chosen)
        if (new := flow.makes(chosen)) is not None:
            made.add(new)
    return Schedule("any", tuple(map(tuple, rows)), placement, MICROBATCHES)


def _after_forward(action: Action, todo: list[Action]) -> bool:
    forward = action_of(action.stage, ActionKind.FORWARD, action.microbatch)
    return action == forward or forward not in todo


def swapped(schedule: Schedule, chance: random.Random) -> Schedule:
    """Return the schedule with two actions of one rank in each other's place."""
    rows = [list(row) for row in schedule.rows]
    row = chance.choice([row for row in rows if len(row) > 1])
    one, two = chance.sample(range(len(row)), 2)
    row[one], row[two] = row[two], row[one]
    return Schedule("swapped", tuple(map(tuple, rows)), schedule.placement, schedule.microbatches)


def run(net: Net, recording: HandMade, schedule: Schedule, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    world = SlowWorld(seed)
    compiled = Compiled(recording, lower(schedule, recording.graph), world)
    inputs = [(x[2 * m : 2 * m + 2],) for m in range(MICROBATCHES)]
    compiled.begin(inputs, [1.0] * MICROBATCHES, keep_outputs=False, measure=False)
    world.run(compiled.executors)
    sum_gradients(compiled.ties, world)
    return compiled.losses()


@settings(max_examples=80)
@given(drawings(), st.lists(st.integers(0, RANKS - 1), min_size=6, max_size=6), st.integers(0, 1 << 30))
def test_every_legal_order_gives_the_plain_numbers_and_every_other_one_is_refused(
    drawing: tuple[Drawn, ...], rank_of: list[int], seed: int
) -> None:
    torch.manual_seed(1)
    x = torch.randn(2 * MICROBATCHES, 3, dtype=torch.float64)
    chance = random.Random(seed)
    net = Net(drawing)
    reference = recording_of(net, drawing, x[:2])
    losses, expected = plain(net, reference, x)
    placement = tuple(rank_of[drawn.key] for drawn in drawing)
    legal = any_order(reference.graph, placement, chance)
    for schedule in (legal, swapped(legal, chance), swapped(legal, chance)):
        net = Net(drawing)
        recording = recording_of(net, drawing, x[:2])
        try:
            found = run(net, recording, schedule, x, seed)
        except ScheduleError:
            assert schedule is not legal
            continue
        assert all(torch.equal(one, two) for one, two in zip(found, losses, strict=True))
        for gradient, other in zip(gradients(net), expected, strict=True):
            if gradient is None:
                assert other is None
                continue
            # A gradient that autograd leaves out crosses an edge as zeros.
            reference_ = torch.zeros_like(gradient) if other is None else other
            torch.testing.assert_close(gradient, reference_, rtol=1e-10, atol=1e-12)
