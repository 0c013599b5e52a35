"""The depth rule on any graph: as fast as possible, and no more memory than the depth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import verify_schedule
from ppdsl.schedule import ActionKind, build_schedule, flow_of
from ppdsl.simulation import lower_bounds, simulate_schedule, uniform_costs
from tests.schedule.shapes import graphs, microbatches
from tests.schedule.sizes import live_peaks

alone = graphs(largest=11, revisits=False, frozen=False)


@settings(max_examples=400)
@given(graph=alone, m=st.integers(1, 14))
def test_with_a_stage_on_each_rank_no_order_is_faster(graph: StageGraph, m: int) -> None:
    flow, placement, costs = flow_of(graph), range(len(graph.stages)), uniform_costs(graph)
    depth = max(flow.depths)
    whole = build_schedule("1f1b", graph, placement, m)
    assert float(simulate_schedule(whole, graph, costs).makespan) == (m + depth - 1) * 3
    split = build_schedule("zero_bubble", graph, placement, m)
    makespan = float(simulate_schedule(split, graph, costs).makespan)
    assert makespan == lower_bounds(split, graph, costs).best
    if m >= depth:
        assert makespan == 3 * m + depth - 1
    assert all(peak <= d for peak, d in zip(live_peaks(split, until="I"), flow.depths, strict=True))
    assert max(live_peaks(split, until="W")) <= depth


@given(graph=graphs(), m=microbatches, weightless=st.sets(st.integers(0, 7)), variant=st.sampled_from(["h1", "h2"]))
def test_stages_without_weights_have_no_weight_gradient(
    graph: StageGraph, m: int, weightless: set[int], variant: str
) -> None:
    stages = tuple(replace(s, trainable=s.trainable and s.index not in weightless) for s in graph.stages)
    graph = replace(graph, stages=stages)
    placement = [0 if s.key == graph.stages[0].key else 1 for s in stages]
    schedule = build_schedule(f"zero_bubble({variant})", graph, placement, m, ranks=2)
    assert verify_schedule(schedule, graph) == ()
    kinds = Counter((int(a.stage), a.kind) for row in schedule.rows for a in row)
    for stage in stages:
        split = m if stage.has_backward and stage.trainable else 0
        assert kinds[stage.index, ActionKind.WEIGHT_GRAD] == split
        assert kinds[stage.index, ActionKind.BACKWARD] == (m if stage.has_backward else 0) - split


@pytest.mark.parametrize(
    ("branches", "length", "speedups", "held"),
    [
        (2, 2, (1.222, 1.133, 1.074), (6, 4)),
        (4, 1, (1.5, 1.273, 1.143), (5, 2)),
        (4, 2, (1.545, 1.3, 1.158), (9, 3)),
        (4, 4, (1.571, 1.316, 1.167), (17, 5)),
        (7, 1, (1.667, 1.353, 1.182), (8, 2)),
        (8, 2, (1.737, 1.389, 1.2), (17, 3)),
    ],
)
def test_branches_that_run_side_by_side_beat_their_chain(
    branches: int, length: int, speedups: tuple[float, ...], held: tuple[int, int]
) -> None:
    graph = _branches(branches, length, trunk=2 if branches == 2 else 1)
    count = len(graph.stages)
    for factor, speedup in zip((1, 2, 4), speedups, strict=True):
        side_by_side = build_schedule("1f1b", graph, range(count), factor * count)
        in_a_row = build_schedule("1f1b", chain_graph(count), range(count), factor * count)
        slow = simulate_schedule(in_a_row, chain_graph(count)).makespan
        assert round(slow / simulate_schedule(side_by_side, graph).makespan, 3) == speedup
        assert (max(live_peaks(in_a_row, until="W")), max(live_peaks(side_by_side, until="W"))) == held


def _branches(branches: int, length: int, trunk: int) -> StageGraph:
    first = branches * length
    edges = [(b * length + s, (b * length + s + 1,)) for b in range(branches) for s in range(length - 1)]
    edges += [((b + 1) * length - 1, (first,)) for b in range(branches)]
    edges += [(s, (s + 1,)) for s in range(first, first + trunk - 1)]
    return shape_graph(first + trunk, edges)
