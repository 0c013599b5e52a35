"""Lower bounds on the time of a step, whatever the order: critical path, work of a rank, and Jackson's bound."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs
from ppdsl.simulation.memory_bound import memory_bound
from ppdsl.simulation.network import Kinds, network_of
from ppdsl.units import Seconds

__all__ = ["Bounds", "lower_bounds"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """No order of these computations on these ranks is faster than any of these.

    Attributes:
        critical_path: The longest chain of computations and messages, in seconds.
        jackson: The largest one-machine bound of any rank: its computations, each not before its head and followed by
            its tail, with interruptions allowed. Never below the work of a rank.
        memory: What limits on activations allow (`memory_bound`), in seconds; 0 without limits.
    """

    critical_path: Seconds
    jackson: Seconds
    memory: Seconds = Seconds(0.0)

    @property
    def best(self) -> Seconds:
        """The largest one."""
        return max(self.critical_path, self.jackson, self.memory)


def lower_bounds(
    schedule: Schedule,
    graph: StageGraph,
    costs: Costs,
    *,
    limits: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> Bounds:
    """Return lower bounds for the schedule's computations on its placement, in any order.

    Micro-batches are alike, so every stage may be assumed to take them in order without loss; this makes heads and
    tails longer and the bounds better. Time is `O(n log n)` in the number of computations.

    Args:
        schedule: Says which computations there are (B, or I and W) and on which ranks.
        graph: The stages and the values between them.
        costs: Seconds of computations and messages.
        limits: For each rank what it may hold of activations; None: any amount.
        weights: For each stage what its activation of one micro-batch takes; None: 1.

    Source:
        Jackson 1955; Carlier 1982, "The one-machine sequencing problem".

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> graph = chain_graph(4)
    >>> order = build_schedule("sequential", graph, (0, 1, 2, 3), microbatches=8)
    >>> lower_bounds(order, graph, uniform_costs(graph))
    Bounds(critical_path=26.0, jackson=33.0, memory=0.0)
    """
    path = 0.0
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(schedule.ranks)]
    memory = Seconds(0.0)
    units = (1.0,) * len(graph.stages) if weights is None else weights
    for kinds, count in _alike(schedule, graph):
        if limits is not None:
            own = memory_bound(graph, schedule.placement, costs, kinds, count, limits, units)
            memory = max(memory, own)
        network = network_of(graph, schedule.placement, costs, kinds, count)
        for (stage, kind), heads in network.heads.items():
            seconds = network.seconds[stage, kind]
            timed = [(h, seconds, t) for h, t in zip(heads, network.tails[stage, kind], strict=True)]
            path = max(path, max((h + seconds + t for h, _, t in timed), default=0.0))
            jobs[schedule.placement[stage]] += timed
    return Bounds(Seconds(path), Seconds(max(map(_jackson, jobs), default=0.0)), memory)


def _alike(schedule: Schedule, graph: StageGraph) -> Iterator[tuple[Kinds, int]]:
    """Yield what stages run, and for how many micro-batches; usually all are alike."""
    whole = [bytearray(schedule.microbatches) for _ in graph.stages]
    weights = [bytearray(schedule.microbatches) for _ in graph.stages]
    backward = False
    for row in schedule.rows:
        for action in row:
            if action.kind is ActionKind.BACKWARD:
                whole[action.stage][action.microbatch] = backward = True
            elif action.kind is ActionKind.WEIGHT_GRAD:
                weights[action.stage][action.microbatch] = backward = True
            elif action.kind is ActionKind.INPUT_GRAD:
                backward = True
    patterns = Counter(zip(*whole, *weights, strict=True))
    stages = len(graph.stages)
    for pattern, count in patterns.items():
        kinds: list[tuple[ActionKind, ...]] = []
        for stage in graph.stages:
            if not backward or not stage.has_backward:
                kinds.append((ActionKind.FORWARD,))
            elif pattern[stage.index]:
                kinds.append((ActionKind.FORWARD, ActionKind.BACKWARD))
            elif pattern[stages + stage.index]:
                kinds.append((ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD))
            else:
                kinds.append((ActionKind.FORWARD, ActionKind.INPUT_GRAD))
        yield tuple(kinds), count


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
