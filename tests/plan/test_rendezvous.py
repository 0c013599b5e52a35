"""Deadlock freedom: the verdict of `verify_plan` equals what channels without capacity do, also on broken plans."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import render_plain
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import Message, MessagePlan, Recv, Send, Step, Wait, lower, verify_plan
from ppdsl.schedule import build_schedule, families
from tests.schedule.shapes import placed_for


def finishes(plan: MessagePlan) -> bool:
    """Step ranks in turns over channels that hold nothing; sends and receives meet by order, not by name."""
    rows = [deque(row) for row in plan.rows]
    posted: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, int], list[Message]] = {}
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row:
                match row[0]:
                    case Recv(message):
                        channel = (message.source, message.target)
                        posted[channel] = posted.get(channel, 0) + 1
                    case Send(message):
                        channel = (message.source, message.target)
                        if len(sent.setdefault(channel, [])) == posted.get(channel, 0):
                            break
                        sent[channel].append(message)
                    case Wait(message) if message not in sent.get((message.source, message.target), []):
                        break
                    case _:
                        pass
                row.popleft()
                moved = True
    return not any(rows)


def post_late(row: tuple[Step, ...], by: int) -> tuple[Step, ...]:
    """Move every receive up to `by` steps later, but not behind its wait, and keep their order."""
    steps = list(row)
    for at in reversed([i for i, step in enumerate(steps) if isinstance(step, Recv)]):
        for place in range(at, min(at + by, len(steps) - 1)):
            follower = steps[place + 1]
            if isinstance(follower, Recv) or follower == Wait(steps[place].message):  # type: ignore[union-attr]
                break
            steps[place], steps[place + 1] = follower, steps[place]
    return tuple(steps)


@given(data=st.data(), name=st.sampled_from(list(families())), m=st.integers(1, 5))
def test_the_verdict_is_that_of_channels_without_capacity(data: st.DataObject, name: str, m: int) -> None:
    graph, placement = data.draw(placed_for(name))
    plan = lower(build_schedule(name, graph, placement, m), graph)
    assert finishes(plan)
    delays = data.draw(st.lists(st.integers(0, 12), min_size=len(plan.rows), max_size=len(plan.rows)))
    late = replace(plan, rows=tuple(post_late(row, by) for row, by in zip(plan.rows, delays, strict=True)))
    findings = verify_plan(late)
    assert {finding.code for finding in findings} <= {"deadlock"}
    assert (findings == ()) == finishes(late)


def test_two_ranks_that_both_send_first_are_drawn() -> None:
    plan = lower(build_schedule("1f1b", chain_graph(2), (0, 1), 3), chain_graph(2))
    late = replace(plan, rows=tuple(post_late(row, 99) for row in plan.rows))
    assert (
        render_plain(verify_plan(late))
        == """\
error[deadlock]: Ranks 0 and 1 wait for each other: rank 0 cannot send 'value0' of micro-batch 1 from stage 0 to 1.
rank 0 | 0F0 send(0F0>1) 0F1 send(0F1>1) recv(1B0>0) wait(1B0>0) ...
       |                     ^^^^^^^^^^^ waits until rank 1 posts its receive at step 6
rank 1 | ... wait(0F0>1) 1F0 1B0 send(1B0>0) free(1,0) recv(0F1>1) ...
       |                         ^^^^^^^^^^^ waits until rank 0 posts its receive at step 4
help: post its receive on rank 1 earlier"""
    )


def test_a_circle_of_three_ranks_is_drawn_without_the_others() -> None:
    graph = shape_graph(8, [(0, (5,)), (1, (3,)), (2, (4,)), (6, (7,))], keys=("a", "b", "c", "a", "b", "c", "d", "e"))
    schedule = build_schedule("forward_only", graph, (0, 1, 2, 0, 1, 2, 3, 4), 1)
    plan = lower(schedule, graph)
    late = replace(plan, rows=tuple(post_late(row, 99) for row in plan.rows))
    text = render_plain(verify_plan(late))
    assert text.startswith("error[deadlock]: Ranks 0, 1 and 2 wait for each other: rank 0 cannot send 'value0'")
    assert "rank 3" not in text
    assert "rank 4" not in text
