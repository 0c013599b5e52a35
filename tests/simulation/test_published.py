"""Published numbers: branches against chains, latency, the two bubbles, bounds of unequal graphs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import lower, peak_activations
from ppdsl.schedule import ActionKind, build_schedule, families, flow_of
from ppdsl.simulation import lower_bounds, metrics, period, simulate_schedule, stage_costs, uniform_costs
from tests.schedule.shapes import microbatches, spread_graphs

Placed = tuple[StageGraph, tuple[int, ...]]
# Branches, their depth, trunk; stages, depth; speed-up over the chain for m = P, 2P, 4P.
BRANCHES = [
    (2, 2, 2, 6, 4, (1.222, 1.133, 1.074)),
    (4, 1, 1, 5, 2, (1.500, 1.273, 1.143)),
    (4, 2, 1, 9, 3, (1.545, 1.300, 1.158)),
    (4, 4, 1, 17, 5, (1.571, 1.316, 1.167)),
    (7, 1, 1, 8, 2, (1.667, 1.353, 1.182)),
    (8, 2, 1, 17, 3, (1.737, 1.389, 1.200)),
]


def branch_graph(branches: int, depth: int, trunk: int) -> StageGraph:
    """Return equal branches that meet in the first stage of a trunk."""
    edges: list[tuple[int, tuple[int, ...]]] = []
    meeting = branches * depth
    for branch in range(branches):
        stages = [branch * depth + k for k in range(depth)]
        edges += [(a, (b,)) for a, b in zip(stages, [*stages[1:], meeting], strict=True)]
    edges += [(meeting + k, (meeting + k + 1,)) for k in range(trunk - 1)]
    return shape_graph(meeting + trunk, edges)


@pytest.mark.parametrize(("branches", "depth", "trunk", "p", "d", "speed_ups"), BRANCHES)
def test_branches_beat_the_chain_in_time_and_memory(
    branches: int, depth: int, trunk: int, p: int, d: int, speed_ups: tuple[float, ...]
) -> None:
    graph, chain = branch_graph(branches, depth, trunk), chain_graph(p)
    assert (len(graph.stages), max(flow_of(graph).depths)) == (p, d)
    for factor, speed_up in zip((1, 2, 4), speed_ups, strict=True):
        m = factor * p
        parallel, linear = (build_schedule("1f1b", g, range(p), m) for g in (graph, chain))
        fast, slow = simulate_schedule(parallel, graph).makespan, simulate_schedule(linear, chain).makespan
        assert round(slow / fast, 3) == speed_up
        assert max(peak.count for peak in peak_activations(linear, chain)) == p
        assert max(peak.count for peak in peak_activations(parallel, graph)) == d


@settings(max_examples=200)
@given(placed=spread_graphs(), m=microbatches)
def test_the_depth_rule_meets_the_bound_with_full_and_with_split_backwards(placed: Placed, m: int) -> None:
    graph, placement = placed
    depth = max(flow_of(graph).depths)
    costs = uniform_costs(graph)
    for name in ("1f1b", "zero_bubble(h1)"):
        schedule = build_schedule(name, graph, placement, m)
        makespan = simulate_schedule(schedule, graph, costs).makespan
        assert makespan == lower_bounds(schedule, graph, costs).best
        if name == "1f1b":
            assert makespan == 3 * (m + depth - 1)
        elif m >= depth:
            assert makespan == 3 * m + depth - 1


@pytest.mark.parametrize(("p", "factor", "unit", "c"), list(product((2, 4, 8), (1, 2, 4), (4, 10), (1, 2))))
def test_a_longer_warm_up_hides_the_time_of_messages(p: int, factor: int, unit: int, c: int) -> None:
    graph, m = chain_graph(p), p * factor
    costs = uniform_costs(graph, forward=unit, input_grad=unit, weight_grad=unit, latency=c)
    schedule = build_schedule("eager_1f1b", graph, range(p), m)
    makespan = simulate_schedule(schedule, graph, costs).makespan
    assert makespan == (m + p - 1) * 3 * unit + 2 * c * (p - 1)
    assert makespan == lower_bounds(schedule, graph, costs).best


def test_the_published_example_with_latency_in_four_schedules() -> None:
    graph = chain_graph(8)
    costs = uniform_costs(graph, forward=10, input_grad=10, weight_grad=10, latency=5)
    found = {}
    for name in ("1f1b", "eager_1f1b", "zero_bubble(h1)"):
        schedule = build_schedule(name, graph, range(8), 32)
        found[name] = simulate_schedule(schedule, graph, costs).makespan
    assert found == {"1f1b": 1510, "eager_1f1b": 1240, "zero_bubble(h1)": 1170}
    assert lower_bounds(build_schedule("zero_bubble(h1)", graph, range(8), 32), graph, costs).best == 1065


def v_placement(p: int) -> tuple[int, ...]:
    return (*range(p), *reversed(range(p)))


UNIFORM = [
    ("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2), ("zero_bubble(h1)", 1),
    ("zero_bubble(h2)", 1), ("interleaved_zero_bubble", 2), ("zbv", -2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chunks"), UNIFORM)
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("factor", [2, 4])
def test_the_period_without_a_barrier_is_the_largest_span_of_a_rank(
    name: str, chunks: int, p: int, factor: int
) -> None:
    stages = p * abs(chunks)
    graph, placement = chain_graph(stages), v_placement(p) if chunks < 0 else tuple(s % p for s in range(stages))
    schedule = build_schedule(name, graph, placement, factor * p)
    assert period(schedule, graph) == max(simulate_schedule(schedule, graph).spans)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_h2_gains_nothing_over_h1_with_a_barrier_and_all_of_the_bubble_without(p: int) -> None:
    graph, m = chain_graph(p), 4 * p
    h1, h2 = (metrics(lower(build_schedule(f"zero_bubble({v})", graph, range(p), m), graph)) for v in ("h1", "h2"))
    assert h1.makespan == h2.makespan == 3 * m + p - 1
    assert h1.bubble == h2.bubble > 0
    assert (h1.period, h2.period) == (3 * m + p - 1, 3 * m)
    assert (h1.period_bubble, h2.period_bubble) == (pytest.approx(h1.bubble), 0)
    assert ([x.count for x in h1.peaks], [x.count for x in h2.peaks]) == ([p] * p, [2 * p - 1] * p)


def test_activations_freed_by_the_input_gradient_are_fewer() -> None:
    graph = chain_graph(4)
    schedule = build_schedule("zero_bubble(h1)", graph, range(4), 8)
    until_input = peak_activations(schedule, graph, until=ActionKind.INPUT_GRAD)
    assert [peak.count for peak in until_input] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", list(families()))
@given(placed=spread_graphs(), m=microbatches, data=st.data())
def test_the_period_lies_between_the_work_of_a_rank_and_the_step(
    name: str, placed: Placed, m: int, data: st.DataObject
) -> None:
    graph, placement = placed
    times = st.integers(1, 5)
    tables = [{s.key: data.draw(times) for s in graph.stages} for _ in range(3)]
    costs = stage_costs(graph, tables[0], input_grad=tables[1], weight_grad=tables[2], latency=data.draw(times))
    try:
        schedule = build_schedule(name, graph, placement, m)
    except ScheduleError:
        return
    work = max(sum(costs.of(action) for action in row) for row in schedule.rows)
    found = period(schedule, graph, costs)
    assert work - 1e-9 <= found <= simulate_schedule(schedule, graph, costs).makespan + 1e-9


def test_costs_by_stage_are_checked() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], keys=("a", "b", "a"))
    costs = stage_costs(graph, {"a": 2, "b": 1}, weight_grad={"b": 3})
    assert (costs.forward, costs.backward) == ((2, 1, 2), (4, 4, 4))
    with pytest.raises(ValueError, match="stage c is not in the graph; stage b has no seconds of F"):
        stage_costs(graph, {"a": 1, "c": 1})
