"""How the tensors of a call are cut into micro-batches, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppdsl.graph.ir import InputRoute

__all__ = ["Axes", "BatchAxis", "Shape", "Split", "near_equal", "units_of"]

BatchAxis = Mapping[str, int | None]
"""Name of an input or output -> the axis of its batch; None: the same for every micro-batch."""

Axes = tuple[int | None, ...]
"""For each input the axis of its batch; None: every micro-batch gets it whole."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A cut of a call.

    Attributes:
        axes: For each input the axis it is cut along; None when every micro-batch gets it whole.
        sizes: Rows of each micro-batch, the bigger ones first; empty when nothing is cut.
        microbatches: Number of micro-batches.
        units: For each input how many of its rows belong to one row of the batch (two, where it holds pairs); 0 when
            it is given whole.
    """

    axes: Axes
    sizes: tuple[int, ...]
    microbatches: int
    units: tuple[int, ...]

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None when nothing is cut."""
        return sum(self.sizes) if self.sizes else None

    @property
    def variants(self) -> tuple[int, ...]:
        """For each micro-batch which of the distinct sizes it has: 0 for the bigger ones."""
        return tuple(int(size != self.sizes[0]) for size in self.sizes) or (0,) * self.microbatches

    def shapes(self, whole: Sequence[Shape], microbatch: int) -> tuple[Shape, ...]:
        """Return the shapes of one micro-batch's tensors.

        Args:
            whole: The shapes of the call's tensors.
            microbatch: Which one.
        """
        return tuple(
            shape if axis is None else (*shape[:axis], unit * self.sizes[microbatch], *shape[axis + 1 :])
            for shape, axis, unit in zip(whole, self.axes, self.units, strict=True)
        )


def near_equal(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that differ by one row at most, the bigger ones first.

    >>> near_equal(10, 4), near_equal(8, 4)
    ((3, 3, 2, 2), (2, 2, 2, 2))
    """
    size, more = divmod(rows, parts)
    return (size + 1,) * more + (size,) * (parts - more)


def units_of(routes: Sequence[InputRoute], axes: Axes) -> tuple[int, ...]:
    """Return for each input how many of its rows belong to one row of the batch; 0 for what is given whole.

    Inputs may have different numbers of rows, such as pairs, two rows for each row of another one.
    """
    lengths = [0 if axis is None else route.meta.shape[axis] for route, axis in zip(routes, axes, strict=True)]
    unit = max(1, math.gcd(*lengths))
    return tuple(length // unit for length in lengths)
