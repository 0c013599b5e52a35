"""What a call looks like that fits the example: `microbatches` times as long, along one axis of an input.

The axis is never guessed. What fits two readings, one table for all or one micro-batch's rows, is a finding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppdsl.diagnostics import Diagnostic
from ppdsl.graph.ir import InputRoute
from ppdsl.runtime.batches.split import Axes, BatchAxis
from ppdsl.runtime.layout import dtype_of

__all__ = ["check_kinds", "recorded_axes", "unclear_whole"]


def check_kinds(routes: Sequence[InputRoute], leaves: Sequence[torch.Tensor]) -> list[Diagnostic]:
    """Return findings about element types and gradients that were not recorded so."""
    return [found for route, leaf in zip(routes, leaves, strict=True) for found in _check_kind(route, leaf)]


def recorded_axes(
    routes: Sequence[InputRoute], leaves: Sequence[torch.Tensor], microbatches: int, given: BatchAxis
) -> tuple[Axes, list[Diagnostic]]:
    """Return the axis of each input, and findings about those that do not fit.

    Args:
        routes: The graph's inputs, as recorded from one micro-batch.
        leaves: The call's tensors, in the same order.
        microbatches: Number of micro-batches.
        given: Axes that the shapes do not say.
    """
    axes: list[int | None] = []
    findings: list[Diagnostic] = []
    for route, leaf in zip(routes, leaves, strict=True):
        axis, found = _find_axis(route, tuple(leaf.shape), microbatches, given)
        axes.append(axis)
        findings += found
    if not findings:
        findings += _check_whole(routes, axes, microbatches, given)
    return tuple(axes), findings


def _check_kind(route: InputRoute, leaf: torch.Tensor) -> list[Diagnostic]:
    dtype, meta = dtype_of(route.meta.dtype), route.meta
    if leaf.dtype != dtype:
        given = str(leaf.dtype).removeprefix("torch.")
        message = f"Input `{route.name}` is {given}, recorded {meta.dtype}."
        advice = f"convert it to {meta.dtype}, or build the pipeline with a {given} example"
        return [Diagnostic("wrong-dtype", message, help=advice)]
    if leaf.requires_grad and not meta.requires_grad:
        message = f"Input `{route.name}` requires a gradient, recorded without."
        advice = "detach it, or build the pipeline with such an example"
        return [Diagnostic("wrong-requires-grad", message, help=advice)]
    return []


def _find_axis(
    route: InputRoute, shape: tuple[int, ...], microbatches: int, given: BatchAxis
) -> tuple[int | None, list[Diagnostic]]:
    recorded = route.meta.shape
    if microbatches == 1:
        return None, [] if shape == recorded else [_wrong_shape(route, shape, microbatches, None)]
    if route.name in given:
        return _check_given(route, shape, microbatches, given[route.name])
    if len(shape) != len(recorded):
        return None, [_wrong_shape(route, shape, microbatches, None)]
    differ = [axis for axis, (a, b) in enumerate(zip(shape, recorded, strict=True)) if a != b]
    if not differ:
        return None, []
    if len(differ) == 1 and shape[differ[0]] == microbatches * recorded[differ[0]]:
        return differ[0], []
    return None, [_wrong_shape(route, shape, microbatches, differ[0] if len(differ) == 1 else None)]


def _check_given(
    route: InputRoute, shape: tuple[int, ...], microbatches: int, axis: int | None
) -> tuple[int | None, list[Diagnostic]]:
    recorded = route.meta.shape
    if axis is None:
        return None, [] if shape == recorded else [_wrong_shape(route, shape, 1, None)]
    if not -len(recorded) <= axis < len(recorded):
        message = f"Input `{route.name}` has {len(recorded)} axes, so batch_axis={axis} is none of them."
        return None, [Diagnostic("unknown-axis", message, help=f"use an axis from 0 to {len(recorded) - 1}")]
    axis %= len(recorded)
    wanted = _times(recorded, axis, microbatches)
    return axis, [] if shape == wanted else [_wrong_shape(route, shape, microbatches, axis)]


def _wrong_shape(route: InputRoute, shape: tuple[int, ...], microbatches: int, axis: int | None) -> Diagnostic:
    recorded = route.meta.shape
    if microbatches == 1:
        message = f"Input `{route.name}` has shape {list(shape)}, recorded {list(recorded)}."
        return Diagnostic("wrong-shape", message, help="give that shape, or build another pipeline for this one")
    place = axis or 0
    wanted = list(_times(recorded, place, microbatches)) if recorded else []
    fits = axis is not None or (len(shape) == len(recorded) > 0 and shape[1:] == recorded[1:])
    if fits and shape[place] < microbatches:
        rows = "1 row" if shape[place] == 1 else f"{shape[place]} rows"
        message = f"Input `{route.name}` has {rows} for {microbatches} micro-batches."
        advice = f"give a batch of {wanted[place]} rows, or build the pipeline with fewer micro-batches"
        return Diagnostic("batch-too-small", message, help=advice)
    message = (
        f"Input `{route.name}` has shape {list(shape)}, but {microbatches} micro-batches of the recorded "
        f"{list(recorded)} make {wanted}."
    )
    advice = f"give shape {wanted}, or build the pipeline with an example cut from such a batch"
    if not recorded:
        advice = "give a tensor without axes"
    return Diagnostic("wrong-shape", message, help=advice)


def _check_whole(
    routes: Sequence[InputRoute], axes: Sequence[int | None], microbatches: int, given: BatchAxis
) -> list[Diagnostic]:
    """Refuse a call that is one micro-batch, and inputs that are given whole although they look like rows."""
    cut = any(axis is not None for axis in axes)
    if microbatches > 1 and not cut and any(r.meta.shape and r.name not in given for r in routes):
        message = f"The call has the rows of one micro-batch, but a step has {microbatches} micro-batches."
        advice = f"give {microbatches} times as many rows, or build the pipeline with microbatches=1"
        return [Diagnostic("batch-too-small", message, help=advice)]
    return unclear_whole(routes, axes, microbatches, given)


def unclear_whole(
    routes: Sequence[InputRoute], axes: Sequence[int | None], microbatches: int, given: BatchAxis
) -> list[Diagnostic]:
    """Return findings about inputs that are given whole although they look like the rows of one micro-batch.

    Args:
        routes: The graph's inputs, as recorded from one micro-batch.
        axes: For each input the axis it is cut along.
        microbatches: Number of micro-batches.
        given: Axes that are known.
    """
    lengths = {r.meta.shape[a]: r.name for r, a in zip(routes, axes, strict=True) if a is not None}
    findings = []
    for route, axis in zip(routes, axes, strict=True):
        shape = route.meta.shape
        if microbatches == 1 or axis is not None or route.name in given or not shape or shape[0] not in lengths:
            continue
        message = (
            f"Input `{route.name}` has shape {list(shape)}: it could be one tensor for every micro-batch, or "
            f"{shape[0]} rows like those of `{lengths[shape[0]]}` in one micro-batch."
        )
        advice = (
            f"say batch_axis={{{route.name!r}: None}} to give it whole to every micro-batch, or give "
            f"{microbatches * shape[0]} rows to cut"
        )
        findings.append(Diagnostic("ambiguous-batch", message, help=advice))
    return findings


def _times(shape: tuple[int, ...], axis: int, microbatches: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * microbatches, *shape[axis + 1 :])
