"""`auto`: never worse than a family, within memory, the same each time; says what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError, render_plain
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import verify_schedule
from ppdsl.schedule import build_schedule, families
from ppdsl.search import find_schedule
from ppdsl.simulation import lower_bounds, simulate_schedule
from tests.search.shapes import Problem, problems


@settings(max_examples=40)
@given(problem=problems(), m=st.integers(1, 6), capped=st.booleans())
def test_auto_is_lawful_within_memory_and_at_least_as_good_as_every_family(
    problem: Problem, m: int, capped: bool
) -> None:
    graph, memory = problem.graph, problem.memory if capped else None
    found = find_schedule("auto", graph, problem.placement, m, costs=problem.costs, memory=memory)
    assert verify_schedule(found.schedule, graph) == ()
    assert memory is None or memory.excess(found.schedule, graph) is None
    assert found.timeline.makespan >= lower_bounds(found.schedule, graph, problem.costs).best - 1e-9
    for name, family in families().items():
        try:
            other = build_schedule(name, graph, problem.placement, m)
        except ScheduleError:
            continue
        if family.backward and (memory is None or memory.excess(other, graph) is None):
            makespan = simulate_schedule(other, graph, problem.costs).makespan
            assert found.timeline.makespan <= makespan * (1 + 1e-8)


@given(problem=problems(largest=6), m=st.integers(1, 4))
def test_auto_gives_the_same_schedule_each_time(problem: Problem, m: int) -> None:
    first, second = (
        find_schedule("auto", problem.graph, problem.placement, m, costs=problem.costs, memory=problem.memory)
        for _ in range(2)
    )
    assert (str(first.schedule), first.reasons) == (str(second.schedule), second.reasons)


def test_of_equally_fast_ones_the_one_with_less_memory_is_taken() -> None:
    found = find_schedule("auto", chain_graph(1), (0,), 4)
    assert found.schedule.name == "1f1b"
    assert found.proven


def test_another_name_goes_to_the_registry() -> None:
    graph = chain_graph(2)
    assert find_schedule("1f1b", graph, (0, 1), 4).schedule == build_schedule("1f1b", graph, (0, 1), 4)
    with pytest.raises(ScheduleError, match="unknown-schedule"):
        find_schedule("1f1c", graph, (0, 1), 4)


def test_a_named_schedule_over_the_limit_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        find_schedule("gpipe", chain_graph(2), (0, 1), 4, memory=3)
    assert (
        render_plain(caught.value.diagnostics)
        == """\
error[no-memory]: Schedule 'gpipe' holds 4 activations on rank 0; its limit is 3.
help: use auto, or raise the limit"""
    )


def test_when_nothing_fits_the_least_possible_memory_is_named() -> None:
    with pytest.raises(ScheduleError) as caught:
        find_schedule("auto", chain_graph(4), (0, 1, 0, 1), 4, memory=(2, 1))
    assert (
        render_plain(caught.value.diagnostics)
        == """\
error[no-memory]: No schedule fits the memory: sequential needs least, 2 activations on rank 1, whose limit is 1.
help: raise the limit to 2, or spread the stages over more ranks"""
    )


def test_limits_are_one_for_each_rank() -> None:
    with pytest.raises(ScheduleError, match="There are 3 memory limits for 2 ranks"):
        find_schedule("auto", chain_graph(2), (0, 1), 4, memory=(1, 2, 3))


@pytest.mark.parametrize("name", ["auto(solver=no)", "auto(v=2)", "auto(5)", "auto(solver=-1)", "auto(solver=inf)"])
def test_arguments_of_auto_are_seconds_for_the_solver(name: str) -> None:
    with pytest.raises(ScheduleError, match="bad-argument"):
        find_schedule(name, chain_graph(2), (0, 1), 4)


def test_reasons_tell_what_was_taken_and_what_was_left_out() -> None:
    graph = shape_graph(4, [(0, (1, 2)), (1, (3,)), (2, (3,))])
    reasons = find_schedule("auto", graph, (0, 1, 2, 3), 4, memory=3).reasons
    assert reasons[0] == "zero_bubble(h1) takes 14 s, 100.0 % of the lower bound's speed."
    assert any(reason.startswith("gpipe holds 4 on rank 0; its limit is 3") for reason in reasons)
    assert any(reason.startswith("zbv is left out: ") for reason in reasons)
