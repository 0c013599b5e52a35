"""Parts of a split under memory limits: which division fits, and what is missing when none does.

A rank has to hold parameters and gradients of all its stages. Activations are not known yet here: they depend on the
schedule, and `expect memory` and `verify` count them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.graph.outline import ParameterInfo
from ppdsl.spec.balance import Row, divide
from ppdsl.spec.elements import Element
from ppdsl.spec.partition import SplitDecl
from ppdsl.units import counted, format_bytes

__all__ = ["Fitting", "Limits", "needed_bytes"]

Rule = Callable[[int, int], bool]

_TRIED_ONE_BY_ONE = 20_000
"""Up to so many divisions are all looked at when parts share ranks and the best one alone does not fit."""


@dataclass(frozen=True)
class Limits:
    """Memory of ranks.

    Attributes:
        parameters: By name.
        rank_limit: Bytes that each rank has, or None.
        pinned: For each rank the first names of the parameters that other stages hold there.
    """

    parameters: dict[str, ParameterInfo]
    rank_limit: int | None = None
    pinned: dict[int, frozenset[str]] | None = None

    def on(self, rank: int | None) -> frozenset[str]:
        """Return what a rank already holds."""
        return frozenset() if rank is None or self.pinned is None else self.pinned.get(rank, frozenset())


def needed_bytes(names: Iterable[str], parameters: Mapping[str, ParameterInfo], *, frozen: bool = False) -> int:
    """Return the bytes of parameters and of their gradients.

    Args:
        names: Of the parameters.
        parameters: By name.
        frozen: Whether their stage trains nothing, so that there are no gradients.
    """
    found = {parameters[name].names[0]: parameters[name] for name in names}
    return sum(parameter.bytes * (2 if parameter.trainable and not frozen else 1) for parameter in found.values())


class Fitting:
    """Divides one split under its limits."""

    def __init__(
        self,
        split: SplitDecl,
        row: Sequence[Element],
        costs: tuple[int, ...],
        limits: Limits,
        *,
        ignore_own: bool = False,
    ) -> None:
        """Take the elements in the order in which they are divided, with their costs as whole numbers."""
        self.ignore_own = ignore_own
        self.split = split
        self.row = row
        self.costs = costs
        self.limits = limits
        self.ranks = split.ranks if split.ranks else (None,) * len(split.keys)
        self.shared = len([r for r in self.ranks if r is not None]) > len({r for r in self.ranks if r is not None})

    def division(self, rule: Rule | None) -> tuple[int, ...] | None:
        """Return the ends of the best division that is allowed and fits, or None."""
        parts = len(self.split.keys)
        if self._limit is None:
            return divide(Row(self.costs, rule), parts)
        ends = divide(Row(self.costs, rule, self._last([self._room(rank) for rank in self.ranks])), parts)
        if ends is None or self._fits(ends):
            return ends
        exact = comb(len(self.row) - 1, parts - 1) <= _TRIED_ONE_BY_ONE
        return self._one_by_one(rule) if exact else self._evener(rule)

    def explain(self) -> Diagnostic:
        """Return the finding for a split of which no division fits."""
        limit = self._limit
        parts = len(self.split.keys)
        label = Label(self.split.span)
        if limit is None:
            message = f"No division of {len(self.row)} elements into {parts} parts is possible."
            return Diagnostic("does-not-fit", message, (label,))
        needed = self._smallest_limit(limit)
        message = (
            f"No division of {counted(len(self.row), 'element')} into {parts} parts fits into {format_bytes(limit)} on "
            f"each rank: parameters and gradients need at least {format_bytes(needed)}"
        )
        fuller = Fitting(self.split, self.row, self.costs, replace(self.limits, rank_limit=needed), ignore_own=True)
        loads = fuller.loads(fuller.division(None) or ())
        place, most = max(loads.items(), key=lambda item: item[1], default=("", 0))
        held = needed_bytes(self.limits.on(place), self.limits.parameters) if isinstance(place, int) else 0
        if most and isinstance(place, int):
            other = f", {format_bytes(held)} of it for other stages" if held else ""
            message += f" (then rank {place} holds {format_bytes(most)}{other})"
        elif most:
            message += f" (then `{place}` holds {format_bytes(most)})"
        help_text = f"use more parts or ranks, or set memory to {needed} bytes or more"
        return Diagnostic("does-not-fit", f"{message}.", (label,), help_text)

    def loads(self, ends: Sequence[int]) -> dict[int | str, int]:
        """Return the bytes on each rank, and of each part without one."""
        held: dict[int | str, set[str]] = {}
        for key, rank, start, end in zip(self.split.keys, self.ranks, (0, *ends), ends, strict=False):
            names = {name for element in self.row[start:end] for name in element.parameters}
            held.setdefault(str(key) if rank is None else rank, set(self.limits.on(rank))).update(names)
        return {place: needed_bytes(names, self.limits.parameters) for place, names in held.items()}

    def _smallest_limit(self, limit: int) -> int:
        """Return the smallest limit under which a division is found."""
        low, high = limit, max(limit, 1)
        while not self._can_fit(high) and high < 2**62:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._can_fit(middle) else (middle, high)
        return high

    def _can_fit(self, limit: int) -> bool:
        # Only whether it fits is asked: with equal costs that is answered at once.
        free = (0,) * len(self.row)
        other = Fitting(self.split, self.row, free, replace(self.limits, rank_limit=limit), ignore_own=True)
        return other.division(None) is not None

    @property
    def _limit(self) -> int | None:
        own = None if self.ignore_own else self.split.options.memory
        known = [x for x in (own, self.limits.rank_limit) if x is not None]
        return min(known) if known else None

    def _room(self, rank: int | None) -> tuple[int, frozenset[str]]:
        return (self._limit or 0, self.limits.on(rank))

    def _last(self, rooms: Sequence[tuple[int, frozenset[str]]]) -> tuple[tuple[int, ...], ...]:
        """Return for each part how far it may reach from each position."""
        known: dict[tuple[int, frozenset[str]], tuple[int, ...]] = {}
        for room in rooms:
            if room not in known:
                known[room] = self._furthest(*room)
        return tuple(known[room] for room in rooms)

    def _furthest(self, limit: int, held: frozenset[str]) -> tuple[int, ...]:
        """Slide a window over the row: as its start moves on, its end never moves back."""
        inside: Counter[str] = Counter(held)
        used = needed_bytes(held, self.limits.parameters)
        ends: list[int] = []
        end = 0
        for start in range(len(self.row)):
            end = max(end, start)
            while end < len(self.row):
                fresh = {name for name in self.row[end].parameters if not inside[name]}
                more = needed_bytes(fresh, self.limits.parameters)
                if used + more > limit:
                    break
                used += more
                inside.update(set(self.row[end].parameters))
                end += 1
            ends.append(end)
            if end > start:
                gone = set(self.row[start].parameters)
                inside.subtract(gone)
                used -= needed_bytes({name for name in gone if not inside[name]}, self.limits.parameters)
        return tuple(ends)

    def _fits(self, ends: Sequence[int]) -> bool:
        return max(self.loads(ends).values()) <= (self._limit or 0)

    def _evener(self, rule: Rule | None) -> tuple[int, ...] | None:
        """Parts share ranks: lower the limit of a single part until the sums on the ranks fit, too."""
        limit = self._limit or 0
        low, high, best = 0, limit, None
        for _ in range(40):
            middle = (low + high) // 2
            rooms = [
                (min(limit, middle + needed_bytes(held, self.limits.parameters)), held)
                for held in (self.limits.on(rank) for rank in self.ranks)
            ]
            ends = divide(Row(self.costs, rule, self._last(rooms)), len(self.split.keys))
            if ends is None:
                low = middle + 1
            elif self._fits(ends):
                best, low = ends, middle + 1
            else:
                high = middle
            if low >= high:
                break
        return best

    def _one_by_one(self, rule: Rule | None) -> tuple[int, ...] | None:
        size, parts = len(self.row), len(self.split.keys)
        best: tuple[int, tuple[int, ...]] | None = None
        for inner in combinations(range(1, size), parts - 1):
            ends = (*inner, size)
            pairs = list(zip((0, *inner), ends, strict=True))
            largest = max(sum(self.costs[start:end]) for start, end in pairs)
            if best is not None and largest >= best[0]:
                continue
            if (rule is None or all(rule(start, end) for start, end in pairs)) and self._fits(ends):
                best = (largest, ends)
        return None if best is None else best[1]
