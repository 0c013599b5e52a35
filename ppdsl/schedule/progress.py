"""How far rows of steps get when every rank works in order: a legal order, or who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Blocked", "Progress", "run_in_order"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on.

    Attributes:
        rank: Who waits.
        position: The step it stands at.
        need: What it waits for.
        giver: Rank and position of the step that would give it; None when no step does.
    """

    rank: int
    position: int
    need: Hashable
    giver: tuple[int, int] | None


@dataclass(frozen=True)
class Progress:
    """How far rows of steps get.

    Attributes:
        order: Rank and position of each step that ran, in a legal order.
        blocked: The ranks that did not reach the end of their row; empty when all did.
    """

    order: tuple[tuple[int, int], ...]
    blocked: tuple[Blocked, ...]

    @property
    def cycle(self) -> tuple[Blocked, ...]:
        """Ranks that wait for each other in a circle, each for the next one; empty when nobody waits in a circle."""
        stopped = {blocked.rank: blocked for blocked in self.blocked}
        seen: dict[int, int] = {}
        path: list[Blocked] = []
        current = self.blocked[0] if self.blocked else None
        while current is not None and current.rank not in seen:
            seen[current.rank] = len(path)
            path.append(current)
            current = stopped.get(current.giver[0]) if current.giver else None
        return tuple(path[seen[current.rank] :]) if current is not None else ()


def run_in_order(
    rows: Sequence[Sequence[Item]],
    needs: Callable[[Item], Sequence[Hashable]],
    gives: Callable[[Item], Hashable | None],
) -> Progress:
    """Run every row in its order, each step as soon as its needs are given; linear in the number of steps.

    Args:
        rows: For each rank its steps.
        needs: What a step waits for.
        gives: What a step gives to others when it has run, or None.

    >>> rows = [["a needs b", "c"], ["b needs c"]]
    >>> stuck = run_in_order(rows, lambda s: s.split(" needs ")[1:], lambda s: s[0])
    >>> [(b.rank, b.need, b.giver) for b in stuck.cycle]
    [(0, 'b', (1, 0)), (1, 'c', (0, 1))]
    """
    given: set[Hashable] = set()
    waiting: dict[Hashable, list[int]] = {}
    position = [0] * len(rows)
    order: list[tuple[int, int]] = []
    work = list(reversed(range(len(rows))))
    while work:
        rank = work.pop()
        row = rows[rank]
        while position[rank] < len(row):
            item = row[position[rank]]
            missing = next((need for need in needs(item) if need not in given), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            order.append((rank, position[rank]))
            position[rank] += 1
            gift = gives(item)
            if gift is not None:
                given.add(gift)
                work += waiting.pop(gift, ())
    return Progress(tuple(order), _blocked(rows, waiting, position, gives))


def _blocked(
    rows: Sequence[Sequence[Item]],
    waiting: dict[Hashable, list[int]],
    position: list[int],
    gives: Callable[[Item], Hashable | None],
) -> tuple[Blocked, ...]:
    if not waiting:
        return ()
    givers: dict[Hashable, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for place in range(position[rank], len(row)):
            gift = gives(row[place])
            if gift in waiting:
                givers.setdefault(gift, (rank, place))
    stopped = [
        Blocked(rank, position[rank], need, givers.get(need)) for need, ranks in waiting.items() for rank in ranks
    ]
    return tuple(sorted(stopped, key=lambda blocked: blocked.rank))
