"""What an XLA device holds while a step runs, byte for byte, beside what the plan says that it holds.

torch_xla materialises every live tensor when a program is started, so what autograd saves is a buffer: a weight that it
saves turned would be one more for each micro-batch in flight. Counted are the buffers of all live tensors of a device,
by their addresses, after each action; a layer's weights are larger than all values in flight.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ppdsl as pp
from ppdsl.plan.lifetimes import last_uses, peak_activations, state_bytes
from ppdsl.plan.ticks import Turn
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla import stage as xla_stage
from ppdsl.runtime.xla.driver import Driver
from ppdsl.schedule.action import Action, ActionKind

pytestmark = pytest.mark.xla

ROWS, WIDTH, MICROBATCHES, STAGES = 1, 64, 8, 4
EDGE, WEIGHT, LAYER = ROWS * WIDTH * 4, WIDTH * WIDTH * 4, (WIDTH + 1) * WIDTH * 4
"""Bytes of a value between two stages, of a weight, and of a layer's parameters."""
SMALL = 128
"""Bytes of what is not counted: losses and their weights."""


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Start torch_xla before the first backward of this process."""
    xla_adapter.device_count()


class Chain(nn.Module):
    """Stages that save for backward nothing but what enters and leaves them, and their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for key, layer in enumerate(self.layers):
            with pp.stage(key):
                x = torch.tanh(layer(x))
        return x


class Buffers(TorchDispatchMode):
    """Remembers every XLA tensor that an operation takes or makes, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(pytree.tree_leaves((args, kwargs, result)))
        return result

    def add(self, objects: list[Any]) -> None:
        for tensor in objects:
            if isinstance(tensor, Tensor) and tensor.device.type == "xla" and tensor.numel():
                key = id(tensor)
                self._tensors[key] = weakref.ref(tensor, lambda _, key=key: self._tensors.pop(key, None))

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of the buffers that live on a device; a buffer that several tensors share counts once."""
        from torch_xla import _XLAC

        found = {}
        for reference in list(self._tensors.values()):
            tensor = reference()
            if tensor is not None and tensor.device.index == rank:
                found[_XLAC._unsafe_buffer_pointer(tensor)] = tensor.numel() * tensor.element_size()
        return sum(size for size in found.values() if size > SMALL)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[tuple[Action, int]]]]:
    """For each rank its actions of the last step, with the bytes that live after each."""
    buffers, found = Buffers(), {}
    run, step = Driver.run, Driver.step

    def counting(driver: Driver, turn: Turn) -> None:
        run(driver, turn)
        xla_adapter.wait()  # what runs still holds what it reads
        found.setdefault(turn.rank, []).append((turn.action, buffers.bytes_of(turn.rank)))

    def beginning(driver: Driver) -> None:
        found.clear()
        gc.collect()
        buffers.add([thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)])
        with buffers:
            step(driver)

    monkeypatch.setattr(Driver, "run", counting)
    monkeypatch.setattr(Driver, "step", beginning)
    return found


def stepped(schedule: str, transport: str, **options: Any) -> pp.Pipeline:
    """Make three steps; the last one has programs and gradients that are there already."""
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    pipe = pp.pipeline(
        Chain(), (x[:ROWS],), targets=(), loss=lambda out: out.sum(), microbatches=MICROBATCHES, devices="xla",
        schedule=schedule, transport=transport, **options,
    )  # fmt: skip
    for _ in range(3):
        pipe.step(x)
    return pipe


def planned(pipe: pp.Pipeline) -> dict[int, list[int]]:
    """Return for each rank the bytes that live after each of its actions: the plan's, and those that always live."""
    schedule, graph = pipe.schedule, pipe.graph
    sizes, frees = state_bytes(schedule.placement, graph), last_uses(schedule, graph)
    series: dict[int, list[int]] = {}
    for rank, row in enumerate(schedule.rows):
        live = always(pipe, rank)
        series[rank] = []
        for position, action in enumerate(row):
            live += sizes[action.stage] if action.kind is ActionKind.FORWARD else 0
            live -= sum(sizes[stage] for stage, _ in frees[rank].get(position, ()))
            series[rank].append(live)
    return series


def always(pipe: pp.Pipeline, rank: int) -> int:
    """Return the bytes of a rank's parameters, their gradients, and the step's inputs if it takes them."""
    stages = [stage for stage, its in enumerate(pipe.schedule.placement) if its == rank]
    return 2 * LAYER * len(stages) + (MICROBATCHES * EDGE if 0 in stages else 0)


def extras(pipe: pp.Pipeline, transport: str, rank: int) -> list[int]:
    """Return for each action of a rank what lives beside the plan, all of it as large as one value.

    With `permute` the tensor that a rank gives when it has nothing to send; a gradient that is under way to the stage
    before until the next tick; and in the last stage its output, for each micro-batch whose backward has not run.
    """
    found, inside = [], 0
    for action in pipe.schedule.rows[rank]:
        forward = action.kind is ActionKind.FORWARD
        if action.stage == STAGES - 1:
            inside += 1 if forward else -1
        found.append(EDGE * ((transport == "permute") + (not forward and action.stage > 0) + inside))
    return found


CASES = [("1f1b", "permute"), ("1f1b", "host"), ("gpipe", "permute")]


@pytest.mark.parametrize(("schedule", "transport"), CASES)
def test_the_bytes_after_every_action_are_those_of_the_plan(
    counted: dict[int, list[tuple[Action, int]]], schedule: str, transport: str
) -> None:
    pipe = stepped(schedule, transport)
    expected = planned(pipe)
    for rank, series in expected.items():
        assert [action for action, _ in counted[rank]] == list(pipe.schedule.rows[rank])
        both = zip(series, extras(pipe, transport, rank), strict=True)
        assert [live for _, live in counted[rank]] == [live + extra for live, extra in both], f"rank {rank}"
    # So what `verify` allows is what a device takes at most, but for these few values; no weight is among them.
    for peak in peak_activations(pipe.schedule, pipe.graph):
        most = max(live for _, live in counted[peak.rank]) - always(pipe, peak.rank)
        assert peak.bytes <= most <= peak.bytes + max(extras(pipe, transport, peak.rank))
        assert max(extras(pipe, transport, peak.rank)) < WEIGHT


def test_without_its_hook_a_stage_would_hold_a_turned_weight_for_each_micro_batch_in_flight(
    counted: dict[int, list[tuple[Action, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_stage, "pack", lambda tensor: tensor)
    pipe = stepped("1f1b", "host")
    expected = planned(pipe)
    for rank in range(1, STAGES):  # the first stage has no gradient of its input to compute
        live, turned = 0, []
        for action, size in counted[rank]:
            live += 1 if action.kind is ActionKind.FORWARD else -1
            turned.append((size - expected[rank][len(turned)]) // WEIGHT)
            assert turned[-1] == live
        assert max(turned) == STAGES - rank


def test_a_recomputed_stage_holds_what_enters_it_and_no_more(counted: dict[int, list[tuple[Action, int]]]) -> None:
    pipe = stepped("gpipe", "host", recompute=True)
    for rank, series in planned(pipe).items():
        assert all(size <= live + EDGE for (_, size), live in zip(counted[rank], series, strict=True))
        # Of each micro-batch what enters, and of one what leaves.
        entering = MICROBATCHES if rank else 0
        most = max(size for _, size in counted[rank]) - always(pipe, rank)
        assert most <= (entering + 1) * EDGE
