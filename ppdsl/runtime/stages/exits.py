"""What leaves a stage: the results that other stages use, and what they must look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import Diagnostic, Label, RunError
from ppdsl.graph.ir import Edge, Stage, StageGraph
from ppdsl.recording.programs import Result
from ppdsl.runtime.layout import Layout, dtype_of
from ppdsl.schedule.flow import carries_gradient

__all__ = ["Exit", "exits_of", "unexpected_gradient", "unexpected_output"]


@dataclass(frozen=True, slots=True)
class Exit:
    """A result that other stages use.

    Attributes:
        position: Which result of the stage's program.
        edge: The edge it feeds.
        layout: How it lies in memory when it leaves.
        meta: Its recorded shape, element type, and whether it has a gradient in this kind of step.
        consumers: The stages that use it.
        gradients: Those of them that give a gradient back.
    """

    position: int
    edge: Edge
    layout: Layout
    meta: tuple[torch.Size, torch.dtype, bool]
    consumers: tuple[int, ...]
    gradients: tuple[int, ...]


def exits_of(graph: StageGraph, results: Sequence[Result], *, backward: bool) -> list[Exit]:
    """Return the results of a program that other stages use, in its order.

    Args:
        graph: The stage graph.
        results: The program's results.
        backward: Whether the step has a backward.
    """
    exits = []
    for position, result in enumerate(results):
        if result.edge is None:
            continue
        edge = graph.edges[result.edge]
        gradients = tuple(c for c in edge.consumers if carries_gradient(graph, edge, c)) if backward else ()
        meta = (torch.Size(edge.meta.shape), dtype_of(edge.meta.dtype), edge.meta.requires_grad and backward)
        exits.append(Exit(position, edge, Layout.of(edge.meta), meta, edge.consumers, gradients))
    return exits


def unexpected_output(stage: Stage, exit_: Exit, result: torch.Tensor, microbatch: int) -> RunError:
    """Return the error that says how a result differs from the recorded one."""
    shape, dtype, requires_grad = exit_.meta
    actual = _describe(result.shape, result.dtype, requires_grad=result.requires_grad)
    recorded = _describe(shape, dtype, requires_grad=requires_grad)
    span = exit_.edge.span
    place = f" ({span.short})" if span else ""
    message = (
        f"Output `{exit_.edge.value}` of stage {stage.label}{place} has {actual}, recorded {recorded}, "
        f"in micro-batch {microbatch}."
    )
    labels = (Label(span, "made here"),) if span else ()
    advice = "values between stages must look the same in every micro-batch; keep what changes inside one stage"
    return RunError(Diagnostic("unexpected-output", message, labels, help=advice))


def unexpected_gradient(stage: Stage, edge: Edge, microbatch: int) -> RunError:
    """Return the error about a gradient that no message would carry."""
    place = f" ({edge.span.short})" if edge.span else ""
    message = (
        f"Stage {stage.label} gives `{edge.value}`{place} a gradient in micro-batch {microbatch}, but gave it none "
        "when it was recorded."
    )
    labels = (Label(edge.span, "made here"),) if edge.span else ()
    advice = "use the value in the same way in every micro-batch: multiply by 0 where it does not count"
    return RunError(Diagnostic("not-recorded", message, labels, help=advice))


def _describe(shape: torch.Size, dtype: torch.dtype, *, requires_grad: bool) -> str:
    sizes = ", ".join(map(str, shape))
    return f"{str(dtype).removeprefix('torch.')}[{sizes}] {'with' if requires_grad else 'without'} gradient"
