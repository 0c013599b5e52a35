"""A message plan for processes that each run several ranks from one thread: an order for each, in which none hangs.

A process starts what it can start, on all of its ranks, before it waits for another process; and it waits first for
what is needed in the earliest tick. What such a turn waits for was made in an earlier tick, by a turn that depends on
earlier ticks alone; so of all processes that wait, the one that waits in the earliest tick gets what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.plan.messages import Message, MessagePlan, Send
from ppdsl.plan.rendezvous import meets
from ppdsl.plan.ticks import Turn, ticks_of

__all__ = ["Round", "merge"]


@dataclass(frozen=True, slots=True)
class Round:
    """What a process starts together.

    Attributes:
        posts: Messages of other processes whose receives are posted before it.
        turns: Computations, each of another rank; only a turn that is alone waits for another process.
    """

    posts: tuple[Message, ...]
    turns: tuple[Turn, ...]


def merge(
    plan: MessagePlan, processes: Sequence[Sequence[int]], *, lookahead: int = 8
) -> tuple[tuple[Round, ...], ...]:
    """Return for each process its rounds; all of them reach their ends although each send waits for its receive.

    Args:
        plan: What to run; a verified one.
        processes: The ranks of each process; every rank of the plan belongs to one.
        lookahead: How many rounds ahead of its use a receive is posted. Where processes would wait for each other it is
            doubled until they do not, as in `lower`.

    Raises:
        ScheduleError: The plan is not a verified one.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> plan = lower(build_schedule("gpipe", graph, (0, 1, 2, 3), microbatches=2), graph)
    >>> for rounds in merge(plan, [(0, 1), (2, 3)]):
    ...     print(", ".join(" ".join(str(turn.action) for turn in each.turns) for each in rounds))
    0F0, 0F1 1F0, 1F1, 1B0, 0B0, 1B1, 0B1
    2F0, 3F0, 2F1, 3F1, 3B0, 2B0 3B1, 2B1
    """
    ticks = ticks_of(plan)
    if not all(ticks):
        raise ScheduleError(_standstill())
    orders = [_order(plan, ticks, frozenset(ranks)) for ranks in processes]
    longest = max(map(len, orders), default=0)
    while True:
        found = tuple(
            tuple(_rounds(order, frozenset(ranks), lookahead)) for order, ranks in zip(orders, processes, strict=True)
        )
        if meets(_rows(plan, found, processes), len(plan.messages)):
            return found
        if lookahead >= longest:
            raise ScheduleError(_standstill())
        lookahead *= 2


def _standstill() -> Diagnostic:
    return Diagnostic("deadlock", "The processes of this plan would wait for each other.", help="see pp.verify(plan)")


def _order(plan: MessagePlan, ticks: Sequence[Sequence[Turn]], ranks: frozenset[int]) -> list[tuple[Turn, ...]]:
    """Return the turns of a process, those together that are started together."""
    rows: dict[int, list[tuple[int, Turn]]] = {rank: [] for rank in sorted(ranks)}
    for tick, turns in enumerate(ticks):
        for turn in turns:
            if turn.rank in ranks:
                rows[turn.rank].append((tick, turn))
    at = dict.fromkeys(rows, 0)
    sent: set[Message] = set()
    order: list[tuple[Turn, ...]] = []
    while following := [(*rows[rank][place], rank) for rank, place in at.items() if place < len(rows[rank])]:
        free = tuple(turn for _, turn, _ in following if all(message in sent for message in turn.needs))
        if not free:
            free = (min(following, key=lambda entry: (entry[0], entry[2]))[1],)
        for turn in free:
            sent.update(_sends(plan, turn, rows[turn.rank][at[turn.rank] - 1][1].stop if at[turn.rank] else 0))
            at[turn.rank] += 1
        order.append(free)
    return order


def _sends(plan: MessagePlan, turn: Turn, begin: int) -> Iterator[Message]:
    return (step.message for step in plan.rows[turn.rank][begin : turn.stop] if isinstance(step, Send))


def _rounds(order: Sequence[tuple[Turn, ...]], ranks: frozenset[int], lookahead: int) -> Iterator[Round]:
    needs = [
        tuple(message for turn in turns for message in turn.needs if message.source not in ranks) for turns in order
    ]
    for place, turns in enumerate(order):
        ahead = needs[: lookahead + 1] if place == 0 else needs[place + lookahead : place + lookahead + 1]
        yield Round(tuple(message for messages in ahead for message in messages), turns)


def _rows(plan: MessagePlan, found: Sequence[Sequence[Round]], processes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each process its posts, waits and sends, as `meets` reads them."""
    number = {message: place for place, message in enumerate(plan.messages)}
    rows = []
    for rounds, ranks in zip(found, processes, strict=True):
        own, begin, row = frozenset(ranks), dict.fromkeys(ranks, 0), []
        for each in rounds:
            row += [3 * number[message] for message in each.posts]
            row += [
                3 * number[message] + 1 for turn in each.turns for message in turn.needs if message.source not in own
            ]
            for turn in each.turns:
                sends = _sends(plan, turn, begin[turn.rank])
                row += [3 * number[message] + 2 for message in sends if message.target not in own]
                begin[turn.rank] = turn.stop
        rows.append(row)
    return rows
