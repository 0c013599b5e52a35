"""What a rank holds, byte for byte, beside what the plan says that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import last_uses, peak_activations, state_bytes
from ppdsl.runtime import pipeline as pipelines
from ppdsl.schedule.action import ActionKind
from tests.runtime.live_bytes import CountingWorld

ROWS, WIDTH, MICROBATCHES = 8, 16, 8
EDGE = ROWS * WIDTH * 8
"""Bytes of a value between two stages."""
WEIGHTS = (WIDTH + 1) * WIDTH * 8
"""Bytes of a layer's parameters."""


class Chain(nn.Module):
    """Stages that save for backward nothing but what enters and leaves them."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 1))
        self.head = nn.Linear(WIDTH, 1, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for key, layer in enumerate(self.layers):
            with pp.stage(key):
                x = torch.tanh(layer(x))
        with pp.stage(len(self.layers)):
            return self.head(x)


class Skips(Chain):
    """The first value goes to three stages, the second one to two."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            first = torch.tanh(self.layers[0](x))
        with pp.stage(1):
            second = torch.tanh(self.layers[1](first))
        with pp.stage(2):
            third = torch.tanh(first * second)
        with pp.stage(3):
            return self.head(second * third * first)


class Wide(Chain):
    """Its last stage's output is as large as a value between stages."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            x = torch.tanh(self.layers[0](x))
        with pp.stage(1):
            return torch.tanh(self.layers[1](x))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingWorld]:
    made = CountingWorld()
    monkeypatch.setattr(pipelines, "make_world", lambda *_, **__: made)
    return made


def stepped(world: CountingWorld, model: nn.Module, microbatches: int = MICROBATCHES, **options: Any) -> pp.Pipeline:
    """Make two steps, the second one with gradients that are there already, and count in that one."""
    x = torch.randn(ROWS * microbatches, WIDTH, dtype=torch.float64)
    outputs = options.pop("outputs", "none")
    pipe = pp.pipeline(model, (x[:ROWS],), targets=(), loss=lambda out: out.sum(), microbatches=microbatches, **options)
    for _ in range(2):
        world.begin()
        pipe.step(x, outputs=outputs)
    return pipe


def planned(pipe: pp.Pipeline, until: ActionKind = ActionKind.WEIGHT_GRAD) -> dict[int, list[int]]:
    """Return for each rank the bytes that live after each of its actions, as the plan says."""
    schedule, graph = pipe.schedule, pipe.graph
    sizes, frees = state_bytes(schedule.placement, graph), last_uses(schedule, graph, until=until)
    series: dict[int, list[int]] = {}
    for rank, row in enumerate(schedule.rows):
        live = 0
        series[rank] = []
        for position, action in enumerate(row):
            live += sizes[action.stage] if action.kind is ActionKind.FORWARD else 0
            live -= sum(sizes[stage] for stage, _ in frees[rank].get(position, ()))
            series[rank].append(live)
    return series


def counted(world: CountingWorld) -> dict[int, list[int]]:
    return {rank: [live for _, live in done] for rank, done in world.after.items()}


WHOLE = ("1f1b", "gpipe", "interleaved", "looped_bfs", "sequential", "eager_1f1b")


SPLIT = ("zbv", "zero_bubble(h1)", "zero_bubble(h2)", "interleaved_zero_bubble", "v_half", "v_min", "dualpipev")


def placement_of(schedule: str) -> dict[str, Any]:
    return {"placement": {key: key % 2 for key in range(4)}} if schedule == "gpipe" else {}


@pytest.mark.parametrize("schedule", WHOLE)
def test_the_bytes_after_every_action_are_those_of_the_plan(world: CountingWorld, schedule: str) -> None:  # UR-127
    pipe = stepped(world, Chain(), schedule=schedule, **placement_of(schedule))
    assert counted(world) == planned(pipe)
    # So verify allows what a rank really takes at most, and not one byte less.
    peaks = [max(series) for _, series in sorted(counted(world).items())]
    assert verify_schedule(pipe.schedule, pipe.graph, byte_limits=peaks) == ()
    for rank in range(len(peaks)):
        tight = [peak - (number == rank) for number, peak in enumerate(peaks)]
        assert [found.code for found in verify_schedule(pipe.schedule, pipe.graph, byte_limits=tight)] == [
            "too-many-bytes"
        ]


@pytest.mark.parametrize("schedule", WHOLE)
def test_values_that_skip_stages_live_as_planned_and_what_a_stage_saves_inside_comes_on_top(
    world: CountingWorld, schedule: str
) -> None:
    pipe = stepped(world, Skips(), schedule=schedule, **placement_of(schedule))
    last = pipe.schedule.placement[3]
    expected = planned(pipe)
    frees = last_uses(pipe.schedule, pipe.graph)[last]
    live = 0
    for position, action in enumerate(pipe.schedule.rows[last]):
        live += action.stage == 3 and action.kind is ActionKind.FORWARD
        live -= sum(stage == 3 for stage, _ in frees.get(position, ()))
        # Two products that are no edges.
        expected[last][position] += 2 * EDGE * live
    assert counted(world) == expected


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_split_backward_holds_no_more_than_planned_and_no_less_than_its_weight_gradients_need(
    world: CountingWorld, schedule: str
) -> None:
    pipe = stepped(world, Chain(), schedule=schedule)
    most, least = planned(pipe), planned(pipe, until=ActionKind.INPUT_GRAD)
    for rank, series in counted(world).items():
        assert all(a <= b <= c for a, b, c in zip(least[rank], series, most[rank], strict=True))
        assert max(series) >= max(least[rank])
        assert series[-1] == 0


@pytest.mark.filterwarnings("ignore:.*backward-not-split")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zbv"])
def test_recomputing_stages_hold_what_enters_them_and_no_more(world: CountingWorld, schedule: str) -> None:
    pipe = stepped(world, Chain(), schedule=schedule, recompute=True, **placement_of(schedule))
    series = counted(world)
    for rank, most in planned(pipe).items():
        assert all(a <= b for a, b in zip(series[rank], most, strict=True))
        assert series[rank][-1] == 0
    if schedule == "gpipe":
        # Of eight micro-batches what enters stage 2, and of the last one what leaves it.
        assert max(series[0]) == (MICROBATCHES + 1) * EDGE
        assert max(planned(pipe)[0]) == 3 * MICROBATCHES * EDGE


@pytest.mark.parametrize("schedule", [*WHOLE, *SPLIT])
def test_a_peak_is_the_plans_and_the_gradients_of_one_backward(world: CountingWorld, schedule: str) -> None:
    pipe = stepped(world, Chain(), schedule=schedule, **placement_of(schedule))
    for peak in peak_activations(pipe.schedule, pipe.graph):
        assert peak.bytes <= world.ledger.peaks[peak.rank] <= peak.bytes + 3 * EDGE + WEIGHTS


@pytest.mark.parametrize("microbatches", [2, 4, 16])
def test_outputs_are_kept_for_who_asks_and_for_nobody_else(world: CountingWorld, microbatches: int) -> None:  # UR-126
    def held(outputs: str) -> tuple[int, int]:
        stepped(world, Wide(), microbatches, schedule="1f1b", outputs=outputs)
        return world.ledger.peaks[1], world.after[1][-1][1]

    (peak, left), (most, kept) = held("none"), held("last")
    # A received value, the output, a gradient, and the gradients of the weights: of one micro-batch, however many.
    assert (peak, left) == (3 * EDGE + WEIGHTS, 0)
    assert (most, kept) == (peak + microbatches * EDGE, microbatches * EDGE)


def test_the_losses_of_a_step_hold_no_memory_but_their_own(world: CountingWorld) -> None:
    # On the CPU mse_loss returns a number in the memory of all differences.
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64)
    pipe = pp.pipeline(
        Chain(), (x[:ROWS],), targets=torch.zeros(ROWS, 1, dtype=torch.float64), loss=nn.functional.mse_loss,
        microbatches=MICROBATCHES,
    )  # fmt: skip
    for _ in range(2):
        world.begin()
        pipe.step(x, targets=torch.zeros(len(x), 1, dtype=torch.float64))
    assert [series[-1] for series in counted(world).values()] == [0] * 4
