"""What a measured step on XLA devices says, that measuring it changes nothing, and what moves tensors meanwhile."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ppdsl as pp
from ppdsl.runtime.executor import Measured
from ppdsl.runtime.xla import adapter, timing
from ppdsl.runtime.xla.driver import Driver
from ppdsl.runtime.xla.timing import Launch, Ran, times_of
from ppdsl.runtime.xla.transport import Carrier, PermuteCarrier, XlaMailbox
from ppdsl.schedule.action import ActionKind, parse_action
from ppdsl.timeline import Timeline

pytestmark = pytest.mark.xla

MICROBATCHES = 6
WIDE = 768
"""Width and rows with which a program takes a device far longer than the driver needs to start it."""


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Start torch_xla before the first backward of this process."""
    adapter.device_count()


class Chain(nn.Module):
    """Equal stages; a skip from the first to the last one, and a tie between them, on request."""

    def __init__(self, stages: int, width: int, *, skip: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(stages))
        self.skip = skip
        if skip:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                x = layer(x).tanh()
                skip = x if number == 0 else skip
                if self.skip and number == len(self.layers) - 1:
                    x = x + skip
        return x


PLACED = {"interleaved_1f1b": {"placement": {stage: stage % 4 for stage in range(8)}}}
STAGES = {"1f1b": 4, "gpipe": 4, "zero_bubble": 4, "interleaved_1f1b": 8, "zbv": 8}


def pipeline_of(schedule: str, width: int = 6, rows: int = 2, *, skip: bool = False, **options: Any) -> pp.Pipeline:
    torch.manual_seed(3)
    model = Chain(STAGES[schedule], width, skip=skip)
    x = torch.randn(rows, width)
    options = {"microbatches": MICROBATCHES, "loss": nn.functional.mse_loss, "devices": "xla"} | options
    return pp.pipeline(model, (x,), targets=x.clone(), schedule=schedule, **PLACED.get(schedule, {}), **options)


def step(pipe: pp.Pipeline, rows: int = 2, *, timeline: bool = False) -> pp.StepResult:
    chance = torch.Generator().manual_seed(2)
    width = pipe.module.layers[0].in_features
    for parameter in pipe.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    x, y = (torch.randn(rows * pipe.schedule.microbatches, width, generator=chance) for _ in range(2))
    return pipe.step(x, targets=y, timeline=timeline)


def together(spans: Sequence[tuple[int, float, float]], least: int = 2) -> float:
    """Return the share of the time from the first start to the last end in which `least` ranks are in a span."""
    moments = sorted({moment for _, start, end in spans for moment in (start, end)})
    found = 0.0
    for start, end in itertools.pairwise(moments):
        if len({rank for rank, begun, ended in spans if begun <= start and ended >= end}) >= least:
            found += end - start
    return found / (moments[-1] - moments[0])


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"transport": "permute"}),
        ("gpipe", {"transport": "host"}),
        ("interleaved_1f1b", {"transport": "permute"}),
        ("zbv", {"transport": "permute"}),
        ("zero_bubble", {"transport": "permute", "skip": True}),
        ("1f1b", {"transport": "permute", "skip": True, "recompute": True}),
    ],
    ids=str,
)
def test_a_measured_step_starts_the_same_programs_and_gives_the_same_numbers(
    schedule: str, options: dict[str, Any]
) -> None:
    pipe = pipeline_of(schedule, **options)
    found = []
    for number in range(6):
        before = adapter.counters()
        result = step(pipe, timeline=number in (3, 5))
        counted = adapter.counters().since(before)
        gradients = torch.cat([parameter.grad.cpu().flatten() for parameter in pipe.parameters()])
        found.append((counted, float(result.loss), result.losses, gradients))
        if result.timeline is not None:
            assert_whole(result.timeline, pipe)
    for counted, loss, losses, gradients in found[3:]:
        assert counted == found[2][0]
        assert counted.compilations == 0
        assert (loss, losses) == found[2][1:3]
        assert torch.equal(gradients, found[2][3])


def assert_whole(timeline: Timeline, pipe: pp.Pipeline) -> None:
    """Look whether each action is there once, and each rank's one after the other in its order."""
    assert timeline.measured
    for rank, row in enumerate(pipe.schedule.rows):
        events = [event for event in timeline.events if event.rank == rank]
        assert sorted(str(event.action) for event in events) == sorted(map(str, row))
        events.sort(key=lambda event: [str(action) for action in row].index(str(event.action)))
        for event in events:
            assert 0 <= event.start <= event.end
        for one, other in itertools.pairwise(events):
            assert one.start <= other.start
            assert one.end <= other.start or other.end == other.start, "a program ran before the one before it"


def test_a_measured_evaluation_has_forwards_only() -> None:
    pipe = pipeline_of("1f1b")
    x = torch.randn(2 * MICROBATCHES, 6)
    for targets in (x.clone(), None):
        timeline = pipe.evaluate(x, targets=targets, timeline=True, outputs="all").timeline
        assert timeline is not None
        assert [event.action.kind for event in timeline.events] == [ActionKind.FORWARD] * 4 * MICROBATCHES


def test_most_of_a_1f1b_step_at_least_two_devices_have_work_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """In flight is what a device has taken and not ended: it does not depend on the cores that CPU devices share."""
    spans: list[tuple[int, float, float]] = []

    def noting(launches: Sequence[Launch], ran: Mapping[int, Ran]) -> Iterator[tuple[Launch, Measured]]:
        spans.extend((launch.rank, ran[launch.program].taken, ran[launch.program].ended) for launch in launches)
        yield from times_of(launches, ran)

    monkeypatch.setattr(timing, "times_of", noting)
    pipe = pipeline_of("1f1b", width=WIDE, rows=WIDE, microbatches=8, transport="permute")
    for _ in range(2):
        step(pipe, rows=WIDE)
    timeline = step(pipe, rows=WIDE, timeline=True).timeline
    assert timeline is not None
    assert len(spans) == len(timeline.events) == 2 * 4 * 8
    assert together(spans) > 0.5
    assert together([(event.rank, event.start, event.end) for event in timeline.events]) > 0


def test_parallel_branches_run_at_the_same_time_on_different_devices() -> None:
    module = example("03_experts")
    rows, count = 256, 4
    made = module.make(rows=rows, width=256, hidden=1024)
    pipe = pp.pipeline(
        **made, microbatches=count, placement=module.placement(4), devices="xla", transport="permute", schedule="gpipe"
    )
    for x, y in module.batches(3, rows * count):
        timeline = pipe.step(x, targets=y, timeline=True).timeline
    experts = {stage.index for stage in pipe.graph.stages if str(stage.key).startswith("expert")}
    overlapping = 0
    for kind, m in itertools.product((ActionKind.FORWARD, ActionKind.BACKWARD), range(count)):
        events = [
            event
            for event in timeline.events
            if event.action.stage in experts and event.action.microbatch == m and event.action.kind is kind
        ]
        assert {event.rank for event in events} == {0, 1, 2, 3}
        overlapping += any(
            one.start < other.end and other.start < one.end for one, other in itertools.combinations(events, 2)
        )
    assert overlapping > count, "mostly no two experts run at the same time"


def example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"timeline_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_program_begins_when_its_device_is_free_and_its_operands_are_there_and_never_after_its_end() -> None:
    actions = [parse_action(name) for name in ("0F0", "0F1", "1F0", "0B0")]
    launches = [
        Launch(0, actions[0], 0.9, 1.1, operands=(), program=0),
        Launch(0, actions[1], 1.9, 2.1, operands=(1, 2), program=3),
        Launch(1, actions[2], 2.1, 2.3, operands=(4,), program=5),
        Launch(0, actions[3], 8.0, 8.1, operands=(), program=None),
    ]
    ran = dict(enumerate([Ran(1, 4), Ran(1.5, 4.5), Ran(1.6, 3), Ran(2, 6), Ran(2.1, 9), Ran(2.2, 8)]))
    found = {str(measured.action): (measured.start, measured.end) for _, measured in times_of(launches, ran)}
    assert found == {"0F0": (1, 4), "0F1": (4.5, 6), "1F0": (8, 8), "0B0": (8.1, 8.1)}


# ---------------------------------------------------------------- while it is measured


def test_the_driver_starts_the_whole_step_before_the_devices_end(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    finish = timing.Stopwatch.finish

    def counting(stopwatch: timing.Stopwatch) -> None:
        left.append(adapter.launched() - adapter.finished())
        finish(stopwatch)

    monkeypatch.setattr(timing.Stopwatch, "finish", counting)
    pipe = pipeline_of("1f1b", width=WIDE, rows=WIDE, transport="permute")
    for number in range(3):
        step(pipe, rows=WIDE, timeline=number == 2)
    assert left[0] > 0, "the driver has waited for the last program"


def test_a_failed_step_is_forgotten_and_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline_of("1f1b")
    expected = [step(pipe).losses for _ in range(2)][-1]
    run, count = Driver.run, itertools.count()

    def failing(driver: Driver, turn: Any) -> None:
        if next(count) == 11:
            raise ZeroDivisionError
        run(driver, turn)

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "run", failing)
        with pytest.raises(ZeroDivisionError):
            step(pipe, timeline=True)
    assert not adapter.JOURNALS
    assert step(pipe).losses == expected
    result = step(pipe, timeline=True)
    assert result.losses == expected
    assert result.timeline is not None
    assert_whole(result.timeline, pipe)
    assert not adapter.JOURNALS


def test_a_step_of_more_programs_than_torch_xla_remembers_is_measured_whole() -> None:
    pipe = pipeline_of("zbv", microbatches=24)
    step(pipe)
    before = adapter.launched()
    timeline = step(pipe, timeline=True).timeline
    assert adapter.launched() - before > 1024
    assert timeline is not None
    assert_whole(timeline, pipe)


def test_programs_whose_end_is_not_noted_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline_of("1f1b")
    ended = adapter.executions()
    monkeypatch.setattr(adapter, "executions", lambda: ended)
    monkeypatch.setattr(timing, "_PATIENCE", 0.1)
    with pytest.raises(pp.RunError, match=r"has noted the end of 0 of \d+ programs of the step"):
        step(pipe, timeline=True)


# ---------------------------------------------------------------- what moves tensors

PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")


@pytest.mark.parametrize(
    ("schedule", "skip"), [("1f1b", False), ("interleaved_1f1b", False), ("zbv", False), ("1f1b", True)]
)
def test_each_program_that_moves_tensors_has_exactly_the_planned_pairs_and_is_the_same_on_all_devices(
    schedule: str, *, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers UR-140."""
    ticks: list[tuple[list[Any], list[list[str]]]] = []
    carriers: set[Carrier] = set()
    deliver, permute = XlaMailbox.deliver, adapter.permute

    def delivering(mailbox: XlaMailbox, parcels: Sequence[Any], carrier: Carrier) -> None:
        carriers.add(carrier)
        ticks.append(([parcel.message for parcel in parcels], []))
        deliver(mailbox, parcels, carrier)

    def permuting(tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        pending = [adapter.pending_permute(tensor, pairs) for tensor in tensors]
        ticks[-1][1].append([adapter.program_text([tensor]) for tensor in pending])
        for tensor in tensors:
            adapter.forget_collectives(tensor.device)
        del pending
        return permute(tensors, pairs)

    pipe = pipeline_of(schedule, skip=skip, transport="permute")
    # The values of ties travel before the first step of the plan.
    step(pipe)
    monkeypatch.setattr(XlaMailbox, "deliver", delivering)
    monkeypatch.setattr(adapter, "permute", permuting)
    with monkeypatch.context() as patched:
        patched.setattr("ppdsl.runtime.pipeline.sum_gradients", lambda *_: None)
        step(pipe)
    (carrier,) = carriers
    assert isinstance(carrier, PermuteCarrier)
    planned = {(message.source, message.target) for messages, _ in ticks for message in messages}
    # All tensors of this model are of one kind, so its rounds are all there are.
    (rounds,) = carrier.rounds().values()
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(planned)
    for messages, programs in ticks:
        carried: Counter[tuple[int, int]] = Counter()
        for texts in programs:
            assert len(texts) == 4
            assert len(set(texts)) == 1
            (found,) = PAIRS.findall(texts[0])
            pairs = [tuple(map(int, pair.split(","))) for pair in found[1:-1].split("},{")]
            assert pairs in rounds
            carried.update(pairs)
        wanted = Counter((int(message.source), int(message.target)) for message in messages)
        assert wanted <= carried
        needed = {max((wanted[pair] for pair in pairs), default=0) for pairs in rounds}
        assert len(programs) == sum(max(wanted[pair] for pair in pairs) for pairs in rounds), needed
    assert sum(len(messages) for messages, _ in ticks) == sum(
        1 for row in pipe.plan.rows for instruction in row if type(instruction).__name__ == "Send"
    )
