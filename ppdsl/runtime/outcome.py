"""What a step gives back: the loss on every rank, outputs on request, measured times."""

from __future__ import annotations

import json
import math
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, render_plain
from ppdsl.graph.ir import OutputRoute, TensorMeta
from ppdsl.runtime.batch import Batch, BatchAxis, join_microbatches, output_axis
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.world import World
from ppdsl.schedule.action import parse_action
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds

__all__ = ["StepResult", "check_outputs", "collect_outputs", "collect_timeline", "joined_layout", "share_loss"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation gave.

    Attributes:
        loss: The weighted sum of the micro-batches' losses, detached, on the CPU, the same number on every rank; None
            when nothing computes a loss.
        losses: Each micro-batch's own loss, not weighted.
        outputs: The model's own output type for the whole batch, on the ranks that asked for it; otherwise None.
        timeline: Measured times of all ranks, when asked for.
    """

    loss: torch.Tensor | None
    losses: tuple[float, ...] = ()
    outputs: Any = None
    timeline: Timeline | None = None


def share_loss(
    compiled: Compiled, weights: Sequence[float], world: World
) -> tuple[torch.Tensor | None, tuple[float, ...]]:
    """Return the weighted loss and each micro-batch's own, the same on every rank.

    One that is not finite is reported with a `PpdslWarning`.
    """
    if compiled.graph.loss is None or compiled.loss_rank is None:
        return None, ()
    dtype = compiled.loss_dtype
    losses = compiled.losses()
    mine: torch.Tensor | None = None
    if losses:
        # What weighs nothing may be no number: the mean over a micro-batch of which nothing counts.
        counted = [
            loss * weight if weight else torch.zeros_like(loss) for loss, weight in zip(losses, weights, strict=True)
        ]
        total = counted[0]
        for part in counted[1:]:
            total = total + part
        mine = torch.stack([total, *losses]).reshape(-1)
    layout = Layout.of(TensorMeta((1 + len(weights),), str(dtype).removeprefix("torch."), (1,)))
    ranks = range(len(compiled.plan.rows))
    shared = world.share(None if mine is None else mine.to(_CPU), compiled.loss_rank, ranks, layout, _CPU)
    if shared is None:
        return None, ()
    each = tuple(shared[1:].tolist())
    _warn_of_odd_losses(compiled, [loss if weight else 0.0 for loss, weight in zip(each, weights, strict=True)])
    return shared[0].clone(), each


def _warn_of_odd_losses(compiled: Compiled, losses: Sequence[float]) -> None:
    odd: dict[str, list[int]] = {}
    for m, loss in enumerate(losses):
        if not math.isfinite(loss):
            odd.setdefault(str(loss), []).append(m)
    if not odd or compiled.graph.loss is None:
        return
    stage = compiled.graph.stages[compiled.graph.loss]
    listed = " and ".join(f"{loss} in {_microbatches(where)}" for loss, where in odd.items())
    message = f"The loss, computed in stage {stage.label}, is {listed}."
    diagnostic = Diagnostic("loss-not-finite", message, severity=Severity.WARNING)
    warnings.warn(PpdslWarning(render_plain([diagnostic])), stacklevel=2)


def _microbatches(numbers: Sequence[int]) -> str:
    return f"micro-batch{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"


def joined_layout(route: OutputRoute, axis: int | None, microbatches: int) -> Layout:
    """Return how an output of the whole batch lies on the wire: row-major."""
    shape = list(route.meta.shape)
    if axis is not None and microbatches > 1:
        shape[axis] *= microbatches
    return Layout.of(TensorMeta(tuple(shape), route.meta.dtype))


def check_outputs(compiled: Compiled, batch: Batch, batch_axis: BatchAxis) -> None:
    """Find the batch axis of every output before anything runs.

    Raises:
        CallError: One is not clear.
    """
    if compiled.schedule.microbatches == 1:
        return
    for index, route in enumerate(compiled.outputs):
        if index not in _loss_outputs(compiled):
            output_axis(route, batch, batch_axis)


def collect_outputs(
    compiled: Compiled,
    batch: Batch,
    batch_axis: BatchAxis,
    loss: torch.Tensor | None,
    targets: Sequence[int],
    world: World,
) -> Any:
    """Return the model's own output for the whole batch on the ranks in `targets`, None on others.

    An output that is the loss is the weighted loss of the step.
    """
    microbatches = compiled.schedule.microbatches
    leaves: list[torch.Tensor | None] = []
    for index, route in enumerate(compiled.outputs):
        if index in _loss_outputs(compiled):
            leaves.append(loss)
            continue
        axis = output_axis(route, batch, batch_axis) if microbatches > 1 else None
        pieces = compiled.output_pieces(index)
        joined = join_microbatches(route, pieces, batch, batch_axis) if pieces else None
        source = compiled.placement[route.producer]
        leaves.append(_spread(joined, source, targets, joined_layout(route, axis, microbatches), world))
    present = [leaf for leaf in leaves if leaf is not None]
    return compiled.recording.rebuild(present) if len(present) == len(leaves) else None


def _spread(
    tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, world: World
) -> torch.Tensor | None:
    if all(world.holds(target) for target in targets) and tensor is not None:
        return tensor
    return world.share(None if tensor is None else tensor.to(_CPU), source, targets, layout, _CPU)


def _loss_outputs(compiled: Compiled) -> frozenset[int]:
    if compiled.graph.loss is None:
        return frozenset()
    results = compiled.recording.programs[compiled.graph.loss].results
    return frozenset(index for result in results if result.loss for index in result.outputs)


def collect_timeline(compiled: Compiled, begun: float, world: World) -> Timeline:
    """Return the measured times of all ranks, from the first one's start of the step.

    Processes of one host share a clock; those of another host are put at the start of their own step.

    Args:
        compiled: What ran.
        begun: When this process began the step (`time.perf_counter`).
        world: The ranks.
    """
    rows = [(e.rank, str(m.action), m.start, m.end) for e in compiled.executors for m in e.measured]
    text = json.dumps({"host": _host(), "begun": begun, "rows": rows})
    notes: list[Mapping[str, Any]] = [json.loads(note) for note in world.gather(text)]
    first: dict[str, float] = {}
    for note in notes:
        first[note["host"]] = min(note["begun"], first.get(note["host"], note["begun"]))
    events = [
        Event(rank, parse_action(action), Seconds(start - first[note["host"]]), Seconds(end - first[note["host"]]))
        for note in notes
        for rank, action, start, end in note["rows"]
    ]
    events.sort(key=lambda event: (event.start, event.rank))
    labels = tuple(stage.label for stage in compiled.graph.stages)
    return Timeline(tuple(events), len(compiled.plan.rows), measured=True, stage_labels=labels)


def _host() -> str:
    # The time of the last boot tells hosts with equal names apart; to the ten seconds, as clocks are adjusted.
    return f"{platform.node()} {round((time.time() - time.perf_counter()) / 10)}"
