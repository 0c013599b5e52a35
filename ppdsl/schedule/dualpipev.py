"""DualPipeV: forwards of one half of the model run with backwards of the other (DeepSeek-AI 2024, arXiv:2412.19437).

The pairs are kept in sequence, forward first. A runtime that can run both at once finds them in `dualpipev_pairs`.
"""

from __future__ import annotations

from collections import deque

from ppdsl.schedule.action import Action, ActionKind, action_of

__all__ = ["dualpipev", "dualpipev_pairs"]


def dualpipev(p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    """Run the eight phases of DualPipeV on a V of stages; rank `r` holds stages `r` and `2p-1-r`.

    When a forward and a backward that run together take `F + B`, and `F = I >= W`, every rank waits
    `(p-1)(F + 2I - W)` in times of one stage between its first and its last action. A rank holds up to `2p + 1`
    stages' micro-batches. Fewer than `2p` micro-batches run in the order of `2p` with the others left out.

    Args:
        p: Number of ranks.
        v: Stages on each rank; always 2.
        m: Micro-batches.

    >>> for row in dualpipev(2, 2, 4):
    ...     print(*row)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    return [tuple(a for a in _Row(rank, p, max(m, 2 * p)).actions if a.microbatch < m) for rank in range(p)]


def dualpipev_pairs(p: int, m: int) -> dict[Action, Action]:
    """Return the forwards that run together with a backward, and that backward.

    >>> print(*(f"{forward}+{backward}" for forward, backward in dualpipev_pairs(2, 4).items()))
    0F3+3B1 3F2+0B0 3F3+0B1 2F2+1B0 1F3+2B1 2F3+1B1
    """
    rows = [_Row(rank, p, max(m, 2 * p)) for rank in range(p)]
    pairs = [(row.actions[at], row.actions[at + 1]) for row in rows for at in row.pairs]
    return {forward: backward for forward, backward in pairs if forward.microbatch < m and backward.microbatch < m}


class _Row:
    """One rank's order, written phase by phase; each stage counts its own micro-batches."""

    def __init__(self, rank: int, p: int, m: int) -> None:
        self.actions: list[Action] = []
        self.pairs: list[int] = []
        self.forwards = {rank: 0, 2 * p - 1 - rank: 0}
        self.backwards = dict(self.forwards)
        self.pending: deque[Action] = deque()
        self._write(rank, p, m)

    def _write(self, rank: int, p: int, m: int) -> None:
        near, far = rank, 2 * p - 1 - rank
        for _ in range(2 * (p - rank - 1)):
            self._forward(near)
        for _ in range(rank + 1):
            self._forward(near)
            self._forward(far)
        for _ in range(p - rank - 1):
            self._input(far)
            self._weight()
            self._forward(far)
        for turn in range(m - 2 * p + rank + 1):
            # The last rank has its first backward right after its own forward: there is nothing to run beside it.
            self._both(near, far, together=turn > 0 or rank < p - 1)
            self._both(far, near)
        for _ in range(p - rank - 1):
            self._backward(far)
            self._both(far, near)
        # From the middle of the drain on, weight gradients are put off to fill the end.
        for turn in range(2 * (rank + 1)):
            split = turn > rank
            (self._input if split else self._backward)(far if turn % 2 == 0 else near)
        for _ in range(p - rank - 1):
            self._weight()
            self._input(near)
        while self.pending:
            self._weight()

    def _forward(self, stage: int) -> None:
        self.actions.append(action_of(stage, ActionKind.FORWARD, self.forwards[stage]))
        self.forwards[stage] += 1

    def _backward(self, stage: int) -> None:
        self.actions.append(action_of(stage, ActionKind.BACKWARD, self.backwards[stage]))
        self.backwards[stage] += 1

    def _both(self, forward: int, backward: int, *, together: bool = True) -> None:
        if together:
            self.pairs.append(len(self.actions))
        self._forward(forward)
        self._backward(backward)

    def _input(self, stage: int) -> None:
        microbatch = self.backwards[stage]
        self.actions.append(action_of(stage, ActionKind.INPUT_GRAD, microbatch))
        self.pending.append(action_of(stage, ActionKind.WEIGHT_GRAD, microbatch))
        self.backwards[stage] += 1

    def _weight(self) -> None:
        if self.pending:
            self.actions.append(self.pending.popleft())
