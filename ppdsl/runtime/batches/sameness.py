"""What two recordings of one model must have in common to run in one pipeline, or in one step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TypeAlias

from ppdsl.graph.ir import Edge, Stage, StageGraph

__all__ = ["flow_difference", "stage_difference"]

Names: TypeAlias = tuple[str, str]

_PLAIN: Names = ("the one", "the other")


def stage_difference(one: StageGraph, other: StageGraph, where: Names = _PLAIN) -> str | None:
    """Return in words how the stages of two recordings differ, or None.

    Ranks hold the parameters of their stages, so another shape must not move one.

    Args:
        one: A recording's graph.
        other: Another one's.
        where: How to speak of the two, after "in".
    """
    return next(_stages(one, other, where), None)


def flow_difference(one: StageGraph, other: StageGraph, where: Names = _PLAIN) -> str | None:
    """Return in words how the stages, or the values between them, differ, or None.

    Sizes may differ, also the number of axes: every micro-batch has its own.

    Args:
        one: A recording's graph.
        other: Another one's.
        where: How to speak of the two, after "in".
    """
    return next(_flow(one, other, where), None)


def _stages(one: StageGraph, other: StageGraph, where: Names) -> Iterator[str]:
    if len(one.stages) != len(other.stages):
        yield f"{len(one.stages)} stages against {len(other.stages)}"
    for left, right in zip(one.stages, other.stages, strict=False):
        if left.label != right.label:
            yield f"stage {left.label} against stage {right.label}"
        for name in ("parameters", "buffers", "has_backward"):
            ours, theirs = getattr(left, name), getattr(right, name)
            if isinstance(ours, tuple):
                ours, theirs = frozenset(ours), frozenset(theirs)
            if ours != theirs:
                yield _named(left, ours, theirs, where)
        if left.says != right.says:
            yield f"stage {left.label} adds to the loss or reports a metric in {where[right.says]} only"
    if one.ties != other.ties:
        yield "other parameters are shared between stages"
    if one.loss != other.loss:
        yield "another stage computes the loss"


def _named(stage: Stage, ours: object, theirs: object, where: Names) -> str:
    if not isinstance(ours, frozenset) or not isinstance(theirs, frozenset):
        return f"stage {stage.label} has {'a' if ours else 'no'} backward against {'a' if theirs else 'no'} backward"
    name = min(ours ^ theirs)
    return f"stage {stage.label} uses `{name}` in {where[name not in ours]} only"


def _flow(one: StageGraph, other: StageGraph, where: Names) -> Iterator[str]:
    yield from _stages(one, other, where)
    for left, right in zip_longest(one.edges, other.edges):
        if left is None or right is None:
            edge, graph = (left, one) if right is None else (right, other)
            yield f"{_edge(edge, graph)} is sent in {where[left is None]} only"
        elif _essence(left) != _essence(right):
            yield f"{_edge(left, one)} against {_edge(right, other)}"
    if len(one.outputs) != len(other.outputs):
        yield f"{len(one.outputs)} outputs against {len(other.outputs)}"
    for route, twin in zip(one.outputs, other.outputs, strict=False):
        if (route.producer, route.meta.dtype) != (twin.producer, twin.meta.dtype):
            yield f"output `{route.name}` is made in another way"


def _essence(edge: Edge) -> tuple[object, ...]:
    return edge.producer, edge.consumers, edge.meta.dtype, edge.meta.requires_grad, edge.gradient_from


def _edge(edge: Edge, graph: StageGraph) -> str:
    targets = ", ".join(graph.stages[consumer].label for consumer in edge.consumers)
    grad = "" if edge.meta.requires_grad else " without gradient"
    return f"`{edge.value}` ({edge.meta.dtype}{grad}, stage {graph.stages[edge.producer].label} to {targets})"
