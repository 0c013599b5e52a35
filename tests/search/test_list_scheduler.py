"""The list scheduler: laws, limits and bounds on any graph; optimal where that is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan import lower, peak_activations, verify_plan, verify_schedule
from ppdsl.search import Memory, Priority, list_schedule
from ppdsl.simulation import lower_bounds, simulate_schedule, uniform_costs
from tests.effort import calls_of
from tests.search.shapes import Problem, problems

priorities = st.sampled_from(list(Priority))


@settings(max_examples=150)
@given(problem=problems(), m=st.integers(1, 7), split=st.booleans(), priority=priorities, capped=st.booleans())
def test_any_graph_cost_and_limit_gives_a_lawful_schedule_within_them(
    problem: Problem, m: int, split: bool, priority: Priority, capped: bool
) -> None:
    graph, memory = problem.graph, problem.memory if capped else None
    schedule = list_schedule(
        graph, problem.placement, m, costs=problem.costs, priority=priority, split=split, memory=memory
    )
    assert verify_schedule(schedule, graph) == ()
    assert verify_plan(lower(schedule, graph)) == ()
    makespan = simulate_schedule(schedule, graph, problem.costs).makespan
    assert makespan >= lower_bounds(schedule, graph, problem.costs).best - 1e-9
    if memory is not None:
        assert memory.excess(schedule, graph) is None
        assert makespan >= memory.bounds(schedule, graph, problem.costs).best - 1e-9


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 4), (4, 8), (8, 16)])
def test_full_backwards_of_a_uniform_chain_are_optimal_with_backwards_first(p: int, m: int) -> None:
    graph = chain_graph(p)
    memory = Memory.of_activations([p - rank for rank in range(p)], stages=p)
    schedule = list_schedule(graph, range(p), m, memory=memory)
    assert simulate_schedule(schedule, graph).makespan == 3 * (m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 16), (8, 32)])
def test_split_backwards_of_a_uniform_chain_are_optimal_with_the_longest_tail(p: int, m: int) -> None:
    graph = chain_graph(p)
    memory = Memory.of_activations([p] * p, stages=p)
    schedule = list_schedule(graph, range(p), m, split=True, priority=Priority.LONGEST_TAIL, memory=memory)
    assert simulate_schedule(schedule, graph).makespan == 3 * m + p - 1
    assert max(peak.count for peak in peak_activations(schedule, graph)) <= p


def test_a_memory_below_one_microbatch_is_refused() -> None:
    memory = Memory.of_activations((1,), stages=2)
    with pytest.raises(ScheduleError, match="Rank 0 cannot hold one micro-batch of its stages"):
        list_schedule(chain_graph(2), (0, 0), 2, memory=memory)


def test_limits_in_bytes_count_what_enters_and_leaves() -> None:
    graph = chain_graph(4, bytes_per_edge=100)
    memory = Memory.of_bytes((300, 400, 400, 100), graph, (0, 1, 2, 3))
    schedule = list_schedule(graph, range(4), 8, memory=memory)
    assert [peak.bytes for peak in peak_activations(schedule, graph)] == [300, 400, 400, 100]
    assert verify_schedule(schedule, graph, byte_limits=(300, 400, 400, 100)) == ()
    (finding,) = verify_schedule(schedule, graph, byte_limits=(299, 400, 400, 100))
    assert finding.message == "Rank 0 holds 300 B of activations at 0F2, step 2; its limit is 299 B."


def test_work_grows_with_the_number_of_actions() -> None:
    def calls(m: int) -> int:
        graph = chain_graph(8)
        memory = Memory.of_activations([8] * 8, stages=8)
        costs = uniform_costs(graph, latency=0.5)
        return calls_of(lambda: list_schedule(graph, range(8), m, costs=costs, split=True, memory=memory))

    assert calls(2048) < 20 * calls(128)
