"""Many names in a few words: consecutive ones become a range, equal ones a count."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fold_names", "shorten"]

_LEAST_FOLDED = 3


def fold_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names with runs folded, in order.

    Args:
        names: Dotted names, in the order of their calls.

    >>> fold_names(["embed", "h.0", "h.1", "h.2", "norm", "drop", "drop", "drop"])
    ('embed', 'h.0 .. h.2', 'norm', 'drop x3')
    """
    folded: list[str] = []
    position = 0
    while position < len(names):
        same = _run_of_equals(names, position)
        counted = _run_of_numbers(names, position)
        if counted - position >= _LEAST_FOLDED:
            folded.append(f"{names[position]} .. {names[counted - 1]}")
            position = counted
        elif same - position > 1:
            folded.append(f"{names[position]} x{same - position}")
            position = same
        else:
            folded.append(names[position])
            position += 1
    return tuple(folded)


def shorten(text: str, columns: int) -> str:
    """Return text in at most `columns` characters, its end replaced by a mark when it is longer.

    >>> shorten("encoder.layers", 8)
    'encoder…'
    """
    if len(text) <= columns:
        return text
    return text[: max(columns - 1, 0)] + "…" if columns > 0 else ""


def _run_of_equals(names: Sequence[str], first: int) -> int:
    stop = first + 1
    while stop < len(names) and names[stop] == names[first]:
        stop += 1
    return stop


def _run_of_numbers(names: Sequence[str], first: int) -> int:
    """Return where names stop that count up by one in one and the same place."""
    stop, place = first + 1, None
    while stop < len(names):
        step = _counts_up(names[stop - 1], names[stop])
        if step is None or (place is not None and step != place):
            break
        stop, place = stop + 1, step
    return stop


def _counts_up(before: str, after: str) -> int | None:
    """Return which part counts up by one from one name to the next while all others stay, or None."""
    old, new = before.split("."), after.split(".")
    if len(old) != len(new):
        return None
    different = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if len(different) != 1:
        return None
    a, b = old[different[0]], new[different[0]]
    return different[0] if a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1 else None
