"""Forward only: what `evaluate` runs."""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.merging import forward_order, merge_orders

__all__ = ["forward_only"]


def forward_only(
    graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int
) -> tuple[tuple[Action, ...], ...]:
    """Run every micro-batch forward and keep nothing.

    For equal stages, one on each rank, a step takes `(m + D - 1) F` with `D` stages on the longest path.

    Args:
        graph: Any stage graph.
        placement: For each stage its rank.
        microbatches: `m`, at least 1.
        ranks: Number of ranks.

    Returns:
        For each rank its actions in order.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> for row in forward_only(chain_graph(2), (0, 1), microbatches=3, ranks=2):
    ...     print(*row)
    0F0 0F1 0F2
    1F0 1F1 1F2
    """
    orders = [forward_order(s, microbatches) for s in range(len(graph.stages))]
    return merge_orders(orders, flow_of(graph), placement, ranks)
