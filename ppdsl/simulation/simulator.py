"""Predict when each computation runs: ranks work in their order, messages take time, nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.coded import JOB_KINDS, coded_of, legal_order
from ppdsl.plan.laws import find_circle
from ppdsl.plan.messages import MessagePlan
from ppdsl.plan.pausing import without_collection
from ppdsl.plan.verify import Planned
from ppdsl.schedule.action import action_of
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs, uniform_costs
from ppdsl.simulation.network import arrival_delays
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds

__all__ = ["period", "simulate", "simulate_schedule"]

_STEPS = 40


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
    Actions that may run together (`Schedule.overlaps`) are counted one after the other. Linear in the number of
    actions.

    Args:
        schedule: Computations for each rank.
        graph: The stages and the values between them.
        costs: Seconds of computations and messages; None: forward 1, backward 2, messages free.

    Raises:
        ScheduleError: Ranks wait for each other.
    """
    clock = _Clock(schedule, graph, costs or uniform_costs(graph))
    with without_collection():
        events = _events(schedule, clock)
    labels = tuple(stage.label for stage in graph.stages)
    return Timeline(tuple(events), schedule.ranks, stage_labels=labels)


def _events(schedule: Schedule, clock: _Clock) -> list[Event]:
    starts = clock.run([0.0] * schedule.ranks)
    events = [
        Event(rank, action, Seconds(start), Seconds(start + seconds))
        for rank, row in enumerate(schedule.rows)
        for action, start, seconds in zip(row, starts[rank], clock.lasting(rank), strict=True)
    ]
    # Stable, and each rank's events are in their order: equal starts stay sorted by rank, then by end.
    events.sort(key=attrgetter("start"))
    return events


def period(schedule: Schedule, graph: StageGraph, costs: Costs | None = None) -> Seconds:
    """Return the seconds from one step to the next when steps follow each other without a barrier.

    Each rank starts its next step when it is done with its own part of the last one. After a few steps they all go at
    the pace of the slowest; its bubble is what remains of waiting in the long run. For the uniform schedules of the
    literature this is the largest span of a rank (`Timeline.spans`).

    Args:
        schedule: Computations for each rank.
        graph: The stages and the values between them.
        costs: Seconds of computations and messages; None: forward 1, backward 2, messages free.

    Raises:
        ScheduleError: Ranks wait for each other.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> [period(build_schedule(name, graph, range(4), 8), graph) for name in ("zero_bubble(h1)", "zero_bubble(h2)")]
    [27.0, 24.0]
    """
    clock = _Clock(schedule, graph, costs or uniform_costs(graph))
    free = [0.0] * schedule.ranks
    working = [rank for rank, row in enumerate(schedule.rows) if row]
    ends = [max(free, default=0.0)]
    previous: list[float] = []
    for _ in range(_STEPS):
        before = list(free)
        clock.run(free)
        gaps = [free[rank] - before[rank] for rank in working]
        ends.append(max(free, default=0.0))
        even = bool(gaps) and max(gaps) - min(gaps) <= 1e-9 * max(gaps)
        if not gaps or (even and previous and abs(previous[0] - gaps[0]) <= 1e-9 * gaps[0]):
            return Seconds(gaps[0] if gaps else 0.0)
        previous = gaps if even else []
    half = _STEPS // 2
    return Seconds((ends[-1] - ends[half]) / (_STEPS - half))


class _Clock:
    """A schedule that can be run on paper, again and again."""

    def __init__(self, schedule: Schedule, graph: StageGraph, costs: Costs) -> None:
        self.coded = coded_of(schedule, graph)
        order = legal_order(self.coded)
        if order is None:
            circle = find_circle(schedule, graph)
            raise ScheduleError(*(() if circle is None else (circle,)))
        self.order = order
        delays = arrival_delays(schedule.placement, graph, costs)
        self.seconds = [float(costs.of(action_of(s, k, 0))) for s in range(len(graph.stages)) for k in JOB_KINDS]
        self.waits = [
            tuple(
                (need, delays.get((gradient, giver, job // 4), 0.0))
                for need, (gradient, giver) in zip(needs, givers, strict=True)
            )
            for job, (needs, givers) in enumerate(zip(self.coded.needs, self.coded.givers, strict=True))
        ]

    def run(self, free: list[float]) -> list[list[float]]:
        """Return for each rank the starts of its actions; `free` says when ranks can begin, and then when they end."""
        coded, seconds, waits, gives = self.coded, self.seconds, self.waits, self.coded.gives
        ends = [0.0] * coded.size
        starts: list[list[float]] = [[] for _ in coded.jobs]
        steps = [zip(jobs, places, strict=True) for jobs, places in zip(coded.jobs, coded.places, strict=True)]
        for rank in self.order:
            job, place = next(steps[rank])
            start = free[rank]
            for need, delay in waits[job]:
                arrival = ends[need + place] + delay
                if arrival > start:
                    start = arrival
            starts[rank].append(start)
            end = free[rank] = start + seconds[job]
            made = gives[job]
            if made >= 0:
                ends[made + place] = end
        return starts

    def lasting(self, rank: int) -> Sequence[float]:
        """Return how long each action of a rank takes."""
        return [self.seconds[job] for job in self.coded.jobs[rank]]
