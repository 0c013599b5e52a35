"""1F1B on any stage graph: the depth rule (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503)."""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.depth_rule import by_depth

__all__ = ["one_f_one_b"]


def one_f_one_b(
    graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int
) -> tuple[tuple[Action, ...], ...]:
    """Warm up each stage by its depth, then alternate one forward and one backward.

    A stage with `d` stages on its longest path to the end, itself included, runs `d - 1` forwards first, so it never
    holds more than `d` micro-batches. Neighbours on one rank work as one and count once. For equal stages, one on each
    rank, a step takes `(m + D - 1)(F + B)` with `D` the largest depth, which is the least possible. A chain of `p`
    stages is the 1F1B everybody knows. Why it cannot deadlock: see `depth_rule`.

    Args:
        graph: Any stage graph; a stage without backward only runs forward.
        placement: For each stage its rank.
        microbatches: `m`, at least 1; also fewer than stages.
        ranks: Number of ranks.

    Returns:
        For each rank its actions in order.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> for row in one_f_one_b(chain_graph(3), (0, 1, 2), microbatches=4, ranks=3):
    ...     print(*row)
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return by_depth(graph, placement, microbatches, ranks)
