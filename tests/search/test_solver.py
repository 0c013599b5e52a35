"""The solver: proves known optima, agrees with trying everything, keeps limits, is never worse than its start."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan import verify_schedule
from ppdsl.schedule import Schedule, build_schedule, flow_of
from ppdsl.search import find_schedule, list_schedule, solve
from ppdsl.simulation import Costs, lower_bounds, simulate_schedule, stage_costs
from tests.search.shapes import Problem, problems

pytest.importorskip("ortools")
V4 = (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize(("limit", "makespan"), [(6, 53), (4, 59)])
def test_the_published_optima_of_v_shapes_at_their_limits_are_proven(limit: int, makespan: int) -> None:
    found = find_schedule("auto", chain_graph(8), V4, 8, memory=limit, time_limit=60)
    assert (found.timeline.makespan, found.proven) == (makespan, True)
    assert verify_schedule(found.schedule, chain_graph(8), limits=[limit] * 4) == ()


def test_the_solver_is_not_asked_where_a_bound_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ortools(monkeypatch)
    graph = chain_graph(4)
    start = build_schedule("1f1b", graph, range(4), 8)
    assert solve(start, graph, stage_costs(graph, dict.fromkeys(range(4), 1))).proven


def test_a_missing_solver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ortools(monkeypatch)
    graph = chain_graph(2)
    start = build_schedule("sequential", graph, range(2), 4)
    with pytest.raises(ScheduleError, match=r'pip install "ppdsl\[solver\]"'):
        solve(start, graph, stage_costs(graph, {0: 1, 1: 2}))


@settings(max_examples=25)
@given(problem=problems(largest=5), m=st.integers(1, 3), split=st.booleans())
def test_nothing_is_slower_than_the_start_or_over_a_limit_or_below_a_bound(
    problem: Problem, m: int, split: bool
) -> None:
    graph, costs, memory = problem.graph, problem.costs, problem.memory
    start = list_schedule(graph, problem.placement, m, costs=costs, split=split, memory=memory)
    solution = solve(start, graph, costs, memory, time_limit=5)
    assert verify_schedule(solution.schedule, graph) == ()
    assert memory.excess(solution.schedule, graph) is None
    makespan = simulate_schedule(solution.schedule, graph, costs).makespan
    assert lower_bounds(start, graph, costs).best - 1e-9 <= solution.bound <= makespan + 1e-9
    assert makespan <= simulate_schedule(start, graph, costs).makespan + 1e-9
    assert solve(start, graph, costs, memory, time_limit=5).schedule == solution.schedule or not solution.proven


@settings(max_examples=20)
@given(problem=problems(largest=3, frozen=False), split=st.booleans())
def test_trying_everything_finds_nothing_faster(problem: Problem, split: bool) -> None:
    graph, costs, memory = problem.graph, problem.costs, problem.memory
    start = list_schedule(graph, problem.placement, 1 if split else 2, costs=costs, split=split, memory=memory)
    if sum(map(len, start.rows)) > 10:
        start = list_schedule(graph, problem.placement, 1, costs=costs, split=split, memory=memory)
    solution = solve(start, graph, costs, memory, time_limit=10)
    assert solution.proven
    assert simulate_schedule(solution.schedule, graph, costs).makespan == try_everything(start, problem)


def test_times_that_are_no_multiples_of_one_another_keep_the_bound_honest() -> None:
    graph = chain_graph(3)
    costs = stage_costs(graph, {0: math.pi, 1: math.e, 2: math.sqrt(2)}, latency=1 / 7)
    start = build_schedule("sequential", graph, range(3), 4)
    solution = solve(start, graph, costs, time_limit=2)
    makespan = simulate_schedule(solution.schedule, graph, costs).makespan
    assert lower_bounds(start, graph, costs).best - 1e-9 <= solution.bound <= makespan + 1e-9
    assert makespan < simulate_schedule(start, graph, costs).makespan


def try_everything(start: Schedule, problem: Problem) -> float:
    """Return the least time over all orders of all ranks, by following every choice of who goes next."""
    flow, graph, costs, memory = flow_of(problem.graph), problem.graph, problem.costs, problem.memory
    delays = waits(problem, costs)
    actions = [action for row in start.rows for action in row]
    best = math.inf
    seen: set[Any] = set()

    def follow(rows: tuple[tuple[Any, ...], ...], ends: dict[Any, float], free: tuple[float, ...]) -> None:
        nonlocal best
        state = (rows, free)
        if state in seen or max(free) >= best:
            return
        seen.add(state)
        done = {action for row in rows for action in row}
        if len(done) == len(actions):
            schedule = Schedule("tried", rows, start.placement, start.microbatches)
            if memory.excess(schedule, graph) is None:
                best = max(free)
            return
        for action in actions:
            needs = flow.needs(action)
            if action in done or not all(need in ends for need in needs):
                continue
            rank = start.placement[action.stage]
            arrivals = [ends[n] + delays.get((n.gradient, n.stage, action.stage), 0.0) for n in needs]
            end = max([free[rank], *arrivals]) + costs.of(action)
            made = flow.makes(action)
            after = ends if made is None else {**ends, made: end}
            grown = tuple((*row, action) if r == rank else row for r, row in enumerate(rows))
            follow(grown, after, tuple(end if r == rank else t for r, t in enumerate(free)))

    follow(tuple(() for _ in start.rows), {}, (0.0,) * start.ranks)
    return best


def waits(problem: Problem, costs: Costs) -> dict[tuple[bool, int, int], float]:
    """Return message times by direction and stages."""
    found: dict[tuple[bool, int, int], float] = {}
    for edge in problem.graph.edges:
        for consumer in edge.consumers:
            if problem.placement[consumer] != problem.placement[edge.producer]:
                for key in ((False, edge.producer, consumer), (True, consumer, edge.producer)):
                    found[key] = max(found.get(key, 0.0), costs.transfer(edge.index))
    return found


def refuse_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
