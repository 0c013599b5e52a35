"""How long a stage's state of a micro-batch lives on its rank, and how much of it there is at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.coded import JOB_KINDS, Coded, coded_of
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.table import Schedule
from ppdsl.units import Bytes

__all__ = ["Peak", "last_positions", "last_uses", "peak_activations", "state_bytes"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds at once.

    Attributes:
        rank: Which rank.
        count: Live pairs of stage and micro-batch.
        bytes: The values that enter and leave these stages. What a stage saves inside for its backward is not in the
            graph and not counted, nor are the gradients of the backward that runs, nor messages under way.
        action: The action during which `count` is first reached; None for a rank without actions.
        largest: The action during which `bytes` is first reached.
        size: The most it holds in the caller's weights; `count` when there are none.
    """

    rank: int
    count: int
    bytes: Bytes
    action: Action | None
    largest: Action | None = None
    size: float = 0.0


def state_bytes(placement: Sequence[int], graph: StageGraph) -> tuple[int, ...]:
    """Return for each stage the bytes of its state of one micro-batch: what it makes, and what it gets from others.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> state_bytes((0, 1, 1), chain_graph(3, bytes_per_edge=4))
    (4, 8, 0)
    """
    sizes = [0] * len(graph.stages)
    for edge in graph.edges:
        sizes[edge.producer] += edge.bytes
        for consumer in edge.consumers:
            if placement[consumer] != placement[edge.producer]:
                sizes[consumer] += edge.bytes
    return tuple(sizes)


def last_uses(
    schedule: Schedule, graph: StageGraph, *, until: ActionKind = ActionKind.WEIGHT_GRAD
) -> tuple[dict[int, list[tuple[int, int]]], ...]:
    """Return for each rank, by position, the pairs (stage, micro-batch) that nothing uses after that action.

    A state is used by the stage's own actions and by the forwards of stages on the same rank that take its values by
    reference. Gradients handed over by reference belong to the stage that receives them.

    Args:
        schedule: Computations for each rank.
        graph: The stages and the values between them.
        until: `INPUT_GRAD`: as if weight gradients used nothing, which is how some papers count; else all actions use
            the state.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(2)
    >>> last_uses(build_schedule("gpipe", graph, (0, 1), microbatches=2), graph)[1]
    {2: [(1, 0)], 3: [(1, 1)]}
    """
    count = schedule.microbatches
    result: list[dict[int, list[tuple[int, int]]]] = [{} for _ in schedule.rows]
    for rank, (positions, states) in enumerate(last_positions(coded_of(schedule, graph), until=until)):
        for position, state in zip(positions, states, strict=True):
            result[rank].setdefault(position, []).append(divmod(state, count))
    return tuple(result)


def last_positions(
    coded: Coded, *, until: ActionKind = ActionKind.WEIGHT_GRAD
) -> tuple[tuple[list[int], list[int]], ...]:
    """Return for each rank the positions of last uses, ascending, and beside them the states, as in `last_uses`.

    The state of micro-batch `m` of a stage is `stage * microbatches + m`.

    Args:
        coded: A schedule in which each stage is on its rank only.
        until: See `last_uses`.
    """
    count, placement = coded.microbatches, coded.schedule.placement
    skipped = ActionKind.WEIGHT_GRAD if until is ActionKind.INPUT_GRAD else None
    kinds = [kind for kind in JOB_KINDS if kind is not skipped]
    uses = [[coded.positions_of(stage, kind) for kind in kinds] for stage in range(len(placement))]
    for consumer, producers in enumerate(coded.flow.values_from):
        for producer in producers:
            if placement[consumer] == placement[producer]:
                uses[producer].append(coded.positions_of(consumer, ActionKind.FORWARD))
    last: list[list[int]] = [[] for _ in coded.schedule.rows]
    states: list[list[int]] = [[] for _ in coded.schedule.rows]
    for stage, rank in enumerate(placement):
        last[rank] += map(max, *uses[stage])
        states[rank] += range(stage * count, (stage + 1) * count)
    return tuple(map(_sorted, last, states))


def _sorted(positions: list[int], states: list[int]) -> tuple[list[int], list[int]]:
    order = [at for at in sorted(range(len(states)), key=positions.__getitem__) if positions[at] >= 0]
    return [positions[at] for at in order], [states[at] for at in order]


def peak_activations(
    schedule: Schedule,
    graph: StageGraph,
    *,
    weights: Sequence[float] | None = None,
    until: ActionKind = ActionKind.WEIGHT_GRAD,
) -> tuple[Peak, ...]:
    """Return for each rank how many activations it holds at most, and when.

    An activation is one stage's state of one micro-batch, live from its forward until its last use (see `last_uses`).

    Args:
        schedule: Computations for each rank.
        graph: The stages and the values between them.
        weights: For each stage what its activation counts in `Peak.size`; None: 1.
        until: `INPUT_GRAD`: count activations as freed by I; else by the last action.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> peaks = peak_activations(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=8), graph)
    >>> [(peak.count, str(peak.action)) for peak in peaks]
    [(4, '0F3'), (3, '1F2'), (2, '2F1'), (1, '3F0')]
    """
    sizes = state_bytes(schedule.placement, graph)
    units = (1.0,) * len(sizes) if weights is None else tuple(map(float, weights))
    frees = last_uses(schedule, graph, until=until)
    return tuple(_peak(rank, row, frees[rank], sizes, units) for rank, row in enumerate(schedule.rows))


def _peak(
    rank: int,
    row: Sequence[Action],
    frees: Mapping[int, Sequence[tuple[int, int]]],
    sizes: Sequence[int],
    units: Sequence[float],
) -> Peak:
    live = size = most = largest = 0
    load = heaviest = 0.0
    moment = heavy = None
    for position, action in enumerate(row):
        if action.kind is ActionKind.FORWARD:
            live, size, load = live + 1, size + sizes[action.stage], load + units[action.stage]
            if live > most:
                most, moment = live, action
            if size > largest:
                largest, heavy = size, action
            heaviest = max(heaviest, load)
        for stage, _ in frees.get(position, ()):
            live, size, load = live - 1, size - sizes[stage], load - units[stage]
    return Peak(rank, most, Bytes(largest), moment, heavy, heaviest)
