"""The targets of a loss that is recorded at the first step: cut like the inputs of that step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording.structure import Path, Unpacked
from ppdsl.runtime.batches.split import BatchAxis, Split

__all__ = ["FirstTargets", "ways_to_cut"]

_MOST = 16


@dataclass(frozen=True, slots=True)
class FirstTargets:
    """One way to cut the targets.

    Attributes:
        names: How the targets are called.
        tensors: The first micro-batch of each.
        axes: Along which they are cut.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    axes: tuple[int | None, ...]


def ways_to_cut(
    whole: Unpacked, split: Split, inputs: Sequence[torch.Tensor], batch_axis: BatchAxis
) -> tuple[list[FirstTargets], CallError | None]:
    """Return all ways to cut the first targets, and the error to raise when more than one suits the loss.

    An axis that is as long as the rows of the batch can be the batch's.

    Args:
        whole: The targets.
        split: How the inputs are cut.
        inputs: The inputs.
        batch_axis: Axes that the user has named.

    Raises:
        CallError: A target has no such axis.
    """
    names = tuple(_target_name(path) for path in whole.paths)
    cut = next(((n, a) for n, a in enumerate(split.axes) if a is not None), None)
    if cut is None:
        tensors = tuple(leaf.detach() for leaf in whole.tensors)
        return [FirstTargets(names, tensors, (None,) * len(names))], None
    number, axis = cut
    rows, first = inputs[number].shape[axis], split.units[number] * split.sizes[0]
    options: list[list[int | None]] = []
    unclear = []
    for name, leaf in zip(names, whole.tensors, strict=True):
        found = _axes(name, leaf, rows, batch_axis)
        options.append(found)
        if len(found) != 1:
            unclear.append(_unclear(name, leaf, rows, several=bool(found)))
    error = CallError(*unclear) if unclear else None
    if error is not None and (not all(options) or _product(options) > _MOST):
        raise error
    ways = [
        FirstTargets(
            names,
            tuple(
                # A copy: the batch shall not stay in memory.
                (leaf if a is None else leaf.narrow(a, 0, first * leaf.shape[a] // rows)).detach().clone()
                for leaf, a in zip(whole.tensors, axes, strict=True)
            ),
            axes,
        )
        for axes in itertools.product(*options)
    ]
    return ways, error


def _axes(name: str, leaf: torch.Tensor, rows: int, batch_axis: BatchAxis) -> list[int | None]:
    if leaf.dim() == 0:
        return [None]
    if name in batch_axis:
        axis = batch_axis[name]
        return [axis if axis is None else axis % leaf.dim()]
    return [axis for axis, size in enumerate(leaf.shape) if size == rows]


def _product(options: Sequence[Sequence[int | None]]) -> int:
    count = 1
    for found in options:
        count *= len(found)
    return count


def _unclear(name: str, leaf: torch.Tensor, rows: int, *, several: bool) -> Diagnostic:
    shape = list(leaf.shape)
    many = "several axes have" if several else "no axis has"
    message = f"`{name}` has shape {shape}, and {many} the {rows} rows of the batch."
    advice = f"say which with batch_axis={{{name!r}: AXIS}}, or None for a tensor that every micro-batch gets whole"
    return Diagnostic("ambiguous-batch", message, help=advice)


def _target_name(path: Path) -> str:
    """Return how a user writes the way to a target, as the recorded input will be named."""
    return "targets" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)
