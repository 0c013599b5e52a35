"""The best division of a row of costs into parts: the largest part as small as can be.

Parametric search: the bound on a part is bisected, and for each bound it is worked out which numbers of parts can cover
each end of the row. Costs become whole numbers first, so that the search ends at the optimum and not near it. Among
optimal divisions the one is taken in which, from left to right, each part comes as near as possible to an equal share
of what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Row", "divide", "whole_numbers"]

_DIGITS = 2**53
"""What costs that are no whole numbers add up to when they are made whole: as fine as a float is."""


@dataclass(frozen=True)
class Row:
    """A row of elements that is to be divided.

    Attributes:
        costs: Of each element, whole numbers from 0.
        allowed: Whether the elements from a position up to another (half-open) may be one part; None: all may.
        last: For each part the furthest end of a part that begins at each position, by memory; None: no limit.
    """

    costs: tuple[int, ...]
    allowed: Callable[[int, int], bool] | None = None
    last: tuple[tuple[int, ...], ...] | None = None


def whole_numbers(costs: Sequence[float]) -> tuple[int, ...]:
    """Return costs as whole numbers with the same proportions.

    >>> whole_numbers([1.0, 2.0])
    (1, 2)
    """
    if all(float(cost).is_integer() for cost in costs):
        return tuple(int(cost) for cost in costs)
    total = sum(costs)
    return tuple(round(cost / total * _DIGITS) for cost in costs)


def divide(row: Row, parts: int) -> tuple[int, ...] | None:
    """Return where the parts of the best division end, or None when no division is allowed.

    Args:
        row: The elements.
        parts: Number of parts, each with at least one element.

    >>> divide(Row((3, 1, 1, 1, 2)), parts=3)
    (1, 3, 5)
    """
    if not 1 <= parts <= len(row.costs):
        return None
    search = _Search(row, parts)
    bound = search.smallest_bound()
    return None if bound is None else search.division(bound)


class _Search:
    def __init__(self, row: Row, parts: int) -> None:
        self.row = row
        self.parts = parts
        self.size = len(row.costs)
        self.sums = [0, *accumulate(row.costs)]
        # One limit for all parts bounds each of them; different ones depend on which part begins where.
        self.same = row.last is None or len(set(row.last)) == 1
        self.plain = row.allowed is None and self.same
        self.limits: dict[tuple[int, ...], int] = {}  # for each limit the parts that have it, counted from the end
        for part, last in enumerate(row.last or ()):
            self.limits[last] = self.limits.get(last, 0) | 1 << (parts - part)
        self.known: dict[tuple[int, int], bool] = {}

    def smallest_bound(self) -> int | None:
        """Return the smallest possible largest part."""
        low = max(max(self.row.costs), -(-self.sums[-1] // self.parts))
        if self.fits(low):
            return low
        # A few steps up from below: the optimum is most often near, and long parts are slow to look at.
        high, step = low, max(1, low // 64)
        while high < self.sums[-1]:
            low, high, step = high, min(high + step, self.sums[-1]), step * 2
            if self.fits(high):
                break
        else:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(middle) else (middle, high)
        return high

    def fits(self, bound: int) -> bool:
        """Return whether the row can be covered with parts of at most `bound`."""
        if self.plain:
            return self._fewest(bound)[0] <= self.parts
        return bool(self._rests(bound)[0] >> self.parts & 1)

    def division(self, bound: int) -> tuple[int, ...]:
        """Return the ends of the evenest division under a bound that fits."""
        fewest = self._fewest(bound) if self.plain else []
        rests = [] if self.plain else self._rests(bound)
        ends: list[int] = []
        start = 0
        for part in range(self.parts):
            left = self.parts - part - 1

            def can_follow(end: int, left: int = left) -> bool:
                if self.plain:
                    return fewest[end] <= left <= self.size - end
                return bool(rests[end] >> left & 1)

            share = (self.sums[-1] - self.sums[start]) / (left + 1)
            possible = [end for end in self._ends(start, part, bound) if can_follow(end)]
            start = min(possible, key=lambda end: (abs(self.sums[end] - self.sums[start] - share), end))
            ends.append(start)
        return tuple(ends)

    def _fewest(self, bound: int) -> list[int]:
        """Return for each position the fewest parts that cover the row from there; for rows without other rules.

        Any larger number of parts, up to one for each element, covers it then as well.
        """
        many = self.size + 1
        fewest = [many] * self.size + [0]
        for start in range(self.size - 1, -1, -1):
            end = self._furthest(start, 0, bound)
            fewest[start] = min(many, fewest[end] + 1) if end > start else many
        return fewest

    def _rests(self, bound: int) -> list[int]:
        """Return for each position the numbers of parts that can cover the row from there, as bits.

        Which part begins at a position is known from how many follow, so limits of single parts are respected.
        """
        rests = [0] * self.size + [1]
        whole = (1 << (self.parts + 1)) - 1
        for start in range(self.size - 1, -1, -1):
            bits = 0
            for end in range(start + 1, self._furthest(start, None, bound) + 1):
                if rests[end] and self._is_allowed(start, end):
                    bits |= (rests[end] << 1) & self._parts_up_to(start, end)
            rests[start] = bits & whole
        return rests

    def _parts_up_to(self, start: int, end: int) -> int:
        """Return the numbers of parts left, this one included, for which memory lets the part reach `end`, as bits."""
        if self.same or self.row.last is None:
            return -1
        bits = 0
        for last, parts in self.limits.items():
            if last[start] >= end:
                bits |= parts
        return bits

    def _ends(self, start: int, part: int, bound: int) -> list[int]:
        ends = range(start + 1, self._furthest(start, part, bound) + 1)
        return [end for end in ends if self._is_allowed(start, end)]

    def _furthest(self, start: int, part: int | None, bound: int) -> int:
        end = bisect_right(self.sums, self.sums[start] + bound) - 1
        if self.row.last is None:
            return end
        if part is None:
            return min(end, max(last[start] for last in self.limits))
        return min(end, self.row.last[part][start])

    def _is_allowed(self, start: int, end: int) -> bool:
        if self.row.allowed is None or end - start == 1:
            return True
        found = self.known.get((start, end))
        if found is None:
            found = self.known[start, end] = self.row.allowed(start, end)
        return found
