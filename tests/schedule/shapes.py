"""Random stage graphs and placements for the laws."""

from __future__ import annotations

from hypothesis import strategies as st

from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import shape_graph
from ppdsl.schedule import families
from ppdsl.schedule.arrangement import Arrangement

microbatches = st.integers(1, 9)


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    largest: int = 8,
    revisits: bool = True,
    frozen: bool = True,
    placement: tuple[int, ...] | None = None,
) -> StageGraph:
    """A graph whose later stages each use something of an earlier one, or start anew (a second encoder).

    With a placement there are as many stages as it has ranks, and a stage is visited again on its own rank only.
    """
    count = draw(st.integers(1, largest)) if placement is None else len(placement)
    edges: list[tuple[int, tuple[int, ...]]] = []
    keys: list[int] = []
    for stage in range(count):
        producers = draw(st.sets(st.integers(0, stage - 1), max_size=3)) if stage else set()
        edges += [(producer, (stage,)) for producer in sorted(producers)]
        again = [key for at, key in enumerate(keys) if placement is None or placement[at] == placement[stage]]
        keys.append(draw(st.sampled_from([stage, *again])) if revisits and draw(st.booleans()) else stage)
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
def placed_for(draw: st.DrawFn, name: str, *, revisits: bool = True) -> tuple[StageGraph, tuple[int, ...]]:
    """A graph and a placement that the family takes; ranks of loops and Vs are numbered in any order."""
    rule = families()[name].arrangement
    if rule is Arrangement.GIVEN:
        return draw(placed_graphs() if revisits else spread_graphs(frozen=True))
    ring = draw(st.permutations(range(draw(st.integers(1, 4)))))
    turns = [*ring, *ring[::-1]] if rule is Arrangement.V else ring * draw(st.integers(1, 3))
    placement = tuple(turns)
    return draw(graphs(revisits=revisits, placement=placement)), placement


@st.composite
def spread_graphs(draw: st.DrawFn, *, frozen: bool = False) -> tuple[StageGraph, tuple[int, ...]]:
    """One stage on each rank, where the closed forms hold."""
    graph = draw(graphs(revisits=False, frozen=frozen))
    return graph, tuple(range(len(graph.stages)))
