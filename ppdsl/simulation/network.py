"""The computations of a step with the least time before each (head) and after each (tail), whatever the order.

Micro-batches that run the same kinds of actions are alike, so every stage may be assumed to take them in order without
loss; this makes heads and tails longer, and what is built on them better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ppdsl.graph.ir import Stage, StageGraph
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.flow import Flow, carries_gradient, flow_of
from ppdsl.simulation.costs import Costs

__all__ = ["Kinds", "Network", "arrival_delays", "kinds_of", "network_of"]

Kinds: TypeAlias = tuple[tuple[ActionKind, ...], ...]
"""For each stage the kinds of actions that it runs for a micro-batch, in their order: `F`, `F B`, `F I` or `F I W`."""

_F, _B, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


@dataclass(frozen=True)
class Network:
    """Heads and tails of all computations of micro-batches that are alike.

    Attributes:
        kinds: What each stage runs.
        seconds: For each stage and kind how long it takes.
        heads: For each stage and kind, by place in the order of micro-batches, the least time before its start.
        tails: The same, the least time between its end and the end of the step.
    """

    kinds: Kinds
    seconds: Mapping[tuple[int, ActionKind], float]
    heads: Mapping[tuple[int, ActionKind], Sequence[float]]
    tails: Mapping[tuple[int, ActionKind], Sequence[float]]


def kinds_of(graph: StageGraph, *, split: bool, forward_only: bool = False) -> Kinds:
    """Return what each stage runs: split backwards are I and W, and only I for a stage without weights to train.

    >>> from ppdsl.graph.shapes import shape_graph
    >>> [" ".join(kinds) for kinds in kinds_of(shape_graph(2, [(0, (1,))], frozen={0}), split=True)]
    ['F', 'F I W']
    """

    def kinds(stage: Stage) -> tuple[ActionKind, ...]:
        if forward_only or not stage.has_backward:
            return (_F,)
        if not split:
            return (_F, _B)
        return (_F, _I, _W) if stage.trainable else (_F, _I)

    return tuple(map(kinds, graph.stages))


def network_of(graph: StageGraph, placement: Sequence[int], costs: Costs, kinds: Kinds, microbatches: int) -> Network:
    """Return heads and tails, in time linear in the number of computations.

    Args:
        graph: The stages and the values between them.
        placement: For each stage its rank.
        costs: Seconds of computations and messages.
        kinds: What each stage runs.
        microbatches: How many micro-batches run these kinds.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> graph = chain_graph(2)
    >>> network = network_of(graph, (0, 1), uniform_costs(graph), kinds_of(graph, split=False), 2)
    >>> network.heads[1, ActionKind.BACKWARD], network.tails[1, ActionKind.FORWARD]
    ([2.0, 4.0], [6.0, 4.0])
    """
    flow = flow_of(graph)
    arcs = _arcs(flow, kinds, arrival_delays(placement, graph, costs))
    tables = {_F: costs.forward, _B: costs.backward, _I: costs.input_grad, _W: costs.weight_grad}
    seconds = {(stage, kind): float(tables[kind][stage]) for stage, own in enumerate(kinds) for kind in own}
    heads: dict[tuple[int, ActionKind], list[float]] = {}
    for job, before in arcs.items():
        givers = [(heads[giver], seconds[giver] + delay) for giver, delay in before]
        heads[job] = _sweep(givers, seconds[job], microbatches)
    tails: dict[tuple[int, ActionKind], list[float]] = {}
    after: dict[tuple[int, ActionKind], list[tuple[list[float], float]]] = {job: [] for job in arcs}
    for job in reversed(arcs):
        # Backwards in time the last micro-batch comes first.
        tails[job] = _sweep([(row[::-1], wait) for row, wait in after[job]], seconds[job], microbatches)[::-1]
        for giver, delay in arcs[job]:
            after[giver].append((tails[job], delay + seconds[job]))
    return Network(kinds, seconds, heads, tails)


def arrival_delays(placement: Sequence[int], graph: StageGraph, costs: Costs) -> dict[tuple[bool, int, int], float]:
    """Return the seconds between the end of a stage and the arrival of all it sends at another, if on another rank.

    Keys are (gradient or value, from stage, to stage); several edges between two stages count with the slowest.
    """
    delays: dict[tuple[bool, int, int], float] = {}
    for edge in graph.edges:
        seconds = costs.transfer(edge.index)
        for consumer in edge.consumers:
            if placement[consumer] == placement[edge.producer]:
                continue
            forward, backward = (False, edge.producer, consumer), (True, consumer, edge.producer)
            delays[forward] = max(delays.get(forward, 0.0), seconds)
            if carries_gradient(graph, edge, consumer):
                delays[backward] = max(delays.get(backward, 0.0), seconds)
    return delays


def _arcs(
    flow: Flow, kinds: Kinds, delays: Mapping[tuple[bool, int, int], float]
) -> dict[tuple[int, ActionKind], list[tuple[tuple[int, ActionKind], float]]]:
    """Return for each stage and kind what it needs and how long that travels, in a topological order."""
    arcs: dict[tuple[int, ActionKind], list[tuple[tuple[int, ActionKind], float]]] = {}
    for stage in range(len(kinds)):
        arcs[stage, _F] = [((s, _F), delays.get((False, s, stage), 0.0)) for s in flow.values_from[stage]]
    for stage in reversed(range(len(kinds))):
        if len(kinds[stage]) > 1:
            needed = [
                ((s, kinds[s][1]), delays.get((True, s, stage), 0.0))
                for s in flow.gradients_from[stage]
                if len(kinds[s]) > 1
            ]
            arcs[stage, kinds[stage][1]] = [((stage, _F), 0.0), *needed]
    for stage, own in enumerate(kinds):
        if len(own) > 2:
            arcs[stage, own[2]] = [((stage, own[1]), 0.0)]
    return arcs


def _sweep(givers: Sequence[tuple[Sequence[float], float]], seconds: float, count: int) -> list[float]:
    """Return the earliest starts of one stage's computations of a kind: each after its givers and its predecessor."""
    if not givers:
        return [seconds * k for k in range(count)]
    (first, wait), *others = givers
    starts = [begin + wait for begin in first]
    for row, more in others:
        starts = [max(start, begin + more) for start, begin in zip(starts, row, strict=True)]
    free = 0.0
    for k, start in enumerate(starts):
        free = max(free, start)
        starts[k] = free
        free += seconds
    return starts
