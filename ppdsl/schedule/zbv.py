"""ZB-V: split backwards on a V of stages, the same memory on every rank (Qi et al. 2024, arXiv:2405.15362)."""

from __future__ import annotations

from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.weaving import actions_of

__all__ = ["zbv"]


def zbv(p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    """Run the fixed ZB-V pattern; rank `r` holds stages `r` and `2p-1-r`.

    For `F = I = W` and at least `2p-1` micro-batches no rank waits between its first and its last action, a step takes
    `3m + (p-1)/2` in times of a rank's whole share, and every rank holds `p` micro-batches of its whole share. For
    other times ranks do wait. Fewer micro-batches run in the order of `2p-1` with the others left out.

    Args:
        p: Number of ranks.
        v: Stages on each rank; always 2.
        m: Micro-batches.

    >>> for row in zbv(2, 2, 3):
    ...     print(*row)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    return [_row(rank, p, m) for rank in range(p)]


def _row(rank: int, p: int, m: int) -> tuple[Action, ...]:
    whole = max(2 * p - 1, m)
    kinds = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
    f, i, w = (actions_of(rank, kind, whole) for kind in kinds)
    g, j, x = (actions_of(2 * p - 1 - rank, kind, whole) for kind in kinds)
    warm = 2 * (p - rank) - 1
    row = f[:warm]
    for k in range(rank):
        row += (g[k], f[warm + k])
    started = warm + rank
    for k in range(p - rank):
        row += (g[rank + k], j[k], x[k])
    # Forwards of the far stage lag behind by as many as were under way; both run out in the loop below.
    for k in range(whole - p):
        row += (*f[started + k : started + k + 1], i[k], w[k], g[p + k], j[p - rank + k], x[p - rank + k])
    done, far = whole - p, whole - rank
    for k in range(rank):
        row += (i[done + k], j[far + k])
    for k in range(p - rank):
        row += (i[done + rank + k], w[done + k])
    row += x[far:]
    row += w[whole - rank :]
    return tuple(row) if whole == m else tuple(action for action in row if action.microbatch < m)
