"""What a step gives back: the loss on every rank, outputs on request, measured times."""

from __future__ import annotations

import json
import math
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, render_plain
from ppdsl.graph.ir import TensorMeta
from ppdsl.runtime.batches.joining import Joined
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.processes.distributed import of_own_pipeline
from ppdsl.runtime.world import World
from ppdsl.schedule.action import parse_action
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds

__all__ = ["StepResult", "collect_outputs", "collect_timeline", "share_loss"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation gave.

    Attributes:
        loss: The weighted sum of the micro-batches' losses with their auxiliary losses (`pp.aux_loss`), detached, on
            the CPU, the same number on every rank; None when nothing computes a loss.
        losses: Each micro-batch's own loss with its auxiliary losses, not weighted.
        outputs: The model's own output type for the whole batch, on the ranks that asked for it; otherwise None.
        timeline: Measured times of all ranks, when asked for.
        counted: How many rows (`mean`) or targets (`token_mean`) the loss is the mean of; None for other reductions.
            It weighs the loss against those of other batches (`mean_loss`).
        aux: What auxiliary losses make of `loss`; None when there are none.
        metrics: What stages reported by `pp.metric`, by name: tensors on the CPU, the same on every rank.
    """

    loss: torch.Tensor | None
    losses: tuple[float, ...] = ()
    outputs: Any = None
    timeline: Timeline | None = None
    counted: int | None = None
    aux: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


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
        row = torch.stack(losses).reshape(-1)
        if len(set(weights)) == 1 and weights[0]:
            counted = (row * weights[0]).unbind()
        else:
            # What weighs nothing may be no number: the mean over a micro-batch of which nothing counts.
            pairs = zip(row.unbind(), weights, strict=True)
            counted = tuple(loss * weight if weight else torch.zeros_like(loss) for loss, weight in pairs)
        total = counted[0]
        for part in counted[1:]:
            total = total + part
        mine = torch.cat([total.reshape(1), row])
    layout = Layout.of(TensorMeta((1 + len(weights),), str(dtype).removeprefix("torch."), (1,)))
    ranks = range(len(compiled.plan.rows))
    shared = world.share(None if mine is None else mine.to(_CPU), compiled.loss_rank, ranks, layout, _CPU)
    if shared is None:
        return None, ()
    each = tuple(shared.tolist()[1:])
    if not all(map(math.isfinite, each)):
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


def collect_outputs(
    compiled: Compiled,
    joined: Sequence[Joined | None],
    loss: torch.Tensor | None,
    world: World,
    *,
    everywhere: bool,
) -> Any:
    """Return the model's own output for the whole batch on the rank of the last stage or on all, None on others.

    An output that is the loss is the weighted loss of the step.

    Args:
        compiled: What ran.
        joined: How each output is put together; None for the loss.
        loss: The loss of the step.
        world: All ranks.
        everywhere: Whether all ranks get it.
    """
    last = compiled.placement[max((route.producer for route in compiled.outputs), default=0)]
    targets = range(len(compiled.plan.rows)) if everywhere else [last]
    leaves: list[torch.Tensor | None] = []
    for index, (route, how) in enumerate(zip(compiled.outputs, joined, strict=True)):
        if how is None:
            leaves.append(loss)
            continue
        pieces = compiled.output_pieces(index)
        whole = how.join(pieces) if pieces else None
        source = compiled.placement[route.producer]
        leaves.append(_spread(whole, source, targets, how.layout, world))
    present = [leaf for leaf in leaves if leaf is not None]
    return compiled.recording.rebuild(present) if len(present) == len(leaves) else None


def _spread(
    tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, world: World
) -> torch.Tensor | None:
    if all(world.holds(target) for target in targets) and tensor is not None:
        return tensor
    return world.share(None if tensor is None else tensor.to(_CPU), source, targets, layout, _CPU)


def collect_timeline(compiled: Compiled, begun: float, world: World) -> Timeline:
    """Return the measured times of all ranks of this pipeline, from the first one's start of the step.

    Processes of one host share a clock; those of another host are put at the start of their own step.

    Args:
        compiled: What ran.
        begun: When this process began the step (`time.perf_counter`).
        world: The ranks.
    """
    rows = [(e.rank, str(m.action), m.start, m.end) for e in compiled.executors for m in e.times()]
    text = json.dumps({"host": _host(), "begun": begun, "rows": rows})
    notes: list[Mapping[str, Any]] = [json.loads(note) for note in of_own_pipeline(world.gather(text), world)]
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
