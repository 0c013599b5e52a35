"""Processes that each run several ranks: every turn once and in order, late waits, no circle of waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan import Message, MessagePlan, Send, lower
from ppdsl.plan.merged import Round, merge
from ppdsl.plan.ticks import Turn, ticks_of
from ppdsl.schedule import build_schedule, families
from tests.schedule.shapes import placed_for


def run_by_processes(plan: MessagePlan, processes: Sequence[Sequence[int]], found: Sequence[Sequence[Round]]) -> bool:
    """Let each process go through its rounds; a send waits until its receive is posted, and nothing is assumed."""
    home = {rank: number for number, ranks in enumerate(processes) for rank in ranks}
    posted: set[Message] = set()
    sent: set[Message] = set()
    steps = [list(_steps(plan, rounds)) for rounds in found]
    moved = True
    while moved:
        moved = False
        for number, row in enumerate(steps):
            while row:
                kind, message = row[0]
                local = home[message.source] == home[message.target]
                assert number == home[message.source if kind == "send" else message.target]
                if kind == "post":
                    posted.add(message)
                elif kind == "send":
                    if not local and message not in posted:
                        break
                    sent.add(message)
                elif message not in sent:
                    assert not local, "a process waits for itself"
                    break
                row.pop(0)
                moved = True
    return not any(steps)


def _steps(plan: MessagePlan, rounds: Sequence[Round]):  # type: ignore[no-untyped-def]
    begin = [0] * len(plan.rows)
    for each in rounds:
        yield from (("post", message) for message in each.posts)
        yield from (("wait", message) for turn in each.turns for message in turn.needs)
        for turn in each.turns:
            row = plan.rows[turn.rank][begin[turn.rank] : turn.stop]
            yield from (("send", step.message) for step in row if isinstance(step, Send))
            begin[turn.rank] = turn.stop


def turns_of(rounds: Sequence[Round], rank: int) -> list[Turn]:
    return [turn for each in rounds for turn in each.turns if turn.rank == rank]


@given(data=st.data(), name=st.sampled_from(list(families())), m=st.integers(1, 5), ahead=st.sampled_from([1, 8]))
def test_every_family_runs_in_processes_of_several_ranks(data: st.DataObject, name: str, m: int, ahead: int) -> None:
    graph, placement = data.draw(placed_for(name))
    plan = lower(build_schedule(name, graph, placement, m), graph)
    ranks = range(len(plan.rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    processes = [tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    found = merge(plan, processes, lookahead=ahead)
    for own, rounds in zip(processes, found, strict=True):
        for rank in own:
            in_ticks = [turn for turns in ticks_of(plan) for turn in turns if turn.rank == rank]
            assert turns_of(rounds, rank) == in_ticks
        posts = [message for each in rounds for message in each.posts]
        needs = [m for each in rounds for turn in each.turns for m in turn.needs if m.source not in own]
        assert sorted(map(str, posts)) == sorted(map(str, needs))
    assert run_by_processes(plan, processes, found)


def test_nothing_waits_for_another_process_while_a_rank_could_start_something() -> None:
    graph = chain_graph(4)
    plan = lower(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=6), graph)
    processes = [(0, 1), (2, 3)]
    for own, rounds in zip(processes, merge(plan, processes), strict=True):
        begin = dict.fromkeys(own, 0)
        sent: set[Message] = set()
        for each in rounds:
            waits = [m for turn in each.turns for m in turn.needs if m.source not in own]
            following = [next((t for t in turns_of(rounds, rank) if t.stop > begin[rank]), None) for rank in own]
            if waits:
                assert len(each.turns) == 1
                assert not any(turn is not None and all(m in sent for m in turn.needs) for turn in following)
            for turn in each.turns:
                row = plan.rows[turn.rank][begin[turn.rank] : turn.stop]
                sent.update(step.message for step in row if isinstance(step, Send))
                begin[turn.rank] = turn.stop


def test_a_process_without_ranks_has_nothing_to_do() -> None:
    graph = chain_graph(2)
    plan = lower(build_schedule("gpipe", graph, (0, 1), microbatches=2), graph)
    assert merge(plan, [(0, 1), ()])[1] == ()


def test_a_plan_whose_sends_are_missing_is_refused() -> None:
    graph = chain_graph(2)
    plan = lower(build_schedule("gpipe", graph, (0, 1), microbatches=2), graph)
    row = tuple(step for step in plan.rows[0] if not isinstance(step, Send))
    with pytest.raises(ScheduleError, match="would wait for each other"):
        merge(MessagePlan(plan.graph, plan.schedule, (row, plan.rows[1])), [(0,), (1,)])
