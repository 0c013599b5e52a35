"""Predicted times against closed forms, published values and lower bounds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import lower
from ppdsl.schedule import build_schedule, families, flow_of, from_rows
from ppdsl.simulation import (
    Costs,
    bubble_fraction,
    flop_costs,
    lower_bounds,
    measured_costs,
    metrics,
    simulate,
    simulate_schedule,
    uniform_costs,
)
from tests.schedule.shapes import graphs, microbatches, placed_for, placed_graphs, spread_graphs

DATA = Path(__file__).parent.parent / "data"
FAMILY = {"GPipe": "gpipe", "1F1B": "1f1b"}
ROWS = json.loads((DATA / "schedules.json").read_text(encoding="utf-8"))
# The other families: tests/schedule/test_reference_values.py.
REFERENCE = [row for row in ROWS if row["schedule"] in FAMILY]
Placed = tuple[StageGraph, tuple[int, ...]]
ticks = st.integers(1, 4)


@st.composite
def random_costs(draw: st.DrawFn, graph: StageGraph) -> Costs:
    def seconds(count: int, least: int = 1) -> tuple[float, ...]:
        return tuple(float(draw(st.integers(least, 5))) for _ in range(count))

    stages, edges = len(graph.stages), len(graph.edges)
    split = [seconds(stages), seconds(stages)]
    times = {
        "forward": seconds(stages),
        "input_grad": split[0],
        "weight_grad": split[1],
        "backward": tuple(i + w for i, w in zip(*split, strict=True)),
        "latency": seconds(edges, least=0),
        "bandwidth": (math.inf,) * edges,
        "bytes": tuple(edge.bytes for edge in graph.edges),
    }
    return Costs(**times)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: f"{row['schedule']}-p{row['p']}-m{row['m']}")
def test_reference_values(row: dict[str, int | float | str | list[int]]) -> None:
    p, m = int(str(row["p"])), int(str(row["m"]))
    graph = chain_graph(p)
    found = metrics(lower(build_schedule(FAMILY[str(row["schedule"])], graph, range(p), m), graph))
    assert found.makespan == row["makespan"]
    assert round(found.bubble, 6) == row["bubble"]
    assert max(found.spans) == row["max_rank_span"]
    assert max(found.span_idle) == row["max_rank_idle_inside_span"]
    assert [peak.count for peak in found.peaks] == row["peak_act_chunks_per_rank_until_W"]
    assert found.percent_of_optimal == 100


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(placed=spread_graphs(), m=microbatches, f=ticks, i=ticks, w=ticks)
def test_a_stage_on_each_rank_takes_the_time_of_the_longest_path(
    name: str, placed: Placed, m: int, f: int, i: int, w: int
) -> None:
    graph, placement = placed
    depth = max(flow_of(graph).depths)
    costs = uniform_costs(graph, forward=f, input_grad=i, weight_grad=w)
    timeline = simulate_schedule(build_schedule(name, graph, placement, m), graph, costs)
    assert timeline.makespan == (m + depth - 1) * (f + i + w)


@given(p=st.integers(1, 8), m=microbatches)
def test_the_bubble_of_a_chain_is_the_closed_form(p: int, m: int) -> None:
    graph = chain_graph(p)
    timeline = simulate_schedule(build_schedule("1f1b", graph, range(p), m), graph)
    assert timeline.bubble == pytest.approx(bubble_fraction(p, m))


@given(placed=spread_graphs(frozen=True), m=microbatches, f=ticks)
def test_forward_only_takes_the_time_of_the_longest_path(placed: Placed, m: int, f: int) -> None:
    graph, placement = placed
    schedule = build_schedule("forward_only", graph, placement, m)
    timeline = simulate_schedule(schedule, graph, uniform_costs(graph, forward=f))
    assert timeline.makespan == (m + max(flow_of(graph).depths) - 1) * f


@given(placed=placed_graphs(), m=microbatches)
def test_sequential_takes_the_time_of_a_plain_loop_on_one_rank(placed: Placed, m: int) -> None:
    graph, _ = placed
    schedule = build_schedule("sequential", graph, (0,) * len(graph.stages), m)
    timeline = simulate_schedule(schedule, graph)
    assert timeline.makespan == m * sum(1 + 2 * stage.has_backward for stage in graph.stages)
    assert timeline.bubble == 0


@given(p=st.integers(1, 8), groups=st.integers(1, 4), f=ticks, i=ticks, w=ticks, c=st.integers(0, 4))
def test_latency_of_gpipe_is_paid_once_each_way(p: int, groups: int, f: int, i: int, w: int, c: int) -> None:
    graph, m = chain_graph(p), p * groups
    costs = uniform_costs(graph, forward=f, input_grad=i, weight_grad=w, latency=c)
    timeline = simulate_schedule(build_schedule("gpipe", graph, range(p), m), graph, costs)
    assert timeline.makespan == (m + p - 1) * (f + i + w) + 2 * c * (p - 1)


@given(p=st.integers(2, 8), groups=st.integers(1, 4), unit=st.integers(4, 9), c=st.integers(1, 2))
def test_latency_of_1f1b_is_paid_again_by_every_group_of_microbatches(p: int, groups: int, unit: int, c: int) -> None:
    graph, m = chain_graph(p), p * groups
    costs = uniform_costs(graph, forward=unit, input_grad=unit, weight_grad=unit, latency=c)
    timeline = simulate_schedule(build_schedule("1f1b", graph, range(p), m), graph, costs)
    assert timeline.makespan == (m + p - 1) * 3 * unit + 2 * c * (p - 1) * (1 + groups) - 2 * c


def test_the_published_example_with_latency() -> None:
    graph = chain_graph(8)
    costs = uniform_costs(graph, forward=10, input_grad=10, weight_grad=10, latency=5)
    assert simulate_schedule(build_schedule("1f1b", graph, range(8), 32), graph, costs).makespan == 1510


@pytest.mark.parametrize("name", list(families()))
@given(data=st.data(), m=microbatches)
def test_no_time_is_below_a_lower_bound(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    costs = data.draw(random_costs(graph))
    schedule = build_schedule(name, graph, placement, m)
    bounds = lower_bounds(schedule, graph, costs)
    makespan = simulate_schedule(schedule, graph, costs).makespan
    assert bounds.critical_path <= makespan
    assert bounds.jackson <= makespan
    busiest = max(sum(costs.of(action) for action in row) for row in schedule.rows)
    assert bounds.best >= busiest


@pytest.mark.parametrize("name", list(families()))
@given(data=st.data(), m=microbatches)
def test_a_timeline_keeps_order_data_flow_and_durations(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    costs = data.draw(random_costs(graph))
    schedule = build_schedule(name, graph, placement, m)
    timeline = simulate_schedule(schedule, graph, costs)
    flow = flow_of(graph)
    end = {made: e.end for e in timeline.events if (made := flow.makes(e.action)) is not None}
    for event in timeline.events:
        assert event.end - event.start == costs.of(event.action)
        assert all(event.start >= end[need] for need in flow.needs(event.action))
    for rank, row in enumerate(schedule.rows):
        events = [e for e in timeline.events if e.rank == rank]
        assert [e.action for e in sorted(events, key=lambda e: (e.start, e.end, row.index(e.action)))] == list(row)
        assert all(a.end <= b.start for a, b in pairwise(events))


@given(graph=graphs(), m=microbatches, latency=st.integers(0, 3))
def test_bounds_of_a_split_backward_are_those_of_the_whole_or_less(graph: StageGraph, m: int, latency: int) -> None:
    placement = tuple(range(len(graph.stages)))
    whole = build_schedule("1f1b", graph, placement, m)
    text = [[str(a) for a in row] for row in whole.rows]
    halves = from_rows(
        [[part for a in row for part in (a.replace("B", "I"), a.replace("B", "W"))[: 1 + ("B" in a)]] for row in text]
    )
    costs = uniform_costs(graph, latency=latency)
    split = replace(halves, placement=placement, forward_only=False)
    assert lower_bounds(split, graph, costs).best <= lower_bounds(whole, graph, costs).best
    assert simulate_schedule(split, graph, costs).makespan <= simulate_schedule(whole, graph, costs).makespan


def test_parallel_branches_run_at_the_same_time() -> None:
    graph = shape_graph(6, [(0, (1, 2, 3, 4)), *((branch, (5,)) for branch in (1, 2, 3, 4))])
    timeline = simulate_schedule(build_schedule("1f1b", graph, range(6), 4), graph)
    starts = {e.rank: e.start for e in timeline.events if str(e.action) in {"1F0", "2F0", "3F0", "4F0"}}
    assert starts == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert timeline.makespan == (4 + 3 - 1) * 3


def test_transfer_time_is_latency_and_bytes_over_bandwidth() -> None:
    graph = chain_graph(2, flops=10**9, bytes_per_edge=10**6)
    costs = flop_costs(graph, flops_per_second=1e12, overhead=0, latency=0.5, bandwidth=1e6)
    timeline = simulate(lower(build_schedule("gpipe", graph, (0, 1), 1), graph), costs)
    assert timeline.makespan == pytest.approx(2 * 0.001 + 2 * 0.002 + 2 * 1.5)


def test_stages_of_one_rank_hand_over_at_once() -> None:
    graph = chain_graph(3)
    costs = uniform_costs(graph, latency=7)
    assert simulate_schedule(build_schedule("gpipe", graph, (0, 0, 0), 2), graph, costs).makespan == 2 * 3 * 3


def test_frozen_stages_cost_no_backward() -> None:
    graph = shape_graph(2, [(0, (1,))], frozen={0})
    assert uniform_costs(graph).backward == (0, 2)
    assert flop_costs(graph, flops_per_second=1e9, overhead=0).weight_grad == (0, 1)


def test_an_order_that_cannot_run_is_refused() -> None:
    order = from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    with pytest.raises(ScheduleError, match="Ranks 0 and 1 wait for each other"):
        simulate_schedule(order, chain_graph(2))


def test_costs_of_a_timeline_are_its_mean_times() -> None:
    graph = chain_graph(3)
    costs = uniform_costs(graph, forward=3, input_grad=4, weight_grad=1)
    timeline = simulate_schedule(build_schedule("1f1b", graph, range(3), 4), graph, costs)
    again = measured_costs(timeline, graph)
    assert (again.forward, again.backward) == (costs.forward, costs.backward)


@pytest.mark.parametrize("field", ["forward", "latency"])
def test_costs_of_another_length_or_below_zero_are_refused(field: str) -> None:
    costs = uniform_costs(chain_graph(3))
    with pytest.raises(ValueError, match="need one number per stage"):
        replace(costs, **{field: (1.0,)})
    with pytest.raises(ValueError, match="not negative"):
        replace(costs, **{field: (-1.0,) * len(getattr(costs, field))})


def test_messages_and_bytes_are_counted() -> None:
    graph = chain_graph(4, bytes_per_edge=100)
    numbers = metrics(lower(build_schedule("1f1b", graph, range(4), 8), graph))
    assert (numbers.messages, numbers.message_bytes) == (48, 4800)


def test_idle_ranks_count_as_waiting() -> None:
    graph = chain_graph(1)
    timeline = simulate_schedule(build_schedule("gpipe", graph, (0,), 2, ranks=2), graph)
    assert (timeline.bubble, timeline.spans) == (0.5, (6.0, 0.0))
