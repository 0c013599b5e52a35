"""Reading a call whose shapes differ from the example's: which axes are the batch's, and how many rows there are.

An axis is known when `batch_axis` names it or an earlier call has shown it. Otherwise every reading is listed that
explains the shapes of the call, and the model decides between them (`runtime.probing`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import InputRoute
from ppdsl.runtime.batches.split import Axes, BatchAxis, Shape, Split, near_equal, units_of

__all__ = ["check_rows", "like_the_example", "readings", "split_along"]


def check_rows(routes: Sequence[InputRoute], shapes: Sequence[Shape]) -> None:
    """Refuse tensors without elements.

    Raises:
        CallError: There is one that was recorded with elements.
    """
    findings = [
        Diagnostic(
            "empty-batch",
            f"Input `{route.name}` has shape {list(shape)}: it is empty, so there is nothing to run.",
            help="leave out batches without rows",
        )
        for route, shape in zip(routes, shapes, strict=True)
        if 0 in shape and 0 not in route.meta.shape
    ]
    if findings:
        raise CallError(*findings)


def split_along(routes: Sequence[InputRoute], shapes: Sequence[Shape], axes: Axes, microbatches: int) -> Split:
    """Return how a call is cut along known axes into near-equal micro-batches; fewer of them when there are fewer rows.

    Args:
        routes: The graph's inputs, as recorded from one micro-batch.
        shapes: Of the call's tensors.
        axes: The axes.
        microbatches: Micro-batches of a step.

    Raises:
        CallError: Inputs have different numbers of rows.
    """
    units = units_of(routes, axes)
    rows = {
        Fraction(shape[axis], unit) for shape, axis, unit in zip(shapes, axes, units, strict=True) if axis is not None
    }
    if microbatches == 1 or not rows:
        return Split((None,) * len(axes), (), microbatches, (0,) * len(axes))
    count = rows.pop()
    if rows or count.denominator > 1:
        raise CallError(_different_rows(routes, shapes, axes, units))
    sizes = near_equal(int(count), min(microbatches, int(count)))
    return Split(axes, sizes, len(sizes), units)


def _different_rows(
    routes: Sequence[InputRoute], shapes: Sequence[Shape], axes: Axes, units: Sequence[int]
) -> Diagnostic:
    parts = []
    for route, shape, axis, unit in zip(routes, shapes, axes, units, strict=True):
        if axis is not None:
            each = f" (recorded with {unit} for each of the batch)" if unit > 1 else ""
            parts.append(f"`{route.name}` has {shape[axis]}{each}")
    message = f"Inputs have different numbers of rows: {', '.join(parts)}."
    return Diagnostic("rows-differ", message, help="give every input and target the same rows of the batch")


def like_the_example(
    routes: Sequence[InputRoute], shapes: Sequence[Shape], known: BatchAxis, microbatches: int
) -> Axes | None:
    """Return the axes of a call that gives micro-batches like the recorded one, but for a row; None for another call.

    Each input must be as recorded or differ from it along one axis, and a near-equal cut along these axes must give
    the recorded shapes again, in its bigger or in its smaller micro-batches.
    """
    axes: list[int | None] = []
    for route, shape in zip(routes, shapes, strict=True):
        differ = [axis for axis, (a, b) in enumerate(zip(shape, route.meta.shape, strict=True)) if a != b]
        if len(differ) > 1:
            return None
        if route.name in known:
            axis = known[route.name]
            axes.append(None if axis is None else axis % len(shape))
        else:
            axes.append(differ[0] if differ else None)
    try:
        split = split_along(routes, shapes, tuple(axes), microbatches)
    except CallError:
        return None
    recorded = tuple(route.meta.shape for route in routes)
    if not split.sizes or split.microbatches < microbatches:
        return None
    return tuple(axes) if recorded in (split.shapes(shapes, 0), split.shapes(shapes, -1)) else None


def readings(routes: Sequence[InputRoute], shapes: Sequence[Shape], known: BatchAxis) -> list[Axes]:
    """Return all ways to read a call: what is cut has grown alike from the example to the call, in all inputs.

    Args:
        routes: The graph's inputs, as recorded from one micro-batch.
        shapes: Of the call's tensors, with as many axes.
        known: Axes that are known, by name.
    """
    grown: dict[Fraction, list[list[int | None]]] = {}
    for number, (route, shape) in enumerate(zip(routes, shapes, strict=True)):
        for axis in _possible(route, known):
            ratio = Fraction(shape[axis], route.meta.shape[axis])
            grown.setdefault(ratio, [[] for _ in routes])[number].append(axis)
    found: list[Axes] = []
    for options in grown.values():
        choices = []
        for route, axes in zip(routes, options, strict=True):
            fixed = known.get(route.name) is not None
            choices.append(axes if fixed else [*axes, None])
        found += [reading for reading in itertools.product(*choices) if any(axis is not None for axis in reading)]
    return found


def _possible(route: InputRoute, known: BatchAxis) -> list[int]:
    sizes = route.meta.shape
    if route.name in known:
        axis = known[route.name]
        return [] if axis is None else [axis % len(sizes)]
    return [axis for axis, size in enumerate(sizes) if size]
