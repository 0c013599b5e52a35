"""The data flow between elements: an order that keeps branches together, and which ranges may be one part.

A part must not turn branches that run beside each other into a chain::

        ┌─ b ─ c ─┐
    a ──┤         ├── f        {b, c} may be a part, {c, d} may not: e would wait for c.
        └─ d ─ e ─┘

So whatever waits for one element of a part has to wait for all of them anyway, and the elements of a part wait for the
same things before it; elements that cost next to nothing may be made to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Flow", "branch_order", "is_chain", "range_rule"]

_NEXT_TO_NOTHING = 0.05
"""Share of an equal part's cost up to which elements may be made to wait for what they do not need."""


@dataclass(frozen=True)
class Flow:
    """Which elements need which.

    Attributes:
        needs: For each element the elements before it that it needs, directly or through steps outside of all elements.
    """

    needs: tuple[frozenset[int], ...]


def branch_order(flow: Flow) -> tuple[int, ...]:
    """Return a topological order in which a branch is finished before another is begun.

    >>> branch_order(Flow((frozenset(), frozenset(), frozenset({0}), frozenset({1}), frozenset({2, 3}))))
    (0, 2, 1, 3, 4)
    """
    size = len(flow.needs)
    users: list[list[int]] = [[] for _ in range(size)]
    missing = [len(needs) for needs in flow.needs]
    for element, needs in enumerate(flow.needs):
        for need in needs:
            users[need].append(element)
    ready = [element for element in range(size - 1, -1, -1) if not missing[element]]
    order: list[int] = []
    while ready:
        element = ready.pop()
        order.append(element)
        freed = []
        for user in users[element]:
            missing[user] -= 1
            if not missing[user]:
                freed.append(user)
        ready += sorted(freed, reverse=True)
    return tuple(order)


def is_chain(ends: Sequence[int], flow: Flow) -> bool:
    """Return whether every part waits for the part before it.

    >>> is_chain((1, 2, 3), Flow((frozenset(), frozenset(), frozenset({0, 1}))))
    False
    """
    part_of = [part for part, (start, end) in enumerate(zip((0, *ends), ends, strict=False)) for _ in range(start, end)]
    needs: list[set[int]] = [set() for _ in ends]
    for element, own in enumerate(flow.needs):
        needs[part_of[element]] |= {part_of[need] for need in own} - {part_of[element]}
    return all(part - 1 in needs[part] for part in range(1, len(ends)))


def range_rule(flow: Flow, weights: Sequence[float], parts: int) -> Callable[[int, int], bool] | None:
    """Return whether a range of elements (half-open) may be one part; None when every range may.

    Args:
        flow: The elements in the order in which they are divided.
        weights: What each element costs to run.
        parts: Number of parts.
    """
    size = len(flow.needs)
    if all(element - 1 in flow.needs[element] for element in range(1, size)):
        return None
    before = _reach(flow.needs)  # of each element all that it waits for, as bits
    after = [0] * size
    for element in range(size - 1, -1, -1):
        after[element] |= 1 << element
        for need in flow.needs[element]:
            after[need] |= after[element]
    light = _NEXT_TO_NOTHING * sum(weights) / parts

    def allowed(start: int, end: int) -> bool:
        inside = ((1 << end) - 1) ^ ((1 << start) - 1)
        some, every, needed = 0, -1, 0
        for element in range(start, end):
            some |= after[element]
            every &= after[element] | inside
            needed |= before[element]
        if some & ~inside != every & ~inside & ((1 << size) - 1):
            return False
        needed &= ~inside
        delayed = sum(weights[element] for element in range(start, end) if needed & ~before[element])
        return delayed <= light

    return allowed


def _reach(needs: Sequence[frozenset[int]]) -> list[int]:
    found: list[int] = []
    for element, own in enumerate(needs):
        bits = 1 << element
        for need in own:
            bits |= found[need]
        found.append(bits)
    return found
