"""A schedule for a batch with fewer rows than micro-batches: the same order without those that are empty."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ppdsl.schedule.table import Schedule

__all__ = ["first_microbatches"]


def first_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """Return a schedule of its first micro-batches only, in the same order on every rank.

    A legal schedule stays legal: no micro-batch needs anything of another one.

    Args:
        schedule: Any schedule, also a user's own.
        microbatches: How many to keep.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> full = build_schedule("1f1b", chain_graph(2), (0, 1), microbatches=4)
    >>> print(full)
    rank 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    >>> print(first_microbatches(full, 2))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    """
    if microbatches >= schedule.microbatches:
        return schedule
    kept = [[at for at, action in enumerate(row) if action.microbatch < microbatches] for row in schedule.rows]
    rows = tuple(tuple(row[at] for at in places) for row, places in zip(schedule.rows, kept, strict=True))
    overlaps = tuple(
        tuple(new for new, (at, after) in enumerate(pairwise(places)) if at in pairs and after == at + 1)
        for places, pairs in zip(kept, schedule.overlaps, strict=False)
    )
    return replace(schedule, rows=rows, microbatches=microbatches, overlaps=overlaps)
