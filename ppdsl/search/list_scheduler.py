"""A schedule for any graph, costs and memory: whenever a rank is free it starts the most urgent thing that it can.

No family knows unequal stages, slow links and memory limits; this knows all of them and no pattern. It is never far
off where stages are unequal, and loses to the hand-made V patterns where memory is tight; `auto` takes the better one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeAlias

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, action_of
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.table import Schedule
from ppdsl.search.memory import Memory, Room
from ppdsl.simulation.costs import Costs, uniform_costs
from ppdsl.simulation.network import Kinds, Network, arrival_delays, kinds_of, network_of

__all__ = ["Priority", "list_schedule"]


class Priority(StrEnum):
    """Which of the actions that could start is the most urgent."""

    BACKWARD_FIRST = "backward first"
    """I and B first, then F, each by micro-batch, then by the longest way to go; W when nothing else can run."""
    LONGEST_TAIL = "longest tail"
    """F, I and B by the time that must still follow them (`network_of`); W when nothing else can run."""


def list_schedule(
    graph: StageGraph,
    placement: Sequence[int],
    microbatches: int,
    ranks: int | None = None,
    *,
    costs: Costs | None = None,
    priority: Priority = Priority.BACKWARD_FIRST,
    split: bool = False,
    memory: Memory | None = None,
) -> Schedule:
    """Return the order in which ranks would run if each started what is most urgent as soon as it can.

    A forward starts only when its activation fits, and when room is left for what the rank's oldest micro-batch has
    still to run there (see `Room`); so no memory that holds one micro-batch on each rank can make it stand still.

    Args:
        graph: Any stage graph.
        placement: For each stage its rank.
        microbatches: At least 1.
        ranks: Number of ranks; None: as many as the placement uses.
        costs: Seconds of computations and messages; None: uniform, messages free.
        priority: What to start first.
        split: Whether backwards are split into I and W.
        memory: What each rank may hold; None: any amount.

    Raises:
        ScheduleError: A rank's memory does not hold one micro-batch.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> print(list_schedule(chain_graph(3), (0, 1, 2), 4, memory=Memory.of_activations((3, 2, 1), stages=3)))
    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    count = max(placement) + 1 if ranks is None else ranks
    costs = costs or uniform_costs(graph)
    run = _Run(graph, placement, microbatches, count, costs, kinds_of(graph, split=split), priority, memory)
    rows = run.run()
    name = f"list({'split' if split else 'full'}, {priority.value})"
    return Schedule(name, rows, tuple(placement), microbatches)


_FORWARD, _GRADIENT, _WEIGHT = range(3)
Key: TypeAlias = Callable[[int, int, int], tuple[float, ...]]


class _Run:
    """The event queue. Every stage takes micro-batches in order, so counters say what has started, ended, arrived."""

    def __init__(
        self,
        graph: StageGraph,
        placement: Sequence[int],
        microbatches: int,
        ranks: int,
        costs: Costs,
        kinds: Kinds,
        priority: Priority,
        memory: Memory | None,
    ) -> None:
        stages, flow = len(graph.stages), flow_of(graph)
        delays = arrival_delays(placement, graph, costs)
        self.placement = placement
        self.microbatches = microbatches
        self.kinds = kinds
        self.on_rank = [[s for s in range(stages) if placement[s] == rank] for rank in range(ranks)]
        network = network_of(graph, placement, costs, kinds, microbatches)
        self.seconds = [[network.seconds[s, kind] for kind in own] for s, own in enumerate(kinds)]
        self.key = _keys(network, priority, (flow.depths, flow.heads, flow.heads))
        self.started = [[0] * len(own) for own in kinds]
        self.ended = [[0] * len(own) for own in kinds]
        # For each stage and kind the counters of its inputs: how many micro-batches have arrived from each.
        self.inputs = [[[0] * len(flow.values_from[s]), [0] * len(flow.gradients_from[s])] for s in range(stages)]
        self.sends: list[list[list[tuple[int, int, float]]]] = [[[], []] for _ in range(stages)]  # stage, place, delay
        for stage in range(stages):
            for kind, givers in enumerate((flow.values_from[stage], flow.gradients_from[stage])):
                for place, giver in enumerate(givers):
                    delay = delays.get((kind == _GRADIENT, giver, stage), 0.0)
                    self.sends[giver][kind].append((stage, place, delay))
        self.room = None if memory is None else Room(memory, graph, placement, self.on_rank, self.started, self.ended)
        self.busy = [False] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.events: list[tuple[float, int, int, int, int]] = []  # time, number, stage, kind, place (-1: it ended)
        self.number = 0

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Run everything and return what each rank did."""
        for rank in range(len(self.busy)):
            self._start(rank, 0.0)
        while self.events:
            now = self.events[0][0]
            touched: set[int] = set()
            while self.events and self.events[0][0] <= now:
                _, _, stage, kind, place = heapq.heappop(self.events)
                touched.add(self.placement[stage])
                if place < 0:
                    self._end(stage, kind, now)
                else:
                    self.inputs[stage][kind][place] += 1
            for rank in sorted(touched):
                if not self.busy[rank]:
                    self._start(rank, now)
        self._check()
        return tuple(tuple(row) for row in self.rows)

    def _push(self, time: float, stage: int, kind: int, place: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, stage, kind, place))

    def _end(self, stage: int, kind: int, now: float) -> None:
        self.busy[self.placement[stage]] = False
        self.ended[stage][kind] += 1
        if kind != _WEIGHT:
            for target, place, delay in self.sends[stage][kind]:
                if self.placement[target] == self.placement[stage]:
                    self.inputs[target][kind][place] += 1
                else:
                    self._push(now + delay, target, kind, place)
        if self.room is not None:
            self.room.end(stage)

    def _start(self, rank: int, now: float) -> None:
        best: tuple[tuple[float, ...], int, int] | None = None
        for stage in self.on_rank[rank]:
            for kind, next_one in enumerate(self.started[stage]):
                if next_one < self._ready(stage, kind):
                    key = self.key(stage, kind, next_one)
                    if best is None or key < best[0]:
                        if kind == _FORWARD and self.room is not None and not self.room.fits(stage, next_one):
                            continue
                        best = key, stage, kind
        if best is None:
            return
        _, stage, kind = best
        microbatch = self.started[stage][kind]
        if kind == _FORWARD and self.room is not None:
            self.room.start(stage)
        self.started[stage][kind] += 1
        self.busy[rank] = True
        self.rows[rank].append(action_of(stage, self.kinds[stage][kind], microbatch))
        self._push(now + self.seconds[stage][kind], stage, kind, -1)

    def _ready(self, stage: int, kind: int) -> int:
        """Return how many micro-batches this stage could have started by now."""
        if kind == _WEIGHT:
            return self.ended[stage][_GRADIENT]
        arrived = min(self.inputs[stage][kind], default=self.microbatches)
        return arrived if kind == _FORWARD else min(arrived, self.ended[stage][_FORWARD])

    def _check(self) -> None:
        for stage, ended in enumerate(self.ended):
            if ended[_FORWARD] < self.microbatches:
                rank = self.placement[stage]
                message = f"Rank {rank} cannot hold one micro-batch of its stages {self.on_rank[rank]}."
                raise ScheduleError(Diagnostic("no-memory", message, help="give the rank more memory, or fewer stages"))


def _keys(network: Network, priority: Priority, lengths: Sequence[Sequence[int]]) -> Key:
    """Return the function from stage, place of the kind and micro-batch to urgency; the least is the most urgent."""
    if priority is Priority.BACKWARD_FIRST:
        ranks = (1, 0, 2)
        return lambda stage, kind, k: (ranks[kind], k, -lengths[kind][stage], stage)
    tails = [[network.tails[stage, kind] for kind in own] for stage, own in enumerate(network.kinds)]
    return lambda stage, kind, k: (kind == _WEIGHT, -tails[stage][kind][k], -kind, k, stage)
