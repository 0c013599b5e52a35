"""The depth rule: schedules of any stage graph whose warm-up follows the longest way to the end.

With `d` stages on a stage's longest path to the end, itself included, and `D` the largest `d`, a stage runs some
forwards first, then alternates. How many is what tells the families of this module apart.

    family               warm-up        weight gradients
    1f1b                 d - 1          with the input gradients (B)
    eager_1f1b           2 (d - 1)      with the input gradients (B)
    zero_bubble(h1)      d - 1          D - d backwards later
    zero_bubble(h2)      2 (d - 1)      2 (D - d) backwards later

Why no order of this kind can deadlock: let `a` be 2 or 4, the warm-up `(a/2)(d - 1)`, and give forward `k` of a stage
the time `2k + D - d` and its backward (or input gradient) the time `2k + D + (a - 1)(d - 1)`. A stage's own order only
ever goes to a later time, and data flow never to an earlier one; at equal times there is only data flow, forward or
backward, which has no circle. Weight gradients give nothing to others, so they cannot close a circle. On a rank with
several stages the orders of its stages are merged, which keeps this true (see `merging`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.flow import depths_in_ranks, flow_of
from ppdsl.schedule.merging import merge_orders
from ppdsl.schedule.weaving import actions_of, weave, weave_split

__all__ = ["by_depth", "eager_1f1b", "zero_bubble"]

Rows = tuple[tuple[Action, ...], ...]


def eager_1f1b(graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int) -> Rows:
    """Warm up twice as far as 1F1B, so that messages travel while ranks work.

    For equal stages, one on each rank, and messages of latency `c` a chain of `p` takes `(m+p-1)(F+B) + 2c(p-1)`,
    which is the least possible, where 1F1B takes `2c(p-1)m/p - 2c` longer; rank `r` holds `2(p-1-r) + 1` micro-batches.

    Args:
        graph: Any stage graph; a stage without backward only runs forward.
        placement: For each stage its rank.
        microbatches: At least 1.
        ranks: Number of ranks.

    Returns:
        For each rank its actions in order.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> for row in eager_1f1b(chain_graph(2), (0, 1), microbatches=4, ranks=2):
    ...     print(*row)
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    return by_depth(graph, placement, microbatches, ranks, eager=True)


def zero_bubble(
    graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int, *, variant: str = "h1"
) -> Rows:
    """Split backwards and put weight gradients off to fill the drain (Qi et al. 2023, arXiv:2401.10241).

    For equal stages, one on each rank, and `F = I = W` a step takes as long as the bound allows. On a chain, `h1` takes
    `m(F+I+W) + (p-1)(F+I-W)` when `W <= F` and `W <= I`, with `p` micro-batches held on every rank. `h2` holds up to
    `2p-1` and takes as long, but no rank waits between its first and its last action: it gains when steps follow each
    other without a barrier, and needs `2p-1` micro-batches for it.

    Args:
        graph: Any stage graph; a stage without backward only runs forward, and one without weights of its own has no
            weight gradient to put off and runs a full backward.
        placement: For each stage its rank.
        microbatches: At least 1.
        ranks: Number of ranks.
        variant: `h1` or `h2`.

    Returns:
        For each rank its actions in order.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> for row in zero_bubble(chain_graph(2), (0, 1), microbatches=3, ranks=2):
    ...     print(*row)
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return by_depth(graph, placement, microbatches, ranks, eager=variant == "h2", split=True)


def by_depth(
    graph: StageGraph,
    placement: Sequence[int],
    microbatches: int,
    ranks: int,
    *,
    eager: bool = False,
    split: bool = False,
) -> Rows:
    """Return the rows of the depth rule.

    Args:
        graph: Any stage graph.
        placement: For each stage its rank.
        microbatches: At least 1.
        ranks: Number of ranks.
        eager: Whether to warm up twice as far.
        split: Whether backwards are split into I and W.
    """
    flow = flow_of(graph)
    depths = depths_in_ranks(flow, placement)
    deepest, reach = max(depths), 2 if eager else 1
    orders: list[tuple[Action, ...]] = []
    for stage, depth in zip(graph.stages, depths, strict=True):
        forwards = actions_of(stage.index, ActionKind.FORWARD, microbatches)
        warm_up = reach * (depth - 1)
        if split and stage.has_backward and stage.trainable:
            inputs = actions_of(stage.index, ActionKind.INPUT_GRAD, microbatches)
            weights = actions_of(stage.index, ActionKind.WEIGHT_GRAD, microbatches)
            orders.append(weave_split(forwards, inputs, weights, warm_up, reach * (deepest - depth)))
        else:
            backwards = actions_of(stage.index, ActionKind.BACKWARD, microbatches)
            orders.append(weave(forwards, backwards, warm_up))
    return merge_orders(orders, flow, placement, ranks)
