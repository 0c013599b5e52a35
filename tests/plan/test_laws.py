"""Every way to break a law gets its own finding; texts compared whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import render_plain
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import (
    Compute,
    Free,
    MessagePlan,
    Recv,
    Send,
    Step,
    Wait,
    lower,
    peak_activations,
    verify_plan,
    verify_schedule,
)
from ppdsl.plan.verify import verify
from ppdsl.schedule import Schedule, build_schedule, families, from_rows
from tests.schedule.shapes import microbatches, placed_for

CHAIN = chain_graph(2)


def say(rows: list[str], graph: StageGraph = CHAIN, **changes: object) -> str:
    schedule = from_rows([row.split() for row in rows])
    return render_plain(verify_schedule(replace(schedule, **changes), graph))  # type: ignore[arg-type]


def test_backward_before_forward() -> None:
    assert (
        say(["0F0 0F1 0B0 0B1", "1F1 1B0 1F0 1B1"])
        == """\
error[backward-first]: Rank 1 runs 1B0 at step 1, before 1F0 at step 2.
rank 0 | 0F0 0F1 0B0 0B1
rank 1 | 1F1 1B0 1F0 1B1
       |     ^^^
help: run 1F0 before 1B0"""
    )


def test_weight_gradient_before_input_gradient() -> None:
    assert (
        say(["0F0 0B0", "1F0 1W0 1I0"])
        == """\
error[weight-first]: Rank 1 runs 1W0 at step 1, before 1I0 at step 2.
rank 0 | 0F0 0B0
rank 1 | 1F0 1W0 1I0
       |     ^^^
help: run 1I0 before 1W0"""
    )


def test_a_missing_action() -> None:
    assert (
        say(["0F0 0F1 0B0 0B1", "1F0 1B0"])
        == """\
error[missing-action]: Stage 1 never runs the backward of micro-batch 1.
help: add 1B1 to rank 1

error[missing-action]: Stage 1 never runs the forward of micro-batch 1.
help: add 1F1 to rank 1"""
    )


def test_a_missing_half_of_a_backward() -> None:
    assert (
        say(["0F0 0B0", "1F0 1I0"])
        == """\
error[missing-action]: Stage 1 never runs the weight gradient of micro-batch 0.
help: add 1W0 to rank 1"""
    )


def test_a_backward_that_is_whole_and_split() -> None:
    assert (
        say(["0F0 0B0", "1F0 1B0 1W0"])
        == """\
error[mixed-backward]: Stage 1 runs both 1B0 and 1W0.
help: run one B, or one I and one W"""
    )


def test_a_duplicate_action() -> None:
    assert (
        say(["0F0 0B0", "1F0 1B0 1B0"])
        == """\
error[duplicate-action]: Rank 1 runs 1B0 again at step 2.
rank 0 | 0F0 0B0
rank 1 | 1F0 1B0 1B0
       |         ^^^
help: run it once"""
    )


def test_a_misplaced_action() -> None:
    schedule = Schedule("own", from_rows([["0F0", "0B0", "1F0"], []]).rows, (0, 1), 1)
    assert (
        render_plain(verify_schedule(schedule, CHAIN))
        == """\
error[misplaced-action]: Rank 0 runs 1F0 at step 2, but stage 1 is on rank 1.
rank 0 | 0F0 0B0 1F0
       |         ^^^
rank 1 |
help: move 1F0 to rank 1"""
    )


def test_foreign_actions() -> None:
    schedule = Schedule("own", from_rows([["0F0", "0B0"], ["1F7", "2F0"]]).rows, (0, 1), 1)
    assert (
        render_plain(verify_schedule(schedule, CHAIN))
        == """\
error[unknown-microbatch]: Rank 1 runs 1F7 at step 0, but the micro-batches are 0 to 0.
rank 0 | 0F0 0B0
rank 1 | 1F7 2F0
       | ^^^

error[unknown-stage]: Rank 1 runs 2F0 at step 1, but the stages are 0 to 1.
rank 0 | 0F0 0B0
rank 1 | 1F7 2F0
       |     ^^^"""
    )


def test_a_backward_of_a_frozen_stage() -> None:
    graph = shape_graph(2, [(0, (1,))], frozen={0})
    assert (
        say(["0F0 0B0", "1F0 1B0"], graph)
        == """\
error[needless-backward]: Rank 0 runs 0B0 at step 1, but stage 0 has no backward.
rank 0 | 0F0 0B0
       |     ^^^
rank 1 | 1F0 1B0
help: leave 0B0 out"""
    )


def test_a_backward_in_a_forward_only_schedule() -> None:
    assert say(["0F0", "1F0 1B0"], forward_only=True).startswith(
        "error[needless-backward]: Rank 1 runs 1B0 at step 1, but the schedule is forward only."
    )


def test_another_number_of_stages() -> None:
    assert (
        say(["0F0 0B0"])
        == """\
error[wrong-stage-count]: The schedule is for 1 stages, but the model has 2.
help: write an order for stages 0 to 1"""
    )


def test_visits_of_one_stage_on_two_ranks() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], keys=("body", "head", "body"))
    assert (
        say(["0F0 0B0", "1F0 1B0", "2F0 2B0"], graph)
        == """\
error[split-visits]: Stage body' is on rank 2, but an earlier visit of it is on rank 0.
help: run all visits of stage body on one rank"""
    )


def test_computations_that_wait_in_a_circle() -> None:
    assert (
        say(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"])
        == """\
error[deadlock]: Ranks 0 and 1 wait for each other: 0B0 needs 1B0, which never runs.
rank 0 | 0F0 0B0 0F1 0B1
       |     ^^^ waits for 1B0 of rank 1
rank 1 | 1F1 1F0 1B0 1B1
       | ^^^ waits for 0F1 of rank 0
help: run first what others wait for"""
    )


def test_a_rank_that_waits_for_itself() -> None:
    graph = chain_graph(2)
    assert (
        say(["1F0 0F0 1B0 0B0"], graph)
        == """\
error[deadlock]: Rank 0 waits for itself: 1F0 needs 0F0, which it runs later.
rank 0 | 1F0 0F0 1B0 0B0
       | ^^^ waits for 0F0 of rank 0
help: run first what others wait for"""
    )


def test_activations_above_the_limit() -> None:
    graph = chain_graph(2)
    schedule = build_schedule("gpipe", graph, (0, 1), 3)
    assert (
        render_plain(verify_schedule(schedule, graph, limits=(3, 2)))
        == """\
error[too-many-activations]: Rank 1 holds 3 activations at 1F2, step 2; its limit is 2.
rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2
rank 1 | 1F0 1F1 1F2 1B0 1B1 1B2
       |         ^^^
help: run backwards earlier, or raise the limit"""
    )


def test_of_many_findings_of_one_kind_a_few_are_shown() -> None:
    rows = [f"0F{m} 0B{m}".split() for m in range(9)]
    backwards = [f"1B{m} 1F{m}".split() for m in range(9)]
    order = from_rows([chain.from_iterable(rows), chain.from_iterable(backwards)])
    text = render_plain(verify_schedule(order, CHAIN))
    assert text.count("error[backward-first]") == 4
    assert text.endswith("note[backward-first]: 5 more findings of this kind are not shown.")


def test_long_rows_are_cut_around_the_step() -> None:
    rows = [[f"0F{m}" for m in range(40)] + [f"0B{m}" for m in range(40)], [f"1F{m}" for m in range(40)]]
    rows[1] += [f"1B{m}" for m in range(40)]
    rows[1][20], rows[1][60] = rows[1][60], rows[1][20]
    assert (
        render_plain(verify_schedule(from_rows(rows), CHAIN))
        == """\
error[backward-first]: Rank 1 runs 1B20 at step 20, before 1F20 at step 60.
rank 0 | ... 0F14 0F15 0F16 0F17 0F18 0F19 0F20 0F21 0F22 0F23 0F24 ...
rank 1 | ... 1F14 1F15 1F16 1F17 1F18 1F19 1B20 1F21 1F22 1F23 1F24 ...
       |                                   ^^^^
help: run 1F20 before 1B20"""
    )


@given(m=microbatches, name=st.sampled_from(list(families())), data=st.data())
def test_no_mutation_of_a_schedule_goes_unnoticed_or_raises(m: int, name: str, data: st.DataObject) -> None:
    graph, placement = data.draw(placed_for(name))
    schedule = build_schedule(name, graph, placement, m)
    rank = data.draw(st.sampled_from([r for r, row in enumerate(schedule.rows) if row]))
    row = list(schedule.rows[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    if data.draw(st.booleans()):
        del row[at]
    else:
        row.insert(data.draw(st.integers(0, len(row))), row[at])
    rows = (*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])
    assert verify_schedule(replace(schedule, rows=rows), graph) != ()


PLAN = lower(build_schedule("1f1b", CHAIN, (0, 1), 2), CHAIN)


def changed(rank: int, steps: list[Step]) -> MessagePlan:
    return replace(PLAN, rows=tuple(tuple(steps) if r == rank else row for r, row in enumerate(PLAN.rows)))


def first(rank: int, kind: type[Step]) -> int:
    return next(i for i, step in enumerate(PLAN.rows[rank]) if isinstance(step, kind))


@pytest.mark.parametrize(
    ("kind", "rank", "text"),
    [
        (Send, 0, "error[missing-send]: Rank 0 never sends 'value0' of micro-batch 0 from stage 0 to 1."),
        (Free, 0, "error[missing-free]: Rank 0 never frees stage 0, micro-batch 0."),
        (Wait, 1, "error[missing-wait]: Rank 1 never waits for 'value0' of micro-batch 0 from stage 0 to 1."),
    ],
)
def test_a_left_out_step_is_named(kind: type[Step], rank: int, text: str) -> None:
    steps = list(PLAN.rows[rank])
    del steps[first(rank, kind)]
    assert render_plain(verify_plan(changed(rank, steps))) == text


@pytest.mark.parametrize(
    ("kind", "rank", "code"),
    [
        (Send, 0, "duplicate-message"),
        (Recv, 0, "duplicate-message"),
        (Wait, 0, "duplicate-message"),
        (Free, 0, "duplicate-free"),
    ],
)
def test_a_repeated_step_is_named(kind: type[Step], rank: int, code: str) -> None:
    steps = [step for step in PLAN.rows[rank] for _ in range(1 + isinstance(step, kind))]
    assert {finding.code for finding in verify_plan(changed(rank, steps))} == {code}


@pytest.mark.parametrize(
    ("kind", "to", "text"),
    [
        (Send, 0, "Rank 0 sends 'value0' of micro-batch 0 from stage 0 to 1 at step 0, before it is made."),
        (Wait, 0, "the gradient of 'value0' of micro-batch 0 from stage 1 to 0 at step 0, before posting its receive."),
        (Free, 0, "Rank 0 frees stage 0, micro-batch 0 at step 0, before its last use in 0B0."),
        (Wait, 99, "after its use."),
    ],
)  # fmt: skip
def test_a_step_at_the_wrong_moment_is_named(kind: type[Step], to: int, text: str) -> None:
    steps = list(PLAN.rows[0])
    step = steps.pop(first(0, kind))
    steps.insert(min(to, len(steps)), step)
    (finding,) = verify_plan(changed(0, steps))
    assert finding.message.endswith(text)


def test_crossed_receives_are_drawn() -> None:
    plan = lower(build_schedule("1f1b", CHAIN, (0, 1), 2), CHAIN, lookahead=9)
    late = (plan.rows[1][1], plan.rows[1][0], *plan.rows[1][2:])
    assert (
        render_plain(verify_plan(replace(plan, rows=(plan.rows[0], late))))
        == """\
error[channel-order]: Message 0 from rank 0 to rank 1 is 'value0' of micro-batch 0 from stage 0 to 1, but rank 1 posts \
the receive of 'value0' of micro-batch 1 from stage 0 to 1 first.
rank 0 | recv(1B0>0) recv(1B1>0) 0F0 send(0F0>1) 0F1 send(0F1>1) ...
       |                             ^^^^^^^^^^^ sends this
rank 1 | recv(0F1>1) recv(0F0>1) wait(0F0>1) ...
       | ^^^^^^^^^^^ expects this
help: post the receives from rank 0 in the order in which it sends"""
    )


def test_a_message_of_no_edge_is_named() -> None:
    message = next(step.message for step in PLAN.rows[0] if isinstance(step, Send))
    steps = [*PLAN.rows[0], Send(replace(message, source=message.target))]
    (finding,) = verify_plan(changed(0, steps))
    assert finding.code == "foreign-message"


def test_a_step_on_the_wrong_rank_is_named() -> None:
    message = next(step.message for step in PLAN.rows[0] if isinstance(step, Send))
    (finding,) = verify_plan(changed(1, [*PLAN.rows[1], Send(message)]))
    assert finding.code == "misplaced-message"


def test_a_plan_that_does_not_follow_its_schedule_is_named() -> None:
    steps = [step for step in PLAN.rows[0] if step != Compute(PLAN.schedule.rows[0][-1])]
    (finding,) = verify_plan(changed(0, steps))
    assert finding.message == "Rank 0 of the plan runs nothing where the schedule runs 0B1, at computation 3."


def test_verify_takes_whatever_has_a_plan() -> None:
    class Pipe:
        plan = PLAN

    assert verify(Pipe()) == verify(PLAN) == ()


def test_peaks_name_the_action_and_the_bytes_at_the_borders() -> None:
    graph = chain_graph(3, bytes_per_edge=100)
    peaks = peak_activations(build_schedule("1f1b", graph, (0, 1, 2), 4), graph)
    assert [(p.count, p.bytes, str(p.action)) for p in peaks] == [(3, 300, "0F2"), (2, 400, "1F1"), (1, 100, "2F0")]
