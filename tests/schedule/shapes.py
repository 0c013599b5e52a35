"""Random stage graphs and placements for the laws."""

from __future__ import annotations

from hypothesis import strategies as st

from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import shape_graph

microbatches = st.integers(1, 9)


@st.composite
def graphs(draw: st.DrawFn, *, largest: int = 8, revisits: bool = True, frozen: bool = True) -> StageGraph:
    """A graph whose later stages each use something of an earlier one, or start anew (a second encoder)."""
    count = draw(st.integers(1, largest))
    edges: list[tuple[int, tuple[int, ...]]] = []
    keys: list[int] = []
    for stage in range(count):
        producers = draw(st.sets(st.integers(0, stage - 1), max_size=3)) if stage else set()
        edges += [(producer, (stage,)) for producer in sorted(producers)]
        keys.append(draw(st.sampled_from([stage, *keys])) if revisits and draw(st.booleans()) else stage)
    # Fan-out of one value, and two values between the same stages.
    for _ in range(draw(st.integers(0, 2))):
        if count > 1:
            producer = draw(st.integers(0, count - 2))
            consumers = draw(st.sets(st.integers(producer + 1, count - 1), min_size=1, max_size=3))
            edges.append((producer, tuple(sorted(consumers))))
    ice = draw(st.sets(st.integers(0, count - 1), max_size=2)) if frozen else set()
    return shape_graph(count, edges, keys=keys, frozen=ice)


@st.composite
def placements(draw: st.DrawFn, graph: StageGraph) -> tuple[int, ...]:
    """All visits of one key on one rank; ranks may hold several stages, and may be idle."""
    ranks = draw(st.integers(1, len(graph.stages)))
    rank_of: dict[int | str, int] = {}
    for stage in graph.stages:
        if stage.key not in rank_of:
            rank_of[stage.key] = draw(st.integers(0, ranks - 1))
    return tuple(rank_of[stage.key] for stage in graph.stages)


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[StageGraph, tuple[int, ...]]:
    graph = draw(graphs())
    return graph, draw(placements(graph))


@st.composite
def spread_graphs(draw: st.DrawFn, *, frozen: bool = False) -> tuple[StageGraph, tuple[int, ...]]:
    """One stage on each rank, where the closed forms hold."""
    graph = draw(graphs(revisits=False, frozen=frozen))
    return graph, tuple(range(len(graph.stages)))
