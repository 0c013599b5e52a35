"""Lowering: every plan is legal under rendezvous channels, and says exactly what travels."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import Compute, Direction, Free, Message, Recv, Send, Wait, lower, rendezvous, verify_plan
from ppdsl.schedule import build_schedule, carries_gradient, families, from_rows
from tests.schedule.shapes import microbatches, placed_for, placed_graphs

NAMES = list(families())
Placed = tuple[StageGraph, tuple[int, ...]]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches, lookahead=st.integers(1, 4))
def test_no_law_of_plans_is_broken(name: str, data: st.DataObject, m: int, lookahead: int) -> None:
    graph, placement = data.draw(placed_for(name))
    assert verify_plan(lower(build_schedule(name, graph, placement, m), graph, lookahead=lookahead)) == ()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches)
def test_each_edge_travels_once_to_each_consumer_on_another_rank(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    plan = lower(build_schedule(name, graph, placement, m), graph)
    found = Counter((x.edge, x.consumer, x.direction) for x in plan.messages)
    for edge in graph.edges:
        for consumer in edge.consumers:
            apart = placement[edge.producer] != placement[consumer]
            back = apart and families()[name].backward and carries_gradient(graph, edge, consumer)
            assert found[edge.index, consumer, Direction.FORWARD] == (m if apart else 0)
            assert found[edge.index, consumer, Direction.BACKWARD] == (m if back else 0)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), m=microbatches)
def test_a_receive_is_posted_before_the_waits_of_the_computation_ahead(name: str, data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    for row in lower(build_schedule(name, graph, placement, m), graph).rows:
        blocks: list[list[object]] = [[]]  # what stands before, and around, each computation
        for step in row:
            blocks[-1].append(step)
            if isinstance(step, Compute):
                blocks.append([])
        posted = {s.message: i for i, block in enumerate(blocks) for s in block if isinstance(s, Recv)}
        waited = {s.message: i for i, block in enumerate(blocks) for s in block if isinstance(s, Wait)}
        for message, at in waited.items():
            assert posted[message] < at or at == 0


@given(stages=st.integers(1, 8), m=microbatches)
def test_1f1b_of_a_chain_needs_one_computation_of_look_ahead(stages: int, m: int) -> None:
    graph = chain_graph(stages)
    for row in lower(build_schedule("1f1b", graph, range(stages), m), graph).rows:
        computed = 0
        posted: dict[Message, int] = {}
        for step in row:
            if isinstance(step, Recv):
                posted[step.message] = computed
            elif isinstance(step, Wait):
                assert computed - posted[step.message] <= 1
            elif isinstance(step, Compute):
                computed += 1


@given(placed=placed_graphs(), m=microbatches)
def test_all_ranks_lower_to_the_same_digest(placed: Placed, m: int) -> None:
    graph, placement = placed
    plans = [lower(build_schedule("1f1b", graph, placement, m), graph) for _ in range(2)]
    assert plans[0].digest == plans[1].digest


@given(data=st.data(), m=st.integers(1, 4))
def test_any_legal_order_of_a_user_can_be_lowered(data: st.DataObject, m: int) -> None:
    graph, placement = data.draw(placed_graphs())
    order = build_schedule("sequential", graph, (0,) * len(graph.stages), m).rows[0]
    # Any order that respects the data flow, made by moving micro-batches against each other.
    weights = data.draw(st.lists(st.integers(0, 3 * len(order)), min_size=m, max_size=m))
    ahead = {action: at + weights[action.microbatch] for at, action in enumerate(order)}
    mixed = sorted(order, key=lambda action: ahead[action])
    rows = [[a for a in mixed if placement[a.stage] == rank] for rank in range(max(placement) + 1)]
    own = from_rows(rows)
    schedule = type(own)("own", own.rows, placement, m)
    assert verify_plan(lower(schedule, graph)) == ()


def test_a_rank_posts_ahead_waits_runs_sends_and_frees() -> None:
    graph = chain_graph(3)
    plan = lower(build_schedule("1f1b", graph, (0, 1, 2), 2), graph)
    assert [str(step) for step in plan.rows[1]] == [
        "recv(edge 0 F0 of stage 1)",
        "recv(edge 0 F1 of stage 1)",
        "wait(edge 0 F0 of stage 1)",
        "1F0",
        "send(edge 1 F0 of stage 2)",
        "recv(edge 1 B0 of stage 2)",
        "wait(edge 0 F1 of stage 1)",
        "1F1",
        "send(edge 1 F1 of stage 2)",
        "recv(edge 1 B1 of stage 2)",
        "wait(edge 1 B0 of stage 2)",
        "1B0",
        "send(edge 0 B0 of stage 1)",
        "free(1, 0)",
        "wait(edge 1 B1 of stage 2)",
        "1B1",
        "send(edge 0 B1 of stage 1)",
        "free(1, 1)",
    ]


def test_nothing_is_sent_between_stages_of_one_rank() -> None:
    graph = chain_graph(3)
    plan = lower(build_schedule("1f1b", graph, (0, 0, 0), 2), graph)
    assert plan.messages == ()


def test_no_gradient_is_sent_to_a_frozen_stage() -> None:
    graph = shape_graph(3, [(0, (2,)), (1, (2,))], frozen={0})
    plan = lower(build_schedule("1f1b", graph, (0, 1, 2), 1), graph)
    assert [str(message) for message in plan.messages] == [
        "edge 0 F0 of stage 2",
        "edge 1 F0 of stage 2",
        "edge 1 B0 of stage 2",
    ]


def test_a_frozen_state_is_freed_after_its_last_use_on_the_rank() -> None:
    graph = shape_graph(3, [(0, (1, 2)), (1, (2,))], frozen={0})
    (row,) = lower(build_schedule("sequential", graph, (0, 0, 0), 1), graph).rows
    assert [str(step) for step in row] == ["0F0", "1F0", "2F0", "free(0, 0)", "2B0", "free(2, 0)", "1B0", "free(1, 0)"]


def test_messages_needed_out_of_order_are_posted_in_the_order_of_the_sends() -> None:
    graph = chain_graph(2)
    own = from_rows([["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"], ["1F2", "1B2", "1F1", "1B1", "1F0", "1B0"]])
    plan = lower(own, graph)
    assert verify_plan(plan) == ()
    posts = [str(step) for step in plan.rows[1] if isinstance(step, Recv)]
    assert posts == [f"recv(edge 0 F{m} of stage 1)" for m in range(3)]


def test_look_ahead_grows_until_no_rank_waits_in_a_circle() -> None:
    # Both ranks send twice before either looks at what it gets: one computation of look-ahead is not enough.
    graph = shape_graph(4, [(0, (3,)), (1, (2,))], keys=("a", "b", "a2", "b2"))
    own = from_rows(
        [
            ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"],
            ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1"],
        ]
    )
    plan = lower(own, graph)
    assert rendezvous(plan).blocked == ()
    row = [str(step) for step in plan.rows[0]]
    assert row.index("recv(edge 1 F0 of stage 2)") < row.index("0F0")


def test_an_illegal_order_is_refused_before_lowering() -> None:
    with pytest.raises(ScheduleError) as caught:
        lower(from_rows([["0B0", "0F0"], ["1F0", "1B0"]]), chain_graph(2))
    assert caught.value.diagnostics[0].code == "backward-first"


def test_sizes_of_messages_are_those_of_the_edges() -> None:
    graph = chain_graph(2, bytes_per_edge=64)
    plan = lower(build_schedule("gpipe", graph, (0, 1), 2), graph)
    assert {message.bytes for message in plan.messages} == {64}


def test_every_state_is_freed_once() -> None:
    graph = chain_graph(4)
    plan = lower(build_schedule("1f1b", graph, (0, 1, 0, 1), 3), graph)
    frees = Counter(step for row in plan.rows for step in row if isinstance(step, Free))
    assert len(frees) == 12
    assert set(frees.values()) == {1}


def test_steps_are_sends_after_computations() -> None:
    graph = chain_graph(2)
    plan = lower(build_schedule("forward_only", graph, (0, 1), 2), graph)
    assert [type(step) for step in plan.rows[0]] == [Compute, Send, Free, Compute, Send, Free]
