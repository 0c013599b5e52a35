"""How long a stage's state of a micro-batch lives on its rank, and how much of it there is at once."""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.table import Schedule
from ppdsl.units import Bytes

__all__ = ["Peak", "last_uses", "peak_activations"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds at once.

    Attributes:
        rank: Which rank.
        count: Live pairs of stage and micro-batch.
        bytes: The values that enter and leave these stages. What a stage saves inside for its backward is not in the
            graph and not counted.
        action: The action during which `count` is first reached; None for a rank without actions.
    """

    rank: int
    count: int
    bytes: Bytes
    action: Action | None


def last_uses(schedule: Schedule, graph: StageGraph) -> tuple[dict[int, list[tuple[int, int]]], ...]:
    """Return for each rank, by position, the pairs (stage, micro-batch) that nothing uses after that action.

    A state is used by the stage's own actions and by the forwards of stages on the same rank that take its values by
    reference. Gradients handed over by reference belong to the stage that receives them.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(2)
    >>> last_uses(build_schedule("gpipe", graph, (0, 1), microbatches=2), graph)[1]
    {2: [(1, 0)], 3: [(1, 1)]}
    """
    givers: list[set[int]] = [set() for _ in graph.stages]
    for edge in graph.edges:
        for consumer in edge.consumers:
            if schedule.placement[consumer] == schedule.placement[edge.producer]:
                givers[consumer].add(edge.producer)
    result = []
    for row in schedule.rows:
        last: dict[tuple[int, int], int] = {}
        for position, action in enumerate(row):
            last[action.stage, action.microbatch] = position
            if action.kind is ActionKind.FORWARD:
                for giver in givers[action.stage]:
                    last[giver, action.microbatch] = position
        grouped: dict[int, list[tuple[int, int]]] = {}
        for state, position in sorted(last.items()):
            grouped.setdefault(position, []).append(state)
        result.append(dict(sorted(grouped.items())))
    return tuple(result)


def peak_activations(schedule: Schedule, graph: StageGraph) -> tuple[Peak, ...]:
    """Return for each rank how many activations it holds at most, and when.

    An activation is one stage's state of one micro-batch, live from its forward until its last use (see `last_uses`).

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> peaks = peak_activations(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=8), graph)
    >>> [(peak.count, str(peak.action)) for peak in peaks]
    [(4, '0F3'), (3, '1F2'), (2, '2F1'), (1, '3F0')]
    """
    sizes = [0] * len(graph.stages)
    for edge in graph.edges:
        sizes[edge.producer] += edge.bytes
        for consumer in edge.consumers:
            if schedule.placement[consumer] != schedule.placement[edge.producer]:
                sizes[consumer] += edge.bytes
    frees = last_uses(schedule, graph)
    peaks = []
    for rank, row in enumerate(schedule.rows):
        live = size = most = largest = 0
        moment: Action | None = None
        for position, action in enumerate(row):
            if action.kind is ActionKind.FORWARD:
                live, size = live + 1, size + sizes[action.stage]
            if live > most:
                most, moment = live, action
            largest = max(largest, size)
            for stage, _ in frees[rank].get(position, ()):
                live, size = live - 1, size - sizes[stage]
        peaks.append(Peak(rank, most, Bytes(largest), moment))
    return tuple(peaks)
