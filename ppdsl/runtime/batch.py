"""Cutting a call's tensors into micro-batches, and putting the outputs of micro-batches together.

The axis is never guessed: it is where the call is `microbatches` times as long as the recorded micro-batch. What fits
both readings, one table for all or one micro-batch's rows, is refused until `batch_axis` says which it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import InputRoute, OutputRoute
from ppdsl.runtime.layout import dtype_of

__all__ = ["Batch", "BatchAxis", "check_names", "join_microbatches", "output_axis", "slice_like", "split_batch"]

BatchAxis = Mapping[str, int | None]
"""Name of an input or output -> the axis of its batch; None: the same for every micro-batch."""


@dataclass(frozen=True)
class Batch:
    """A call, cut.

    Attributes:
        microbatches: For each micro-batch the caller's tensors, in the order of the graph's inputs.
        axes: For each input the axis it was cut along; None when every micro-batch gets it whole.
        rows: Rows of one micro-batch: the length of the first cut input along its axis; None when nothing was cut.
    """

    microbatches: tuple[tuple[torch.Tensor, ...], ...]
    axes: tuple[int | None, ...]
    rows: int | None


def split_batch(
    routes: Sequence[InputRoute],
    leaves: Sequence[torch.Tensor],
    microbatches: int,
    batch_axis: BatchAxis | None = None,
) -> Batch:
    """Cut the tensors of a call into micro-batches; the pieces are views of the caller's tensors.

    Args:
        routes: The graph's inputs, as recorded from one micro-batch.
        leaves: The call's tensors, in the same order.
        microbatches: Number of micro-batches.
        batch_axis: Axes that the shapes do not say.

    Returns:
        The micro-batches.

    Raises:
        CallError: A tensor does not fit the recorded one, or fits it in two ways.

    >>> from ppdsl.graph.ir import TensorMeta
    >>> routes = [InputRoute("x", TensorMeta((2, 3), "float32", (3, 1)), (0,))]
    >>> batch = split_batch(routes, [torch.zeros(8, 3)], microbatches=4)
    >>> batch.axes, batch.rows, len(batch.microbatches), tuple(batch.microbatches[0][0].shape)
    ((0,), 2, 4, (2, 3))
    """
    given = dict(batch_axis or {})
    axes: list[int | None] = []
    findings: list[Diagnostic] = []
    for route, leaf in zip(routes, leaves, strict=True):
        findings += _check_kind(route, leaf)
        axis, found = _find_axis(route, tuple(leaf.shape), microbatches, given)
        axes.append(axis)
        findings += found
    if not findings:
        findings += _check_whole(routes, axes, microbatches, given)
    if findings:
        raise CallError(*findings)
    rows = next((r.meta.shape[a] for r, a in zip(routes, axes, strict=True) if a is not None), None)
    if microbatches == 1:
        return Batch((tuple(leaves),), tuple(axes), next((r.meta.shape[0] for r in routes if r.meta.shape), None))
    pieces = [
        [leaf] * microbatches if axis is None else leaf.chunk(microbatches, axis)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    cut = tuple(tuple(piece[m] for piece in pieces) for m in range(microbatches))
    return Batch(cut, tuple(axes), rows)


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
    """Refuse inputs that are given whole although they look like rows, and names nobody has."""
    lengths = {r.meta.shape[a]: r.name for r, a in zip(routes, axes, strict=True) if a is not None}
    findings = []
    if microbatches > 1 and not lengths and any(r.meta.shape and r.name not in given for r in routes):
        message = f"The call has the rows of one micro-batch, but a step has {microbatches} micro-batches."
        advice = f"give {microbatches} times as many rows, or build the pipeline with microbatches=1"
        return [Diagnostic("batch-too-small", message, help=advice)]
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


def check_names(batch_axis: BatchAxis, routes: Sequence[InputRoute], outputs: Sequence[OutputRoute]) -> None:
    """Refuse names in `batch_axis` that neither an input nor an output has.

    Raises:
        CallError: There is such a name.
    """
    known = [*(route.name for route in routes), *(route.name for route in outputs)]
    findings = []
    for name in batch_axis:
        # Targets are not known before the loss is recorded.
        if name in known or name.startswith("targets"):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(known)}"
        findings.append(
            Diagnostic("unknown-input", f"batch_axis names `{name}`, which is no input or output.", help=advice)
        )
    if findings:
        raise CallError(*findings)


def slice_like(name: str, leaf: torch.Tensor, rows: int, microbatches: int, batch_axis: BatchAxis) -> torch.Tensor:
    """Return the first micro-batch of a tensor that was not recorded yet: a target of a lazily recorded loss.

    Args:
        name: What to call it in an error.
        leaf: The whole batch.
        rows: Rows of one micro-batch, as found in the inputs.
        microbatches: Number of micro-batches.
        batch_axis: Axes that the shapes do not say.

    Raises:
        CallError: No axis has the rows of the batch, or several have.
    """
    if microbatches == 1 or leaf.dim() == 0:
        return leaf
    if name in batch_axis:
        axis = batch_axis[name]
        return leaf if axis is None else leaf.chunk(microbatches, axis)[0]
    whole = rows * microbatches
    fitting = [axis for axis, size in enumerate(leaf.shape) if size == whole]
    if len(fitting) == 1:
        return leaf.narrow(fitting[0], 0, rows)
    shape = list(leaf.shape)
    if not fitting:
        message = f"`{name}` has shape {shape}, and no axis has the {whole} rows of the batch."
    else:
        message = f"`{name}` has shape {shape}, and several axes have the {whole} rows of the batch."
    advice = f"say which with batch_axis={{{name!r}: AXIS}}, or None for a tensor that every micro-batch gets whole"
    raise CallError(Diagnostic("ambiguous-batch", message, help=advice))


def join_microbatches(
    route: OutputRoute, pieces: Sequence[torch.Tensor], batch: Batch, batch_axis: BatchAxis
) -> torch.Tensor:
    """Put one output's micro-batches together along the batch axis.

    Args:
        route: The output, as recorded from one micro-batch.
        pieces: Its tensor for each micro-batch.
        batch: How the inputs were cut.
        batch_axis: Axes that the shapes do not say; None takes the last micro-batch's.

    Raises:
        CallError: There are several micro-batches and the axis is not clear.
    """
    if len(pieces) == 1:
        return pieces[0]
    axis = output_axis(route, batch, batch_axis)
    return pieces[-1] if axis is None else torch.cat(list(pieces), axis)


def output_axis(route: OutputRoute, batch: Batch, batch_axis: BatchAxis) -> int | None:
    """Return the axis along which an output's micro-batches are put together; None: the last one stands for all.

    It is the axis that the inputs were cut along where that is as long as a micro-batch, else the only axis that is.

    Raises:
        CallError: No axis is as long as a micro-batch, or several are.
    """
    if route.name in batch_axis:
        return batch_axis[route.name]
    shape, rows = route.meta.shape, batch.rows
    fitting = [axis for axis, size in enumerate(shape) if size == rows]
    cut = {axis for axis in batch.axes if axis is not None}
    if len(cut) == 1 and cut <= set(fitting):
        return cut.pop()
    if len(fitting) == 1:
        return fitting[0]
    several = "several axes have" if fitting else "no axis has"
    message = f"Output `{route.name}` has shape {list(shape)} in a micro-batch, and {several} its {rows} rows."
    advice = f"say batch_axis={{{route.name!r}: AXIS}}, None to take the last micro-batch's, or use microbatches=1"
    raise CallError(Diagnostic("ambiguous-output", message, help=advice))


def _times(shape: tuple[int, ...], axis: int, microbatches: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * microbatches, *shape[axis + 1 :])
