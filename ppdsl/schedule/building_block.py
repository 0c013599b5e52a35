"""V-Half and V-Min: less memory from a repeated building block (Qi et al. 2024, arXiv:2405.15362).

The stages lie in a V, rank `r` holds stages `r` and `2p-1-r`. A micro-batch passes the V forward and back; a building
block says when, in times of one action, with a step between neighbouring ranks that differs between the four passes.
Blocks of successive micro-batches start six actions apart, which is what a rank has to do for one of them. How long a
block holds its activations decides the memory:

    pass             first forward   second forward   second backward   first backward
    v_half           2               1                2                 1
    v_min            1               1                1                 1

Fewer steps per rank hold a micro-batch for less time: half of 1F1B's memory with six steps, a third with four.

Repeated blocks leave gaps at the start and at the end. They are filled by running the whole step once with equal
times: a rank takes the first action of its blocks that can run and that keeps its memory within the limit at every
action it overtakes, and weight gradients wait while there is an input gradient to run, once all forwards are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from ppdsl.schedule.action import Action, ActionKind, action_of

__all__ = ["v_half", "v_min"]

_INTERVAL = 6
# What can overtake: the blocks of two rounds of a V, as more never changed an order.
_LOOK_AHEAD = 60


@dataclass(frozen=True, slots=True)
class _Block:
    """When a micro-batch passes.

    Attributes:
        steps: Between neighbouring ranks, in the four passes.
        turns: From the end of one pass to the next one on the same rank.
        delays: From each input gradient to its weight gradient: of the second and of the first stage.
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]
    delays: tuple[float, float]

    def times(self, rank: int, p: int) -> tuple[tuple[float, int], ...]:
        """Return for each of a rank's six actions when it is, and which it is (see `_KINDS`)."""
        there, back = rank, p - 1 - rank
        (a, b, c, d), (first, top, last) = self.steps, self.turns
        second = a * (p - 1) + first
        turn = second + b * (p - 1) + top
        home = turn + c * (p - 1) + last
        inner, outer = turn + c * there, home + d * back
        starts = (a * there, second + b * back, inner, outer, inner + self.delays[0], outer + self.delays[1])
        return tuple((start, kind) for kind, start in enumerate(starts))


_HALF = _Block((2, 1, 2, 1), (1, 4, 2), (1.5, 3.5))
# Which of a rank's six actions fall on the same time depends on the remainder of p by 3.
_MIN = _Block((1, 1, 1, 1), (1, 1, 2), (3.5, 2.5))
_MIN_SHIFTED = _Block((1, 1, 1, 1), (1, 2, 3), (8.5, 1.5))

# The six actions of a rank for one micro-batch: whether on its second stage, and of which kind.
_F0, _F1, _I1, _I0, _W1, _W0 = range(6)
_KINDS = (
    (False, ActionKind.FORWARD),
    (True, ActionKind.FORWARD),
    (True, ActionKind.INPUT_GRAD),
    (False, ActionKind.INPUT_GRAD),
    (True, ActionKind.WEIGHT_GRAD),
    (False, ActionKind.WEIGHT_GRAD),
)


def v_half(p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    """Run V-Half: about half of 1F1B's memory.

    A rank holds at most `p + 2` stages' micro-batches (`p + 1` for odd `p`; a stage is half of a rank's share), at any
    times. For `F = I = W`, an even `p` from 4 and `m >= 2p` a step takes `6m + 3p - 7` in times of one stage.

    Args:
        p: Number of ranks.
        v: Stages on each rank; always 2.
        m: Micro-batches; fewer than seven run in the order of seven (or `2p-1`) with the others left out.

    >>> for row in v_half(2, 2, 3):
    ...     print(*row)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1I0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    limit = 2 * ((p + 2) // 2)
    return _filled(_HALF, p, m, max(m, min(2 * p - 1, 7)), [limit] * p)


def v_min(p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    """Run V-Min: about a third of 1F1B's memory.

    A rank holds at most `2 ((p+4) // 3)` stages' micro-batches, at any times. It loses more than V-Half when `F`, `I`
    and `W` are not equal.

    Args:
        p: Number of ranks.
        v: Stages on each rank; always 2.
        m: Micro-batches.

    >>> for row in v_min(2, 2, 3):
    ...     print(*row)
    0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 0W0 0F2 0I1 0W1 3F2 3I2 3W1 3W2 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 1W0 2W0 2I1 1I1 1F2 2F2 1W1 2W1 2I2 1I2 1W2 2W2
    """
    limit = 2 * ((p + 4) // 3)
    # The first rank's own stages hold a micro-batch for 4p and 1 actions.
    return _filled(_MIN if p % 3 == 1 else _MIN_SHIFTED, p, m, m, [min(limit, -(-2 * p // 3) + 1), *[limit] * (p - 1)])


def _filled(block: _Block, p: int, m: int, whole: int, limits: list[int]) -> list[tuple[Action, ...]]:
    ends: list[dict[tuple[int, int], int]] = [{} for _ in range(p)]
    ranks = [_Rank(rank, block, whole, limits[rank], ends) for rank in range(p)]
    left, tick = 6 * whole * p, 0
    while left:
        chosen = [rank.choose(tick) for rank in ranks]
        tick += 1
        for rank, at in zip(ranks, chosen, strict=True):
            if at is not None:
                rank.run(at, tick)
                left -= 1
    return [rank.actions(m) for rank in ranks]


class _Rank:
    """A rank that works through its blocks' actions, and what may overtake."""

    def __init__(
        self, rank: int, block: _Block, microbatches: int, limit: int, ends: list[dict[tuple[int, int], int]]
    ) -> None:
        self.rank, self.p, self.limit, self.ends = rank, len(ends), limit, ends
        self.rest = _in_time(block.times(rank, self.p), microbatches)
        self.next = list(islice(self.rest, _LOOK_AHEAD))
        self.row: list[tuple[int, int]] = []
        self.forwards = 2 * microbatches
        self.live = 0

    def choose(self, tick: int) -> int | None:
        """Return which of the next actions to run now; None: wait."""
        live = most = self.live
        weight: int | None = None
        for at, (kind, microbatch) in enumerate(self.next):
            fits = kind > _F1 or most < self.limit
            if fits and self._can_run(kind, microbatch, tick):
                if kind < _W1 or self.forwards:
                    return at
                if weight is None:
                    weight = at
            if kind <= _F1:
                live += 1
                most = max(most, live)
            elif kind >= _W1:
                live -= 1
        return weight

    def run(self, at: int, tick: int) -> None:
        """Run the chosen action; it ends at `tick`."""
        kind, microbatch = self.next.pop(at)
        self.next += islice(self.rest, 1)
        self.ends[self.rank][kind, microbatch] = tick
        self.row.append((kind, microbatch))
        if kind <= _F1:
            self.live += 1
            self.forwards -= 1
        elif kind >= _W1:
            self.live -= 1

    def actions(self, microbatches: int) -> tuple[Action, ...]:
        """Return what was run, without the micro-batches that nobody asked for."""
        stages = self.rank, 2 * self.p - 1 - self.rank
        return tuple(
            action_of(stages[_KINDS[kind][0]], _KINDS[kind][1], microbatch)
            for kind, microbatch in self.row
            if microbatch < microbatches
        )

    def _can_run(self, kind: int, microbatch: int, tick: int) -> bool:
        own = self.ends[self.rank]
        if kind >= _W1:
            return own.get((kind - 2, microbatch), _NEVER) <= tick
        # A pass comes from the rank before (F0, I1) or after (F1, I0), and turns round at the ends of the V.
        giver = self.rank - 1 if kind in (_F0, _I1) else self.rank + 1
        if 0 <= giver < self.p:
            # The stage's own forward came earlier on the way that led here.
            return self.ends[giver].get((kind, microbatch), _NEVER) <= tick
        return kind == _F0 or own.get((kind - 1, microbatch), _NEVER) <= tick


def _in_time(times: tuple[tuple[float, int], ...], microbatches: int) -> Iterator[tuple[int, int]]:
    """Yield kinds and micro-batches of repeated blocks in the order of their times."""
    streams = (
        [(start + _INTERVAL * microbatch, kind, microbatch) for microbatch in range(microbatches)]
        for start, kind in times
    )
    return ((kind, microbatch) for _, kind, microbatch in merge(*streams))


_NEVER = 1 << 60
