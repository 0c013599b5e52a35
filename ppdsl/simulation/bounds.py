"""Lower bounds on the time of a step, whatever the order: critical path, work of a rank, and Jackson's bound."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs
from ppdsl.simulation.simulator import arrival_delays
from ppdsl.units import Seconds

__all__ = ["Bounds", "lower_bounds"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """No order of these computations on these ranks is faster than any of these.

    Attributes:
        critical_path: The longest chain of computations and messages, in seconds.
        jackson: The largest one-machine bound of any rank: its computations, each not before its head and followed by
            its tail, with interruptions allowed.
    """

    critical_path: Seconds
    jackson: Seconds

    @property
    def best(self) -> Seconds:
        """The larger one."""
        return max(self.critical_path, self.jackson)


def lower_bounds(schedule: Schedule, graph: StageGraph, costs: Costs) -> Bounds:
    """Return lower bounds for the schedule's computations on its placement, in any order.

    Micro-batches are alike, so every stage may be assumed to take them in order without loss; this makes heads and
    tails longer and the bounds better. Time is `O(n log n)` in the number of computations.

    Args:
        schedule: Says which computations there are (B, or I and W) and on which ranks.
        graph: The stages and the values between them.
        costs: Seconds of computations and messages.

    Source:
        Jackson 1955; Carlier 1982, "The one-machine sequencing problem".

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> graph = chain_graph(4)
    >>> order = build_schedule("sequential", graph, (0, 1, 2, 3), microbatches=8)
    >>> lower_bounds(order, graph, uniform_costs(graph))
    Bounds(critical_path=26.0, jackson=33.0)
    """
    network = _Network(schedule, graph, costs)
    path = max((h + d + t for h, d, t in zip(network.heads, network.times, network.tails, strict=True)), default=0.0)
    jackson = 0.0
    for rank in range(schedule.ranks):
        jobs = [
            (network.heads[i], network.times[i], network.tails[i])
            for i, action in enumerate(network.actions)
            if schedule.placement[action.stage] == rank
        ]
        jackson = max(jackson, _jackson(jobs))
    return Bounds(Seconds(path), Seconds(jackson))


class _Network:
    """All computations with the least time before them (head) and after them (tail)."""

    def __init__(self, schedule: Schedule, graph: StageGraph, costs: Costs) -> None:
        flow = flow_of(graph)
        delays = arrival_delays(schedule, graph, costs)
        # Forwards along the model, then gradients against it, then weights: a topological order of the computations.
        phases = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 1, ActionKind.INPUT_GRAD: 1, ActionKind.WEIGHT_GRAD: 2}

        def order(action: Action) -> tuple[int, int, int]:
            phase = phases[action.kind]
            return phase, action.stage if phase == 0 else -action.stage, action.microbatch

        self.actions = sorted((action for row in schedule.rows for action in row), key=order)
        self.times = [float(costs.of(action)) for action in self.actions]
        maker = {made: i for i, action in enumerate(self.actions) if (made := flow.makes(action)) is not None}
        arcs: list[list[tuple[int, float]]] = []
        previous: dict[tuple[int, ActionKind], int] = {}
        for i, action in enumerate(self.actions):
            before = [
                (maker[need], delays.get((need.gradient, need.stage, action.stage), 0.0)) for need in flow.needs(action)
            ]
            key = (action.stage, action.kind)
            if key in previous:
                before.append((previous[key], 0.0))
            previous[key] = i
            arcs.append(before)
        self.heads = [0.0] * len(self.actions)
        self.tails = [0.0] * len(self.actions)
        for i, before in enumerate(arcs):
            self.heads[i] = max((self.heads[j] + self.times[j] + c for j, c in before), default=0.0)
        for i in reversed(range(len(arcs))):
            for j, c in arcs[i]:
                self.tails[j] = max(self.tails[j], c + self.times[i] + self.tails[i])


def _jackson(jobs: list[tuple[float, float, float]]) -> float:
    """Run jobs (head, time, tail) on one machine, the longest tail first, interrupting freely; return the last end."""
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []  # (-tail, time left)
    now = bound = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, time, tail = waiting.pop()
            heapq.heappush(ready, (-tail, time))
        tail, left = heapq.heappop(ready)
        spare = waiting[-1][0] - now if waiting else left
        if left <= spare:
            now += left
            bound = max(bound, now - tail)
        else:
            now = waiting[-1][0]
            heapq.heappush(ready, (tail, left - spare))
    return bound
