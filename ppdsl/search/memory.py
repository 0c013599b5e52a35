"""What ranks may hold of activations, and whether one more fits without a rank standing still for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.lifetimes import Peak, peak_activations, state_bytes
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.bounds import Bounds, lower_bounds
from ppdsl.simulation.costs import Costs

__all__ = ["Memory", "Room"]


@dataclass(frozen=True)
class Memory:
    """How much the activations of each rank may take, in any unit.

    Attributes:
        limits: For each rank the most it may hold.
        weights: For each stage what its activation of one micro-batch takes, in the same unit.
        unit: What a unit is called in messages.
    """

    limits: tuple[float, ...]
    weights: tuple[float, ...]
    unit: str = "activations"

    @classmethod
    def of_activations(cls, limits: Sequence[float], stages: int) -> Memory:
        """Return limits that count activations: one stage's state of one micro-batch is 1.

        >>> Memory.of_activations((3, 2), stages=2).weights
        (1.0, 1.0)
        """
        return cls(tuple(limits), (1.0,) * stages)

    @classmethod
    def of_bytes(cls, limits: Sequence[float], graph: StageGraph, placement: Sequence[int]) -> Memory:
        """Return limits in bytes: an activation takes the values that enter and leave its stage.

        >>> from ppdsl.graph.shapes import chain_graph
        >>> Memory.of_bytes((1e6, 1e6), chain_graph(2), (0, 1)).weights
        (4096.0, 4096.0)
        """
        return cls(tuple(limits), tuple(map(float, state_bytes(placement, graph))), "bytes")

    def peaks(self, schedule: Schedule, graph: StageGraph) -> tuple[Peak, ...]:
        """Return the most that each rank of a schedule holds; `Peak.size` is in this unit."""
        return peak_activations(schedule, graph, weights=self.weights)

    def bounds(self, schedule: Schedule, graph: StageGraph, costs: Costs) -> Bounds:
        """Return lower bounds on the time of a schedule's actions within these limits."""
        return lower_bounds(schedule, graph, costs, limits=self.limits, weights=self.weights)

    def excess(self, schedule: Schedule, graph: StageGraph) -> Peak | None:
        """Return the peak that exceeds its rank's limit by most, or None when all are kept."""
        over = [peak for peak in self.peaks(schedule, graph) if peak.size > self.limits[peak.rank]]
        return max(over, key=lambda peak: (peak.size - self.limits[peak.rank], -peak.rank), default=None)


class Room:
    """Whether a forward fits, while a schedule is made.

    A rank keeps room for its oldest micro-batch: one that it has not run forward in all its stages. A younger one
    starts only when everything of the oldest still fits beside it. Then the oldest can always go on once those before
    it are done, and so can the one after it; nobody waits for ever where one whole micro-batch fits on each rank.
    """

    def __init__(
        self,
        memory: Memory,
        graph: StageGraph,
        placement: Sequence[int],
        on_rank: Sequence[Sequence[int]],
        started: Sequence[Sequence[int]],
        ended: Sequence[Sequence[int]],
    ) -> None:
        self.memory = memory
        self.placement = placement
        self.on_rank = on_rank
        self.started = started
        self.ended = ended
        self.whole = [sum(memory.weights[s] for s in stages) for stages in on_rank]
        self.used = [0.0] * len(on_rank)
        self.freed = [0] * len(placement)
        # A state lives until the forwards of the same rank that use it have run, and the stage's own last action.
        self.users: list[set[int]] = [set() for _ in placement]
        self.givers: list[set[int]] = [{stage} for stage in range(len(placement))]
        for edge in graph.edges:
            for consumer in edge.consumers:
                if placement[consumer] == placement[edge.producer]:
                    self.users[edge.producer].add(consumer)
                    self.givers[consumer].add(edge.producer)

    def fits(self, stage: int, microbatch: int) -> bool:
        """Tell whether the forward of a stage and micro-batch may start."""
        rank = self.placement[stage]
        limit, weights = self.memory.limits[rank], self.memory.weights
        needed = self.used[rank] + weights[stage]
        stages = self.on_rank[rank]
        if len(stages) == 1:
            return needed <= limit
        oldest = min(self.started[s][0] for s in stages)
        if microbatch == oldest:
            return needed <= limit
        held = sum(weights[s] for s in stages if self.freed[s] <= oldest < self.started[s][0])
        return needed + self.whole[rank] - held <= limit

    def start(self, stage: int) -> None:
        """Take note of a forward that starts."""
        self.used[self.placement[stage]] += self.memory.weights[stage]

    def end(self, stage: int) -> None:
        """Take note of an action that ended: what nothing uses any more is freed."""
        for giver in self.givers[stage]:
            done = self.ended[giver][-1]
            for user in self.users[giver]:
                done = min(done, self.ended[user][0])
            if done > self.freed[giver]:
                self.used[self.placement[giver]] -= self.memory.weights[giver] * (done - self.freed[giver])
                self.freed[giver] = done
