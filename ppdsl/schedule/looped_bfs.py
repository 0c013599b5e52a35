"""Looped breadth-first: all micro-batches on one stage, then on the next (Lamy-Poirier 2022, arXiv:2211.05953)."""

from __future__ import annotations

from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.weaving import actions_of

__all__ = ["looped_bfs"]


def looped_bfs(p: int, v: int, m: int, *, backward: str = "lifo") -> list[tuple[Action, ...]]:
    """Run all forwards stage by stage, then all backwards from the last stage.

    For equal stages a step takes `(m + (p-1)/v)(F + B)`, as interleaved 1F1B does, where `F` and `B` are the times of
    a rank's whole share; every rank holds all `m` micro-batches of all its stages.

    Args:
        p: Number of ranks.
        v: Stages on each rank.
        m: Micro-batches.
        backward: `lifo`: backwards start with the newest micro-batch, as PyTorch's do; `fifo`: with the oldest one.

    >>> for row in looped_bfs(2, 2, 2):
    ...     print(*row)
    0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
    1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    step = 1 if backward == "fifo" else -1
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [action for stage in stages for action in actions_of(stage, ActionKind.FORWARD, m)]
        chunks = (actions_of(stage, ActionKind.BACKWARD, m)[::step] for stage in reversed(stages))
        rows.append((*forwards, *(action for chunk in chunks for action in chunk)))
    return rows
