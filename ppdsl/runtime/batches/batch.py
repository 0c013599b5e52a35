"""Cutting a call's tensors into micro-batches, and putting the outputs of micro-batches together."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import InputRoute, OutputRoute
from ppdsl.runtime.batches.recorded import check_kinds, recorded_axes
from ppdsl.runtime.batches.split import Axes, BatchAxis, Shape, Split, units_of

__all__ = [
    "Batch",
    "BatchAxis",
    "check_names",
    "cut_batch",
    "even_split",
    "join_microbatches",
    "output_axis",
    "slice_like",
    "split_batch",
    "unclear_output",
    "usual_axis",
]


@dataclass(frozen=True)
class Batch:
    """A call, cut.

    Attributes:
        microbatches: For each micro-batch the caller's tensors, in the order of the graph's inputs.
        axes: For each input the axis it was cut along; None when every micro-batch gets it whole.
        rows: Rows of the first micro-batch: the length of the first cut input along its axis; None when nothing was
            cut.
        sizes: Rows of each micro-batch, the bigger ones first; empty when nothing was cut.
    """

    microbatches: tuple[tuple[torch.Tensor, ...], ...]
    axes: Axes
    rows: int | None
    sizes: tuple[int, ...] = ()


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
    axes, findings = recorded_axes(routes, leaves, microbatches, batch_axis or {})
    findings = [*check_kinds(routes, leaves), *findings]
    if findings:
        raise CallError(*findings)
    return cut_batch(leaves, even_split(routes, axes, microbatches))


def even_split(routes: Sequence[InputRoute], axes: Axes, microbatches: int) -> Split:
    """Return the cut of a call into micro-batches like the recorded one.

    Args:
        routes: The graph's inputs, as recorded from one micro-batch.
        axes: For each input the axis it is cut along.
        microbatches: Number of micro-batches.
    """
    units = units_of(routes, axes)
    rows = next((r.meta.shape[a] // u for r, a, u in zip(routes, axes, units, strict=True) if a is not None and u), 0)
    return Split(axes, (rows,) * microbatches if rows else (), microbatches, units)


def cut_batch(leaves: Sequence[torch.Tensor], split: Split) -> Batch:
    """Cut the tensors of a call; the pieces are views of the caller's tensors.

    Args:
        leaves: The call's tensors, in the order of the graph's inputs.
        split: How.
    """
    if split.microbatches == 1:
        first = next((leaf.shape[0] for leaf in leaves if leaf.dim()), None)
        return Batch((tuple(leaves),), split.axes, first, split.sizes)
    pieces = [
        [leaf] * split.microbatches if axis is None else leaf.split([unit * size for size in split.sizes], axis)
        for leaf, axis, unit in zip(leaves, split.axes, split.units, strict=True)
    ]
    cut = tuple(zip(*pieces, strict=True)) or ((),) * split.microbatches
    first = next((u * split.sizes[0] for a, u in zip(split.axes, split.units, strict=True) if a is not None), None)
    return Batch(cut, split.axes, first, split.sizes)


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
    axis = usual_axis(route.meta.shape, batch.rows, batch.axes)
    if axis is None:
        raise CallError(unclear_output(route, batch.rows))
    return axis


def usual_axis(shape: Shape, rows: int | None, axes: Axes) -> int | None:
    """Return the axis of an output that its shape says; None when it does not.

    Args:
        shape: Of the output, in a micro-batch.
        rows: Rows of a micro-batch.
        axes: Along which the inputs were cut.
    """
    fitting = [axis for axis, size in enumerate(shape) if size == rows]
    cut = {axis for axis in axes if axis is not None}
    if len(cut) == 1 and cut <= set(fitting):
        return cut.pop()
    return fitting[0] if len(fitting) == 1 else None


def unclear_output(route: OutputRoute, rows: int | None) -> Diagnostic:
    """Return the finding about an output of which no axis is clearly the batch's.

    Args:
        route: The output.
        rows: Rows of a micro-batch; None when it has no axis that grows with them.
    """
    shape = list(route.meta.shape)
    several = "several axes have" if rows in shape else "no axis has"
    its = "rows of the batch" if rows is None else f"its {rows} rows"
    message = f"Output `{route.name}` has shape {shape} in a micro-batch, and {several} {its}."
    advice = f"say batch_axis={{{route.name!r}: AXIS}}, None to take the last micro-batch's, or use microbatches=1"
    return Diagnostic("ambiguous-output", message, help=advice)
