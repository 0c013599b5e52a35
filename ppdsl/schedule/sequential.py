"""Sequential: one micro-batch after the other, the order of a plain training loop."""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind, action_of

__all__ = ["sequential"]


def sequential(
    graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int
) -> tuple[tuple[Action, ...], ...]:
    """Run each micro-batch through all stages and back before the next one starts.

    Nothing overlaps, so this is the slowest order and the easiest to debug: stages run in the order of the model, and
    in one process they draw the same random numbers as a loop over the micro-batches.

    Args:
        graph: Any stage graph; a stage without backward only runs forward.
        placement: For each stage its rank.
        microbatches: At least 1.
        ranks: Number of ranks.

    Returns:
        For each rank its actions in order.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> for row in sequential(chain_graph(3), (0, 1, 0), microbatches=2, ranks=2):
    ...     print(*row)
    0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1
    1F0 1B0 1F1 1B1
    """
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for microbatch in range(microbatches):
        for stage in graph.stages:
            rows[placement[stage.index]].append(action_of(stage.index, ActionKind.FORWARD, microbatch))
        for stage in reversed(graph.stages):
            if stage.has_backward:
                rows[placement[stage.index]].append(action_of(stage.index, ActionKind.BACKWARD, microbatch))
    return tuple(tuple(row) for row in rows)
