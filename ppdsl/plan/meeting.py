"""Whether rows of numbered steps run when a channel holds nothing: the rules of `rendezvous`, on whole numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

__all__ = ["all_end"]

_CLOSED, _OPEN, _AWAITED = range(3)


def all_end(rows: Sequence[Sequence[int]], messages: int, steps: int) -> bool:
    """Tell whether all rows reach their end over channels without capacity.

    Args:
        rows: For each rank its steps, each at most once; with `n` messages, `k` posts the receive of message `k`,
            `n + k` sends it, `2n + k` waits for it, and a step from `3n` on waits for nothing.
        messages: Number of messages, `n`.
        steps: Number of different steps, at least `3n`.

    >>> all_end([[0, 3, 4], [1, 2, 5]], 2, 6), all_end([[3, 0, 4], [2, 1, 5]], 2, 6)
    (True, False)
    """
    # A step opens the one that is `messages` further on: posting the send, sending the wait, all others nothing.
    doors = bytearray([_OPEN]) * (steps + messages + 1)
    doors[messages : 3 * messages] = bytes(2 * messages)
    waiting: dict[int, int] = {}  # a closed step -> who stands before it
    rest = [iter(row) for row in rows]
    held = [steps] * len(rows)  # what a rank goes on with; at first a step that does nothing
    work = deque(range(len(rows)))  # first come, first served: more is ready when a rank has its turn again
    left = len(rows)
    while work:
        rank = work.popleft()
        for step in chain((held[rank],), rest[rank]):
            if not doors[step]:
                doors[step], held[rank], waiting[step] = _AWAITED, step, rank
                break
            opened = step + messages
            if doors[opened] == _AWAITED:
                work.append(waiting.pop(opened))
            doors[opened] = _OPEN
        else:
            left -= 1
    return left == 0
