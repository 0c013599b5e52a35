"""Putting the outputs of micro-batches together: along which axis, and what the whole looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import OutputRoute, TensorMeta
from ppdsl.recording.record import Recording
from ppdsl.runtime.batches.batch import unclear_output, usual_axis
from ppdsl.runtime.batches.probing import grown_axis
from ppdsl.runtime.batches.split import BatchAxis, Shape, Split
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.layout import Layout

__all__ = ["Joined", "joined_outputs", "loss_outputs"]


@dataclass(frozen=True, slots=True)
class Joined:
    """One output of the whole batch.

    Attributes:
        axis: Along which its micro-batches are put together; None: the last one stands for all.
        layout: How it lies on the wire: row-major.
    """

    axis: int | None
    layout: Layout

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole, from its tensor for each micro-batch."""
        return pieces[-1] if self.axis is None else torch.cat(list(pieces), self.axis)


def loss_outputs(compiled: Compiled) -> frozenset[int]:
    """Return the positions of the outputs that are the loss."""
    if compiled.graph.loss is None:
        return frozenset()
    results = compiled.recording.programs[compiled.graph.loss].results
    return frozenset(index for result in results if result.loss for index in result.outputs)


def joined_outputs(
    compiled: Compiled, base: Compiled, split: Split, given: BatchAxis, probe: Callable[[], Recording | None]
) -> tuple[Joined | None, ...]:
    """Return how each output is put together; None for one that is the loss.

    Args:
        compiled: What runs.
        base: What runs the example's shapes.
        split: How the inputs are cut.
        given: Axes that the user has named.
        probe: Records the example with one row more.

    Raises:
        CallError: The axis of one is not clear.
    """
    losses = loss_outputs(compiled)
    seconds: list[Recording | None] = []

    def second() -> Recording | None:
        if not seconds:
            seconds.append(probe())
        return seconds[0]

    found: list[Joined | None] = []
    for index, route in enumerate(compiled.outputs):
        if index in losses:
            found.append(None)
            continue
        shapes = [compiled.recordings[v].graph.outputs[index].meta.shape for v in compiled.variants]
        axis = None
        if split.microbatches > 1:
            axis = _axis(route, index, shapes, split, given, base, second)
        found.append(Joined(axis, _layout(route, axis, shapes)))
    return tuple(found)


def _axis(
    route: OutputRoute,
    index: int,
    shapes: Sequence[Shape],
    split: Split,
    given: BatchAxis,
    base: Compiled,
    second: Callable[[], Recording | None],
) -> int | None:
    if route.name in given:
        axis = given[route.name]
        return axis if axis is None else axis % max(1, len(route.meta.shape))
    rows = next((u * split.sizes[0] for a, u in zip(split.axes, split.units, strict=True) if a is not None), None)
    if len(set(split.sizes)) > 1:
        # Two sizes of micro-batches say it.
        axis = grown_axis(shapes[0], shapes[-1])
        if axis is None:
            raise CallError(_odd_output(route, shapes) if shapes[0] != shapes[-1] else unclear_output(route, None))
        return axis
    axis = usual_axis(route.meta.shape, rows, split.axes)
    if axis is not None:
        return axis
    other = second()
    if other is not None:
        axis = grown_axis(base.outputs[index].meta.shape, other.graph.outputs[index].meta.shape)
    if axis is None:
        raise CallError(unclear_output(route, rows))
    return axis


def _odd_output(route: OutputRoute, shapes: Sequence[Shape]) -> Diagnostic:
    message = (
        f"Output `{route.name}` has shape {list(shapes[0])} in a bigger and {list(shapes[-1])} in a smaller "
        "micro-batch, so there is no axis along which to put them together."
    )
    advice = "give batches that divide evenly, do not ask for outputs, or let the output have one axis of rows"
    return Diagnostic("ambiguous-output", message, help=advice)


def _layout(route: OutputRoute, axis: int | None, shapes: Sequence[Shape]) -> Layout:
    shape = list(shapes[-1])
    if axis is not None:
        shape[axis] = sum(one[axis] for one in shapes)
    return Layout.of(TensorMeta(tuple(shape), route.meta.dtype))
