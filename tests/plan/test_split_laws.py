"""The laws with split backwards: I before W, both or B, W only where there are weights, memory until I or W."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan import Compute, Free, Send, lower, peak_activations, verify_plan, verify_schedule
from ppdsl.plan.coded import is_sound
from ppdsl.plan.quick import plan_is_sound
from ppdsl.schedule import Schedule, build_schedule, from_rows
from tests.search.shapes import Problem, problems

CHAIN = chain_graph(2)


def codes(*rows: str, graph: StageGraph = CHAIN) -> list[str]:
    return [finding.code for finding in verify_schedule(from_rows([row.split() for row in rows]), graph)]


def weightless(graph: StageGraph, *stages: int) -> StageGraph:
    return replace(graph, stages=tuple(replace(s, trainable=s.index not in stages) for s in graph.stages))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("1F0 1I0 1W0", []),
        ("1F0 1B0", []),
        ("1F0 1W0 1I0", ["weight-first"]),
        ("1I0 1F0 1W0", ["backward-first"]),
        ("1F0 1I0", ["missing-action"]),
        ("1F0 1W0", ["missing-action"]),
        ("1F0 1B0 1W0", ["mixed-backward"]),
        ("1F0 1I0 1B0", ["mixed-backward"]),
        ("1F0 1I0 1W0 1W0", ["duplicate-action"]),
    ],
)
def test_a_backward_is_one_b_or_one_i_then_one_w(row: str, found: list[str]) -> None:
    assert codes("0F0 0I0 0W0", row) == found


def test_a_stage_without_weights_may_leave_w_out() -> None:
    graph = weightless(CHAIN, 0)
    assert codes("0F0 0I0", "1F0 1I0 1W0", graph=graph) == []
    assert codes("0F0 0I0 0W0", "1F0 1I0 1W0", graph=graph) == []
    assert codes("0F0 0I0", "1F0 1I0", graph=graph) == ["missing-action"]


def test_gradients_are_sent_after_i_and_states_freed_after_w() -> None:
    schedule = from_rows(["0F0 0I0 0W0".split(), "1F0 1I0 1W0".split()])
    plan = lower(schedule, CHAIN)
    steps = [str(s) for s in plan.rows[1] if isinstance(s, Compute | Send | Free)]
    assert steps == ["1F0", "1I0", "send(edge 0 B0 of stage 1)", "1W0", "free(1, 0)"]
    assert verify_plan(plan) == ()


def test_the_peak_in_bytes_names_the_action_at_which_it_is_reached() -> None:
    graph = chain_graph(3, bytes_per_edge=100)
    peak = peak_activations(build_schedule("1f1b", graph, (0, 0, 1), 3), graph)[0]
    assert (peak.count, peak.bytes, str(peak.largest)) == (4, 400, "1F1")


@given(problem=problems(), m=st.integers(1, 5), data=st.data())
def test_one_pass_and_the_laws_agree_on_broken_schedules(problem: Problem, m: int, data: st.DataObject) -> None:
    schedule = break_one(build_schedule("zero_bubble", problem.graph, problem.placement, m), data)
    findings = verify_schedule(schedule, problem.graph)
    assert is_sound(schedule, problem.graph) == (not findings or findings[0].code == "deadlock")


@given(problem=problems(largest=6), m=st.integers(1, 3), data=st.data())
def test_one_pass_and_the_laws_agree_on_broken_plans(problem: Problem, m: int, data: st.DataObject) -> None:
    plan = lower(build_schedule("1f1b", problem.graph, problem.placement, m), problem.graph)
    rank = data.draw(st.integers(0, len(plan.rows) - 1))
    row = list(plan.rows[rank])
    if not row:
        return
    at, to = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["swap", "drop", "twice", "move"])):
        case "swap":
            row[at], row[to] = row[to], row[at]
        case "drop":
            del row[at]
        case "twice":
            row.insert(to, row[at])
        case _:
            row.insert(to, row.pop(at))
    broken = replace(plan, rows=(*plan.rows[:rank], tuple(row), *plan.rows[rank + 1 :]))
    # Where the quick pass says no, the laws must find something, or the law is missing there.
    assert plan_is_sound(broken) == (verify_plan(broken) == ())


def break_one(schedule: Schedule, data: st.DataObject) -> Schedule:
    rank = data.draw(st.sampled_from([r for r, row in enumerate(schedule.rows) if row]))
    row = list(schedule.rows[rank])
    at, to = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["swap", "drop", "twice"])):
        case "swap":
            row[at], row[to] = row[to], row[at]
        case "drop":
            del row[at]
        case _:
            row.insert(to, row[at])
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))
