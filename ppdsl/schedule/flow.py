"""Which action needs which: the data flow of a step, before anybody chooses an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from ppdsl.graph.ir import Edge, StageGraph
from ppdsl.schedule.action import Action, ActionKind

__all__ = ["Flow", "Made", "carries_gradient", "depths_in_ranks", "flow_of"]


class Made(NamedTuple):
    """What an action makes for others: a stage's value, or the gradient of its inputs, for one micro-batch.

    A tuple rather than a dataclass because it is the key of every inner loop.
    """

    gradient: bool
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Flow:
    """The data flow between the stages of a graph.

    Attributes:
        values_from: For each stage the stages whose values it needs in forward, ascending.
        gradients_from: For each stage the stages whose gradients it needs in backward, ascending.
        has_backward: For each stage whether it takes part in backward.
        depths: For each stage the number of stages on the longest path from it to the end, itself included.
        heads: For each stage the number of stages on the longest path from the start to it, itself included.
    """

    values_from: tuple[tuple[int, ...], ...]
    gradients_from: tuple[tuple[int, ...], ...]
    has_backward: tuple[bool, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]

    def needs(self, action: Action) -> tuple[Made, ...]:
        """Return what must exist before `action` can run."""
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD:
                return tuple(Made(False, s, microbatch) for s in self.values_from[stage])
            case ActionKind.BACKWARD | ActionKind.INPUT_GRAD:
                gradients = (Made(True, s, microbatch) for s in self.gradients_from[stage])
                return (Made(False, stage, microbatch), *gradients)
            case ActionKind.WEIGHT_GRAD:
                return (Made(True, stage, microbatch),)
            case _:
                assert_never(action.kind)

    def makes(self, action: Action) -> Made | None:
        """Return what `action` makes for others; a weight gradient stays with its stage."""
        if action.kind is ActionKind.WEIGHT_GRAD:
            return None
        return Made(action.kind is not ActionKind.FORWARD, action.stage, action.microbatch)


def carries_gradient(graph: StageGraph, edge: Edge, consumer: int) -> bool:
    """Tell whether `consumer` gives a gradient of `edge` back to the stage that made it."""
    backward = graph.stages[consumer].has_backward and graph.stages[edge.producer].has_backward
    return backward and consumer in edge.gradient_from


def flow_of(graph: StageGraph) -> Flow:
    """Return the data flow of `graph`, in one pass over its edges.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> flow = flow_of(chain_graph(3))
    >>> flow.depths, flow.heads, flow.values_from, flow.gradients_from
    ((3, 2, 1), (1, 2, 3), ((), (0,), (1,)), ((1,), (2,), ()))
    """
    count = len(graph.stages)
    values: list[set[int]] = [set() for _ in range(count)]
    gradients: list[set[int]] = [set() for _ in range(count)]
    for edge in graph.edges:
        for consumer in edge.consumers:
            values[consumer].add(edge.producer)
            if carries_gradient(graph, edge, consumer):
                gradients[edge.producer].add(consumer)
    heads, depths = [1] * count, [1] * count
    for stage in range(count):
        heads[stage] = 1 + max((heads[s] for s in values[stage]), default=0)
    for stage in reversed(range(count)):
        for producer in values[stage]:
            depths[producer] = max(depths[producer], 1 + depths[stage])
    return Flow(
        values_from=tuple(tuple(sorted(s)) for s in values),
        gradients_from=tuple(tuple(sorted(s)) for s in gradients),
        has_backward=tuple(stage.has_backward for stage in graph.stages),
        depths=tuple(depths),
        heads=tuple(heads),
    )


def depths_in_ranks(flow: Flow, placement: Sequence[int]) -> tuple[int, ...]:
    """Return each stage's depth with steps between stages of one rank not counted.

    With one stage on each rank these are `flow.depths`. Stages that follow each other on one rank work as one.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> flow = flow_of(chain_graph(4))
    >>> depths_in_ranks(flow, (0, 1, 2, 3)), depths_in_ranks(flow, (0, 0, 1, 1)), depths_in_ranks(flow, (0, 1, 0, 1))
    ((4, 3, 2, 1), (2, 2, 1, 1), (4, 3, 2, 1))
    """
    depths = [1] * len(placement)
    for stage in reversed(range(len(placement))):
        for producer in flow.values_from[stage]:
            step = 1 if placement[producer] != placement[stage] else 0
            depths[producer] = max(depths[producer], depths[stage] + step)
    return tuple(depths)
