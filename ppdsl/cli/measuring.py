"""A real step of a model in this process, beside what the simulator says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppdsl.cli.models import ModelCall
from ppdsl.cli.schedules import own_order
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.messages import MessagePlan
from ppdsl.schedule.action import Action
from ppdsl.schedule.flow import Made, flow_of
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import measured_costs
from ppdsl.simulation.simulator import simulate
from ppdsl.spec.partition import Partition
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds

__all__ = ["MEASURED_STEPS", "TURNS", "Measured", "compare_steps", "lay_side_by_side", "measure"]

MEASURED_STEPS = 10
TURNS = (
    "Ranks took turns in this process. Each action is drawn with its measured time, the shortest of five steps, "
    "as if ranks had run side by side; the prediction knows five other steps."
)


@dataclass(frozen=True)
class Measured:
    """A step that ran, and its prediction.

    Attributes:
        graph: The stages.
        schedule: Their order.
        predicted: Simulated with each stage's mean times in other steps.
        timeline: Measured, the ranks side by side.
    """

    graph: StageGraph
    schedule: Schedule
    predicted: Timeline
    timeline: Timeline


def measure(
    call: ModelCall,
    schedule: str | Schedule,
    microbatches: int,
    placement: Mapping[int | str, int] | None = None,
    spec: Partition | None = None,
) -> Measured:
    """Run some steps of a model in this process: to warm up, to learn the stages' times, and to measure.

    Args:
        call: The model with one micro-batch of inputs; a step gets them once for each micro-batch.
        schedule: A family's name, a CSV file, or a schedule.
        microbatches: Number of micro-batches; a CSV file has its own.
        placement: For each stage key its rank; None: one rank for each.
        spec: What divides the model; None: its marks.
    """
    from ppdsl.runtime.pipeline import pipeline  # loads torch

    order = schedule if isinstance(schedule, Schedule) else own_order(schedule)
    count = microbatches if order is None else order.microbatches
    pipe = pipeline(
        call.model,
        args=call.args,
        kwargs=call.kwargs,
        targets=call.targets,
        loss=call.loss,
        schedule=order or schedule,
        placement=placement,
        microbatches=count,
        spec=spec,
    )
    size = _batch_size((call.args, call.kwargs))
    args, kwargs, targets = _repeat((call.args, dict(call.kwargs), call.targets), count, size)
    steps = []
    for _ in range(1 + MEASURED_STEPS):
        pipe.step(*args, targets=targets, timeline=True, **kwargs)
        steps.append(pipe.timeline() or Timeline((), ranks=pipe.plan.schedule.ranks))
    return compare_steps(pipe.plan, steps[1:])


def compare_steps(plan: MessagePlan, steps: Sequence[Timeline]) -> Measured:
    """Return a measured step beside what others let expect.

    Every other step gives the costs, so that a machine that becomes slower or faster does so for both.

    Args:
        plan: What ran.
        steps: Measured steps, at least two.
    """
    known, shown = lay_side_by_side(steps[::2], plan), lay_side_by_side(steps[1::2], plan)
    predicted = simulate(plan, measured_costs(known, plan.graph))
    return Measured(plan.graph, plan.schedule, predicted, shown)


def lay_side_by_side(steps: Sequence[Timeline], plan: MessagePlan) -> Timeline:
    """Return a step whose ranks took turns in one process as if they had run at the same time.

    Every action keeps its measured duration, the shortest of the steps: another program on the machine can only slow
    it down. It starts when its rank is free and what it needs is there.

    Args:
        steps: The same step, measured some times in one process, each in a legal order.
        plan: What ran.
    """
    shortest: dict[Action, float] = {}
    for event in (event for step in steps for event in step.events):
        shortest[event.action] = min(event.end - event.start, shortest.get(event.action, math.inf))
    flow = flow_of(plan.graph)
    free = [0.0] * steps[0].ranks
    ready: dict[Made, float] = {}
    events = []
    for event in sorted(steps[0].events, key=lambda e: e.start):
        start = max([free[event.rank], *(ready[need] for need in flow.needs(event.action))])
        end = start + shortest[event.action]
        free[event.rank] = end
        made = flow.makes(event.action)
        if made is not None:
            ready[made] = end
        events.append(Event(event.rank, event.action, Seconds(start), Seconds(end)))
    events.sort(key=lambda e: (e.start, e.rank))
    return replace(steps[0], events=tuple(events))


def _batch_size(tree: Any) -> int | None:
    """Return the length of the first tensor's first axis."""
    children = list(tree.values()) if isinstance(tree, Mapping) else tree
    if isinstance(children, (tuple, list)):
        return next((size for child in children if (size := _batch_size(child)) is not None), None)
    return int(tree.shape[0]) if getattr(tree, "ndim", 0) else None


def _repeat(tree: Any, times: int, size: int | None) -> Any:
    """Return a tree whose tensors of `size` rows are repeated; others (a mask of all positions) stay as they are."""
    if isinstance(tree, Mapping):
        return {key: _repeat(value, times, size) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_repeat(value, times, size) for value in tree)
    if getattr(tree, "ndim", 0) and tree.shape[0] == size:
        return tree.repeat(times, *(1 for _ in tree.shape[1:]))
    return tree
