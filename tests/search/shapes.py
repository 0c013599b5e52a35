"""Random graphs with costs and memory for what searches schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from ppdsl.graph.ir import StageGraph
from ppdsl.search import Memory
from ppdsl.simulation import Costs
from ppdsl.units import Seconds
from tests.schedule.shapes import graphs, placements


@dataclass(frozen=True)
class Problem:
    """What a schedule is wanted for."""

    graph: StageGraph
    placement: tuple[int, ...]
    costs: Costs
    memory: Memory

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1


@st.composite
def problems(draw: st.DrawFn, *, largest: int = 12, frozen: bool = True) -> Problem:
    """A graph with skips, fan-in and fan-out, several sinks and several stages a rank, and random costs and caps."""
    graph = draw(graphs(largest=largest, frozen=frozen))
    placement = draw(placements(graph))
    stages, edges = len(graph.stages), len(graph.edges)

    def seconds(count: int, least: int) -> tuple[Seconds, ...]:
        return tuple(Seconds(float(draw(st.integers(least, 5)))) for _ in range(count))

    forward, inputs, weights = seconds(stages, 1), seconds(stages, 1), seconds(stages, 0)
    costs = Costs(
        forward,
        tuple(Seconds(i + w) for i, w in zip(inputs, weights, strict=True)),
        inputs,
        weights,
        seconds(edges, 0),
        (math.inf,) * edges,
        tuple(edge.bytes for edge in graph.edges),
    )
    sizes = tuple(float(draw(st.integers(1, 3))) for _ in range(stages))
    whole = [sum(w for w, home in zip(sizes, placement, strict=True) if home == r) for r in range(max(placement) + 1)]
    limits = tuple(need + draw(st.integers(0, 6)) for need in whole)
    return Problem(graph, placement, costs, Memory(limits, sizes))
