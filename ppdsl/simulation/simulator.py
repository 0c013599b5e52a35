"""Predict when each computation runs: ranks work in their order, messages take time, nothing else does."""

from __future__ import annotations

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.laws import find_circle
from ppdsl.plan.messages import MessagePlan
from ppdsl.plan.verify import Planned
from ppdsl.schedule.flow import Made, carries_gradient, flow_of
from ppdsl.schedule.progress import run_in_order
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs, uniform_costs
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds

__all__ = ["arrival_delays", "simulate", "simulate_schedule"]


def simulate(planned: Planned | MessagePlan, costs: Costs | None = None) -> Timeline:
    """Return when each computation of a pipeline's step would run.

    Args:
        planned: A pipeline, or a plan.
        costs: Seconds of computations and messages; None: forward 1, backward 2, messages free.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> timeline = simulate(lower(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=8), graph))
    >>> timeline.makespan, round(timeline.bubble, 4)
    (33.0, 0.2727)
    """
    plan = planned if isinstance(planned, MessagePlan) else planned.plan
    return simulate_schedule(plan.schedule, plan.graph, costs)


def simulate_schedule(schedule: Schedule, graph: StageGraph, costs: Costs | None = None) -> Timeline:
    """Return when each computation of a schedule would run.

    A rank starts its next action when it is free and everything the action needs has arrived. A message leaves when it
    is made and takes its edge's transfer time; messages do not slow each other down, and receives are posted in time.
    Linear in the number of actions.

    Args:
        schedule: Computations for each rank.
        graph: The stages and the values between them.
        costs: Seconds of computations and messages; None: forward 1, backward 2, messages free.

    Raises:
        ScheduleError: Ranks wait for each other.
    """
    costs = costs or uniform_costs(graph)
    flow = flow_of(graph)
    delays = arrival_delays(schedule, graph, costs)
    progress = run_in_order(schedule.rows, flow.needs, flow.makes)
    if progress.blocked:
        circle = find_circle(schedule, graph)
        raise ScheduleError(*(() if circle is None else (circle,)))
    end_of: dict[Made, float] = {}
    free = [0.0] * schedule.ranks
    events = []
    for rank, position in progress.order:
        action = schedule.rows[rank][position]
        start = free[rank]
        for need in flow.needs(action):
            start = max(start, end_of[need] + delays.get((need.gradient, need.stage, action.stage), 0.0))
        end = start + costs.of(action)
        free[rank] = end
        made = flow.makes(action)
        if made is not None:
            end_of[made] = end
        events.append(Event(rank, action, Seconds(start), Seconds(end)))
    events.sort(key=_moment)
    labels = tuple(stage.label for stage in graph.stages)
    return Timeline(tuple(events), schedule.ranks, stage_labels=labels)


def arrival_delays(schedule: Schedule, graph: StageGraph, costs: Costs) -> dict[tuple[bool, int, int], float]:
    """Return the seconds between the end of a stage and the arrival of all it sends at another, if on another rank.

    Keys are (gradient or value, from stage, to stage); several edges between two stages count with the slowest.
    """
    delays: dict[tuple[bool, int, int], float] = {}
    for edge in graph.edges:
        seconds = costs.transfer(edge.index)
        for consumer in edge.consumers:
            if schedule.placement[consumer] == schedule.placement[edge.producer]:
                continue
            forward, backward = (False, edge.producer, consumer), (True, consumer, edge.producer)
            delays[forward] = max(delays.get(forward, 0.0), seconds)
            if carries_gradient(graph, edge, consumer):
                delays[backward] = max(delays.get(backward, 0.0), seconds)
    return delays


def _moment(event: Event) -> tuple[float, int, float]:
    return event.start, event.rank, event.end
