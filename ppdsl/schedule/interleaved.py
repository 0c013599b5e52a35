"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473), and its zero-bubble form (Qi et al. 2023, 2401.10241).

Each rank holds `v` stages of a loop. Micro-batches go in rounds of about `p`: a rank runs a whole round on its first
stage, then on its second one, and so on; backwards go the same way from the last stage.
"""

from __future__ import annotations

from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.weaving import actions_of, weave, weave_split

__all__ = ["fitting_microbatches", "interleaved", "interleaved_zero_bubble"]


def fitting_microbatches(p: int, m: int) -> int:
    """Return the least number of micro-batches, at least `m`, that makes equal rounds of at least `p`.

    Fewer than `2p` micro-batches are one round. A longer step with another number is built for the next number that
    fits, and the micro-batches that nobody asked for are left out: an order stays legal when all actions of one
    micro-batch are taken out of it.

    >>> [fitting_microbatches(4, m) for m in (1, 7, 8, 9, 10, 11, 13)]
    [1, 7, 8, 10, 10, 12, 15]
    """
    while m % max(1, m // p):
        m += 1
    return m


def interleaved(p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    """Warm up by `(v-1) k + 2(p-1-r)` forwards for rounds of `k`, then alternate one forward and one backward.

    For equal stages and `m` a multiple of `p`, a step takes `(m + (p-1)/v)(F + B)`, where `F` and `B` are the times of
    a rank's whole share, and rank `r` holds `(v-1)p + 2(p-1-r) + 1` stages' micro-batches. With `v = 1` and `m` a
    multiple of `p`, ranks hold up to twice as much as in 1F1B.

    >>> for row in interleaved(2, 2, 4):
    ...     print(*row)
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    whole = fitting_microbatches(p, m)
    per_round = whole // max(1, whole // p)
    rows = []
    for rank in range(p):
        forwards = _in_rounds(rank, p, v, whole, ActionKind.FORWARD)
        backwards = _in_rounds(rank, p, v, whole, ActionKind.BACKWARD)
        rows.append(_kept(weave(forwards, backwards, (v - 1) * per_round + 2 * (p - 1 - rank)), m, whole))
    return rows


def interleaved_zero_bubble(p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    """Warm up by `(v-1) k + (p-1-r)` forwards and delay weight gradients by `r` backwards.

    For equal stages with `F = I = W = 1` for a rank's whole share and `m` a multiple of `p`, a step takes
    `3m + (p-1)/v`, and every rank holds `p` micro-batches of its whole share.

    >>> for row in interleaved_zero_bubble(2, 2, 2):
    ...     print(*row)
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    whole = fitting_microbatches(p, m)
    per_round = whole // max(1, whole // p)
    kinds = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
    rows = []
    for rank in range(p):
        forwards, inputs, weights = (_in_rounds(rank, p, v, whole, kind) for kind in kinds)
        row = weave_split(forwards, inputs, weights, warm_up=(v - 1) * per_round + p - 1 - rank, delay=rank)
        rows.append(_kept(row, m, whole))
    return rows


def _in_rounds(rank: int, p: int, v: int, m: int, kind: ActionKind) -> list[Action]:
    per_round = m // max(1, m // p)
    stages = range(rank, p * v, p)
    chunks = [actions_of(stage, kind, m) for stage in (stages if kind is ActionKind.FORWARD else reversed(stages))]
    return [
        action for start in range(0, m, per_round) for chunk in chunks for action in chunk[start : start + per_round]
    ]


def _kept(row: tuple[Action, ...], m: int, whole: int) -> tuple[Action, ...]:
    return row if m == whole else tuple(action for action in row if action.microbatch < m)
