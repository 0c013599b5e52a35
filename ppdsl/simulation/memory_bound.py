"""A lower bound on the time of a step from what ranks may hold: activations live, and only so many fit at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.flow import flow_of
from ppdsl.simulation.costs import Costs
from ppdsl.simulation.network import Kinds, arrival_delays, network_of
from ppdsl.units import Seconds

__all__ = ["lifespans", "memory_bound"]


def memory_bound(
    graph: StageGraph,
    placement: Sequence[int],
    costs: Costs,
    kinds: Kinds,
    microbatches: int,
    limits: Sequence[float],
    weights: Sequence[float],
) -> Seconds:
    """Return the least time of a step whose ranks hold no more than their limits.

    A rank with room for `K` activations of its one stage needs `ceil(m / K)` of their lifespans one after the other;
    with several stages, what their activations take times how long they live must fit into room times time. Before the
    first activation lies its head, after the last one its tail.

    Args:
        graph: The stages and the values between them.
        placement: For each stage its rank.
        costs: Seconds of computations and messages.
        kinds: What each stage runs.
        microbatches: How many micro-batches.
        limits: For each rank what it may hold.
        weights: For each stage what its activation of one micro-batch takes.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> from ppdsl.simulation.network import kinds_of
    >>> graph = chain_graph(2)
    >>> memory_bound(graph, (0, 1), uniform_costs(graph), kinds_of(graph, split=False), 4, (1, 1), (1, 1))
    24.0
    """
    network = network_of(graph, placement, costs, kinds, microbatches)
    lives = lifespans(graph, placement, costs, kinds)
    bound = 0.0
    for rank, limit in enumerate(limits):
        stages = [stage for stage, home in enumerate(placement) if home == rank and weights[stage] > 0]
        if not stages or not max(weights[stage] for stage in stages) <= limit < math.inf:
            continue
        head = min(network.heads[stage, ActionKind.FORWARD][0] for stage in stages)
        tail = min(network.tails[stage, kinds[stage][-1]][-1] for stage in stages)
        if len(stages) == 1:
            turns = math.ceil(microbatches / math.floor(limit / weights[stages[0]] + 1e-9))
            time = turns * lives[stages[0]]
        else:
            time = sum(microbatches * weights[stage] * lives[stage] for stage in stages) / limit
        bound = max(bound, head + time + tail)
    return Seconds(bound)


def lifespans(graph: StageGraph, placement: Sequence[int], costs: Costs, kinds: Kinds) -> tuple[float, ...]:
    """Return for each stage the least time from the start of F to the end of the micro-batch's last action there.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> from ppdsl.simulation.network import kinds_of
    >>> graph = chain_graph(3)
    >>> lifespans(graph, (0, 1, 2), uniform_costs(graph), kinds_of(graph, split=False))
    (9.0, 6.0, 3.0)
    """
    flow, delays = flow_of(graph), arrival_delays(placement, graph, costs)
    gradient = [
        float((costs.backward, costs.input_grad)[ActionKind.INPUT_GRAD in own][s]) for s, own in enumerate(kinds)
    ]
    found = []
    for start, own in enumerate(kinds):
        if len(own) == 1:
            found.append(float(costs.forward[start]))
            continue
        # Only what follows this forward counts: the latest ends of forwards along the model, then of gradients back.
        ends = {start: float(costs.forward[start])}
        for stage in range(start + 1, len(kinds)):
            arrivals = [ends[s] + delays.get((False, s, stage), 0.0) for s in flow.values_from[stage] if s in ends]
            if arrivals:
                ends[stage] = max(arrivals) + float(costs.forward[stage])
        back: dict[int, float] = {}
        for stage in sorted(ends, reverse=True):
            if len(kinds[stage]) > 1:
                arrivals = [
                    back[s] + delays.get((True, s, stage), 0.0) for s in flow.gradients_from[stage] if s in back
                ]
                back[stage] = max([ends[stage], *arrivals]) + gradient[stage]
        weight = float(costs.weight_grad[start]) if len(own) > 2 else 0.0
        found.append(back[start] + weight)
    return tuple(found)
