"""Numbers and steps are two forms of one plan, and what is proved on numbers is what the laws say of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import Compute, Free, MessagePlan, Send, lower, rendezvous, verify_plan, verify_schedule
from ppdsl.plan.coded import coded_of, is_sound, legal_order
from ppdsl.plan.laws import faults_of_rows
from ppdsl.plan.lifetimes import last_uses
from ppdsl.plan.numbered import NumberedRows
from ppdsl.plan.quick import plan_is_sound
from ppdsl.plan.verify import faults_of
from ppdsl.schedule import ActionKind, Schedule, build_schedule, families, flow_of, from_rows
from ppdsl.schedule.progress import run_in_order
from ppdsl.units import Microbatch
from tests.plan.plain import plain_last_uses, plain_lowering
from tests.schedule.shapes import placed_for

NAMES = list(families())
Item = TypeVar("Item")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, MessagePlan]:
    """A schedule of any family on a graph that it takes, and its plan."""
    name, m = draw(st.sampled_from(NAMES)), draw(st.integers(1, 5))
    graph, placement = draw(placed_for(name))
    schedule = build_schedule(name, graph, placement, m)
    return schedule, lower(schedule, graph, lookahead=draw(st.integers(1, 3)))


def broken(draw: st.DrawFn, rows: list[list[Item]]) -> list[list[Item]]:
    """Rows with one item moved, swapped, left out, repeated or put on another rank."""
    rank, other = (draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    row = rows[rank]
    if row:
        at, to = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
        match draw(st.sampled_from(["swap", "drop", "twice", "move", "give"])):
            case "swap":
                row[at], row[to] = row[to], row[at]
            case "drop":
                del row[at]
            case "twice":
                row.insert(to, row[at])
            case "move":
                row.insert(to, row.pop(at))
            case _:
                rows[other].insert(draw(st.integers(0, len(rows[other]))), row.pop(at))
    return rows


@st.composite
def broken_plans(draw: st.DrawFn) -> MessagePlan:
    _, plan = draw(schedules())
    assert isinstance(plan.rows, NumberedRows)
    numbers = broken(draw, [list(row) for row in plan.rows.numbers])
    return replace(plan, rows=NumberedRows(plan.rows.numbering, numbers))


@st.composite
def broken_schedules(draw: st.DrawFn) -> MessagePlan:
    """A plan whose schedule was broken afterwards."""
    schedule, plan = draw(schedules())
    rows = broken(draw, [list(row) for row in schedule.rows])
    return replace(plan, schedule=replace(schedule, rows=tuple(map(tuple, rows))), coded=None)


@given(made=schedules(), ahead=st.integers(1, 3))
def test_lowering_on_numbers_is_lowering_written_for_reading(made: tuple[Schedule, MessagePlan], ahead: int) -> None:
    schedule, plan = made
    assert lower(schedule, plan.graph, lookahead=ahead) == plain_lowering(schedule, plan.graph, ahead)


@given(made=schedules(), until=st.sampled_from([ActionKind.WEIGHT_GRAD, ActionKind.INPUT_GRAD]))
def test_last_uses_are_those_of_one_action_after_the_other(
    made: tuple[Schedule, MessagePlan], until: ActionKind
) -> None:
    schedule, plan = made
    assert last_uses(schedule, plan.graph, until=until) == plain_last_uses(schedule, plan.graph, until=until)


@given(made=schedules())
def test_numbers_and_steps_are_one_plan(made: tuple[Schedule, MessagePlan]) -> None:
    _, plan = made
    rows = plan.rows
    assert isinstance(rows, NumberedRows)
    steps = replace(plan, rows=tuple(rows))
    assert steps == plan
    assert hash(rows) == hash(tuple(rows))
    assert repr(rows) == repr(tuple(rows))
    assert [[rows.numbering.number(step) for step in row] for row in rows] == [list(row) for row in rows.numbers]
    assert list(rows.lines()) == [[str(step) for step in row] for row in rows]
    assert (plan.messages, plan.digest) == (steps.messages, steps.digest)
    actions = tuple(tuple(step.action for step in row if isinstance(step, Compute)) for row in rows)
    assert actions == plan.schedule.rows
    assert plan_is_sound(steps)


@given(plan=broken_plans())
def test_what_is_proved_on_numbers_is_what_the_laws_say_of_steps(plan: MessagePlan) -> None:
    steps = replace(plan, rows=tuple(plan.rows))
    findings = faults_of(steps)
    assert plan_is_sound(plan) == plan_is_sound(steps) == (findings == ())
    assert verify_plan(plan) == verify_plan(steps) == findings


@pytest.mark.parametrize(
    ("edges", "placement"),
    [
        ([], (0, 1)),
        ([(0, (1,))], (0, 1)),
        ([(0, (1,))], (1, 0)),
        ([(0, (1, 2)), (1, (2,))], (0, 1, 0)),
    ],
)
def test_every_way_to_move_one_step_is_judged_as_by_the_laws(
    edges: list[tuple[int, tuple[int, ...]]], placement: tuple[int, ...]
) -> None:
    graph = shape_graph(len(placement), edges)
    plan = lower(build_schedule("1f1b", graph, placement, 2), graph)
    assert isinstance(plan.rows, NumberedRows)
    rows = [list(row) for row in plan.rows.numbers]
    for rank, at in [(rank, at) for rank, row in enumerate(rows) for at in range(len(row))]:
        left = [row[:at] + row[at + 1 :] if r == rank else row for r, row in enumerate(rows)]
        for other, place in [(other, place) for other, row in enumerate(left) for place in range(len(row) + 1)]:
            numbers = [
                [*row[:place], rows[rank][at], *row[place:]] if r == other else row for r, row in enumerate(left)
            ]
            moved = replace(plan, rows=NumberedRows(plan.rows.numbering, numbers))
            assert plan_is_sound(moved) == (faults_of(moved) == ())


@given(plan=broken_plans())
def test_numbers_meet_where_steps_do(plan: MessagePlan) -> None:
    rows = plan.rows
    assert isinstance(rows, NumberedRows)
    if len({number for row in rows.numbers for number in row}) == sum(map(len, rows.numbers)):
        assert rows.runs == (rendezvous(plan).blocked == ())


@given(plan=broken_schedules())
def test_a_schedule_is_lowered_just_when_its_laws_hold(plan: MessagePlan) -> None:
    schedule, graph = plan.schedule, plan.graph
    findings = verify_schedule(schedule, graph)
    assert is_sound(schedule, graph) == (faults_of_rows(schedule, graph) == ())
    if findings:
        with pytest.raises(ScheduleError) as caught:
            lower(schedule, graph)
        assert caught.value.diagnostics == findings
    else:
        assert verify_plan(lower(schedule, graph)) == ()
    assert (verify_plan(plan) == ()) == (faults_of(plan) == ())


@given(plan=broken_schedules())
def test_an_order_is_found_just_when_actions_can_run_one_after_the_other(plan: MessagePlan) -> None:
    flow = flow_of(plan.graph)
    if any(action.stage >= len(plan.graph.stages) for row in plan.schedule.rows for action in row):
        return
    order = legal_order(coded_of(plan.schedule, plan.graph))
    assert (order is not None) == (run_in_order(plan.schedule.rows, flow.needs, flow.makes).blocked == ())


def test_a_plan_that_follows_a_wrong_schedule_is_not_sound() -> None:
    graph = chain_graph(2)
    for row, code in [
        ("1F0 0F0 1B0 0B0", "deadlock"),
        ("0F0 1F0 0B0 1B0", "deadlock"),
        ("0F0 1F0 1B0", "missing-action"),
        ("0F0 1F0 1B0 0I0", "missing-action"),
        ("0F0 1F0 1B0 0B0 0I0 0W0", "mixed-backward"),
    ]:
        schedule = replace(from_rows([row.split()]), placement=(0, 0))
        frees = [Free(stage, Microbatch(0)) for stage in range(2)]
        plan = MessagePlan(graph, schedule, ((*map(Compute, schedule.rows[0]), *frees),))
        assert not plan_is_sound(plan)
        assert [finding.code for finding in verify_plan(plan)] == [code]


def test_steps_are_made_once_and_by_rank() -> None:
    rows = lower(build_schedule("1f1b", chain_graph(3), (0, 1, 2), 4), chain_graph(3)).rows
    assert rows[1] is rows[1]
    assert rows[-1] is rows[2]
    assert rows[1:] == (rows[1], rows[2])
    assert len(rows) == 3
    with pytest.raises(IndexError):
        rows[3]


def test_a_step_of_another_plan_has_no_number() -> None:
    graph, small = chain_graph(3), chain_graph(2)
    rows = lower(build_schedule("1f1b", graph, (0, 1, 2), 4), graph).rows
    other = lower(build_schedule("1f1b", small, (0, 1), 2), small).rows
    assert isinstance(other, NumberedRows)
    assert [other.numbering.number(step) for step in rows[2]] == [-1] * len(rows[2])
    assert rows != other
    assert Send in map(type, rows[2])


def test_what_was_worked_out_for_a_schedule_is_kept_as_long_as_its_plan() -> None:
    graph = chain_graph(3)
    schedule = build_schedule("1f1b", graph, (0, 1, 2), 4)
    assert coded_of(schedule, graph) is not coded_of(replace(schedule), graph)
    plan = lower(schedule, graph)
    assert coded_of(schedule, graph) is plan.coded
