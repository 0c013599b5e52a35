"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.merging import backward_order, forward_order, merge_orders

__all__ = ["gpipe"]


def gpipe(graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int) -> tuple[tuple[Action, ...], ...]:
    """Fill the pipeline with forwards, then drain it with backwards.

    For equal stages, one on each rank, a step takes `(m + D - 1)(F + B)` with `D` stages on the longest path, and every
    rank holds all `m` micro-batches.

    Args:
        graph: Any stage graph; a stage without backward only runs forward.
        placement: For each stage its rank.
        microbatches: `m`, at least 1.
        ranks: Number of ranks.

    Returns:
        For each rank its actions in order.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> for row in gpipe(chain_graph(2), (0, 1), microbatches=2, ranks=2):
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    flow = flow_of(graph)
    stages = range(len(graph.stages))
    forwards = merge_orders([forward_order(s, microbatches) for s in stages], flow, placement, ranks)
    drains = [backward_order(s, microbatches) if flow.has_backward[s] else () for s in stages]
    backwards = merge_orders(drains, flow, placement, ranks, forwards_done=True)
    return tuple(f + b for f, b in zip(forwards, backwards, strict=True))
