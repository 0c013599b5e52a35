"""A message plan in ticks: what may be started at the same time on all ranks, transfers first, then computations.

A driver that starts work on several devices from one thread goes through the plan tick by tick. A computation's tick is
the first one after its rank's computation before it and after everything it waits for::

    rank 0 | 0F0 0F1 0F2         0B0      tick 0: 0F0; tick 1: 0F1, and 1F0 after the transfer of 0F0's value; ...
    rank 1 |     1F0 1F1 1B0 1B1
"""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.plan.messages import Compute, Message, MessagePlan, Recv, Send, Wait
from ppdsl.schedule.action import Action

__all__ = ["Turn", "ticks_of"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One computation of one rank, with the steps around it.

    Attributes:
        rank: Whose.
        stop: How far the rank's row of the plan is done afterwards: the position after its sends and frees.
        action: What it computes.
        needs: The messages that it waits for; the driver has to deliver them before.
    """

    rank: int
    stop: int
    action: Action
    needs: tuple[Message, ...]


def ticks_of(plan: MessagePlan) -> tuple[tuple[Turn, ...], ...]:
    """Return for each tick its turns, by rank; running them in this order runs the whole plan.

    Args:
        plan: What to run; a verified one, whose waits all have a send before them.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(2)
    >>> for turns in ticks_of(lower(build_schedule("1f1b", graph, (0, 1), microbatches=2), graph)):
    ...     print(*(turn.action for turn in turns))
    0F0
    0F1 1F0
    1B0
    0B0 1F1
    1B1
    0B1
    """
    pending = [_turns_of(plan, rank) for rank in range(len(plan.rows))]
    sends = [_sends_of(plan, rank) for rank in range(len(plan.rows))]
    at = [0] * len(pending)
    sent: dict[Message, int] = {}
    ticks: list[tuple[Turn, ...]] = []
    while any(place < len(turns) for place, turns in zip(at, pending, strict=True)):
        ready = [
            turns[place]
            for place, turns in zip(at, pending, strict=True)
            if place < len(turns) and all(message in sent for message in turns[place].needs)
        ]
        for turn in ready:
            for message in sends[turn.rank][at[turn.rank]]:
                sent[message] = len(ticks)
            at[turn.rank] += 1
        ticks.append(tuple(ready))
        if not ready:
            break  # A plan that waits for what nobody sends; `verify_plan` says so.
    return tuple(ticks)


def _turns_of(plan: MessagePlan, rank: int) -> list[Turn]:
    turns: list[Turn] = []
    needs: list[Message] = []
    action: Action | None = None
    for position, step in enumerate(plan.rows[rank]):
        if action is not None and isinstance(step, Compute | Recv | Wait):
            turns.append(Turn(rank, position, action, tuple(needs)))
            action, needs = None, []
        if isinstance(step, Wait):
            needs.append(step.message)
        elif isinstance(step, Compute):
            action = step.action
    if action is not None:
        turns.append(Turn(rank, len(plan.rows[rank]), action, tuple(needs)))
    return turns


def _sends_of(plan: MessagePlan, rank: int) -> list[list[Message]]:
    sends: list[list[Message]] = []
    for step in plan.rows[rank]:
        if isinstance(step, Compute):
            sends.append([])
        elif isinstance(step, Send):
            sends[-1].append(step.message)
    return sends
