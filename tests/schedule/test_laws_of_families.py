"""The laws of every family, over random graphs, placements and micro-batch counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.graph.ir import StageGraph
from ppdsl.plan import peak_activations, verify_schedule
from ppdsl.schedule import ActionKind, build_schedule, families, flow_of, parse_csv, to_csv
from ppdsl.schedule.flow import depths_in_ranks
from tests.schedule.shapes import microbatches, placed_for, placed_graphs, spread_graphs

NAMES = list(families())
Placed = tuple[StageGraph, tuple[int, ...]]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches)
def test_no_law_is_broken(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    assert verify_schedule(build_schedule(name, graph, placement, m), graph) == ()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches)
def test_each_microbatch_passes_each_stage_once(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    schedule = build_schedule(name, graph, placement, m)
    done = Counter((int(a.stage), a.kind) for row in schedule.rows for a in row)
    for stage in graph.stages:
        assert done[stage.index, ActionKind.FORWARD] == m
        backward = m if stage.has_backward and families()[name].backward else 0
        assert done[stage.index, ActionKind.BACKWARD] + done[stage.index, ActionKind.INPUT_GRAD] == backward
        assert done[stage.index, ActionKind.BACKWARD] + done[stage.index, ActionKind.WEIGHT_GRAD] == backward


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches)
def test_building_twice_gives_the_same_text(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    assert str(build_schedule(name, graph, placement, m)) == str(build_schedule(name, graph, placement, m))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches)
def test_csv_text_is_read_back_unchanged(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name, revisits=False))
    schedule = build_schedule(name, graph, placement, m)
    again = parse_csv(to_csv(schedule), name=schedule.name)
    assert (again.rows, again.placement, again.microbatches) == (schedule.rows, schedule.placement, m)
    assert again.overlaps == schedule.overlaps


@given(placed=placed_graphs(), m=microbatches)
def test_1f1b_holds_no_more_microbatches_of_a_stage_than_its_depth(placed: Placed, m: int) -> None:
    graph, placement = placed
    depths = depths_in_ranks(flow_of(graph), placement)
    for row in build_schedule("1f1b", graph, placement, m).rows:
        live: Counter[int] = Counter()
        for action in row:
            if graph.stages[action.stage].has_backward:
                live[action.stage] += 1 if action.kind is ActionKind.FORWARD else -1
                assert live[action.stage] <= depths[action.stage]


@given(placed=spread_graphs(), m=microbatches)
def test_1f1b_with_a_stage_on_each_rank_peaks_at_the_depth(placed: Placed, m: int) -> None:
    graph, placement = placed
    peaks = peak_activations(build_schedule("1f1b", graph, placement, m), graph)
    assert [peak.count for peak in peaks] == [min(m, depth) for depth in flow_of(graph).depths]


@given(placed=spread_graphs(), m=microbatches)
def test_1f1b_with_a_stage_on_each_rank_is_warm_up_then_alternating_then_drain(placed: Placed, m: int) -> None:
    graph, placement = placed
    schedule = build_schedule("1f1b", graph, placement, m)
    for stage, depth in enumerate(flow_of(graph).depths):
        warm = min(m, depth - 1)
        kinds = "".join(action.kind.value for action in schedule.rows[stage])
        assert kinds == "F" * warm + "FB" * (m - warm) + "B" * warm


@given(placed=placed_graphs(), m=microbatches)
def test_sequential_on_one_rank_is_a_plain_loop(placed: Placed, m: int) -> None:
    graph, _ = placed
    (row,) = build_schedule("sequential", graph, (0,) * len(graph.stages), m).rows
    there = [(s.index, ActionKind.FORWARD) for s in graph.stages]
    back = [(s.index, ActionKind.BACKWARD) for s in reversed(graph.stages) if s.has_backward]
    assert [(a.microbatch, a.stage, a.kind) for a in row] == [(k, *pair) for k in range(m) for pair in there + back]
