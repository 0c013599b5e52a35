"""Recording the model a second time, with one row more, to see what belongs to the batch.

An axis of an input is the batch's if the model runs with one row more along it, as the same stages, and gives one row
more. Where more than one reading of a call passes, nothing is guessed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import InputRoute, StageGraph
from ppdsl.recording import compat
from ppdsl.recording.record import Recording
from ppdsl.runtime.batches.sameness import flow_difference
from ppdsl.runtime.batches.split import Axes, Shape, units_of

__all__ = ["Record", "choose_reading", "described", "grown", "grown_axis", "passes"]

Record = Callable[[Sequence[torch.Tensor]], Recording]
"""Records the model with other tensors in place of the example's."""

_MOST = 32
"""Readings that are tried; a call with more is not clear."""


def choose_reading(base: Recording, shapes: Sequence[Shape], found: Sequence[Axes], record: Record) -> Axes:
    """Return the only reading of a call under which the model runs.

    Args:
        base: What was recorded from the example.
        shapes: Of the call's tensors.
        found: The readings.
        record: Records the model.

    Raises:
        CallError: There is none, or more than one.
    """
    routes = base.graph.inputs
    passing = [axes for axes in found if passes(base, axes, record)] if len(found) <= _MOST else list(found)
    if len(passing) == 1:
        return passing[0]
    if not passing:
        raise CallError(_no_reading(routes, shapes))
    raise CallError(_several_readings(routes, shapes, passing))


def passes(base: Recording, axes: Axes, record: Record) -> bool:
    """Whether the model runs with one row more along these axes."""
    other = grown(base, axes, record)
    if other is None or flow_difference(base.graph, other.graph) is not None:
        return False
    pairs = list(zip(base.graph.outputs, other.graph.outputs, strict=True))
    rows = [pair for pair in pairs if pair[0].meta.shape]
    return not rows or any(one.meta.shape != two.meta.shape for one, two in rows)


def grown(base: Recording, axes: Axes, record: Record) -> Recording | None:
    """Return the recording of the example with one row more; None when the model does not run with it."""
    made: dict[tuple[int, int], torch.Tensor] = {}
    leaves = []
    for leaf, axis, unit in zip(base.examples, axes, units_of(base.graph.inputs, axes), strict=True):
        if axis is None:
            leaves.append(leaf)
            continue
        if (id(leaf), axis) not in made:
            longer = torch.cat([leaf.detach(), leaf.detach().narrow(axis, 0, unit)], axis)
            made[id(leaf), axis] = longer.requires_grad_(leaf.requires_grad)
        leaves.append(made[id(leaf), axis])
    try:
        with compat.quiet_fakes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Torch's word that a loss got rows of two kinds, and makes them fit.
            warnings.filterwarnings("error", message="Using a target size")
            return record(leaves)
    except Exception:  # whatever the model says of such a batch, it does not run with it
        return None


def grown_axis(one: Shape, other: Shape) -> int | None:
    """Return the only axis along which two shapes differ, or None."""
    if len(one) != len(other):
        return None
    differ = [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 else None


def described(graph: StageGraph) -> str:
    """Return names, types and shapes of the inputs of a recording."""
    return ", ".join(f"`{route.name}` {route.meta}" for route in graph.inputs)


def _no_reading(routes: Sequence[InputRoute], shapes: Sequence[Shape]) -> Diagnostic:
    parts = [
        f"`{route.name}` has shape {list(shape)}, recorded {list(route.meta.shape)}"
        for route, shape in zip(routes, shapes, strict=True)
    ]
    message = f"There is no axis along which the model takes more rows: {', '.join(parts)}."
    advice = "give inputs like the example, say batch_axis={NAME: AXIS}, or build another pipeline for these"
    return Diagnostic("wrong-shape", message, help=advice)


def _several_readings(routes: Sequence[InputRoute], shapes: Sequence[Shape], found: Sequence[Axes]) -> Diagnostic:
    number = next(n for n in range(len(routes)) if len({axes[n] for axes in found}) > 1)
    route, shape = routes[number], shapes[number]
    axes = sorted({axes[number] for axes in found}, key=lambda axis: (axis is None, axis))
    options = [f"axis {axis} ({shape[axis]} rows)" for axis in axes if axis is not None]
    options += ["none, one tensor for every micro-batch"] if None in axes else []
    message = (
        f"Input `{route.name}` has shape {list(shape)}, recorded {list(route.meta.shape)} in a micro-batch: the axis "
        f"of its batch could be {' or '.join(options)}."
    )
    choice = ": AXIS" if axes[0] is None else f": {axes[0]}"
    advice = f"say which with batch_axis={{{route.name!r}{choice}}}; the model runs with more rows along each"
    return Diagnostic("ambiguous-batch", message, help=advice)
