"""Many names in a few words: consecutive ones become a range, equal ones a count."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fold_names", "join_names", "shorten"]

_LEAST_FOLDED = 3


def fold_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names with runs folded, in order.

    Args:
        names: Dotted names, in the order of their calls.

    >>> fold_names(["embed", "h.0", "h.1", "h.2", "norm", "drop", "drop", "drop"])
    ('embed', 'h.0 .. h.2', 'norm', 'drop x3')
    >>> fold_names(["model.h.0", "model.h.1", "model.h.2"])
    ('model.h.0 .. h.2',)
    """
    folded: list[str] = []
    position = 0
    while position < len(names):
        same = _run_of_equals(names, position)
        counted = _run_of_numbers(names, position)
        if counted - position >= _LEAST_FOLDED:
            folded.append(f"{names[position]} .. {_from_number(names[position], names[counted - 1])}")
            position = counted
        elif same - position > 1:
            folded.append(f"{names[position]} x{same - position}")
            position = same
        else:
            folded.append(names[position])
            position += 1
    return tuple(folded)


def join_names(names: Sequence[str], columns: int) -> str:
    """Return folded names in one line; when they do not fit, what they have in common is said once.

    Args:
        names: Dotted names, in the order of their calls.
        columns: Where a line becomes too long; what is still longer is left to the caller.

    >>> join_names(["model.embed", "model.drop", "model.h.0", "head"], columns=80)
    'model.embed, model.drop, model.h.0, head'
    >>> join_names(["model.embed", "model.drop", "model.h.0", "head"], columns=32)
    'model.{embed, drop, h.0}, head'
    """
    folded = fold_names(names)
    plain = ", ".join(folded)
    if len(plain) <= columns:
        return plain
    groups: list[tuple[str, list[str]]] = []
    for name in folded:
        first, dot, rest = name.partition(".")
        prefix, rest = (first, rest) if dot and not rest.startswith(".") else ("", name)
        if groups and groups[-1][0] == prefix:
            groups[-1][1].append(rest)
        else:
            groups.append((prefix, [rest]))
    return ", ".join(_group(prefix, members) for prefix, members in groups)


def shorten(text: str, columns: int) -> str:
    """Return text in at most `columns` characters, its end replaced by a mark when it is longer.

    >>> shorten("encoder.layers", 8)
    'encoder…'
    """
    if len(text) <= columns:
        return text
    return text[: max(columns - 1, 0)] + "…" if columns > 0 else ""


def _group(prefix: str, members: Sequence[str]) -> str:
    if not prefix:
        return ", ".join(members)
    return f"{prefix}.{members[0]}" if len(members) == 1 else f"{prefix}.{{{', '.join(members)}}}"


def _from_number(first: str, last: str) -> str:
    """Return the last name of a run without what it has in common with the first, up to the part before the number."""
    old, new = first.split("."), last.split(".")
    differs = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return ".".join(new[max(differs - 1, 0) :])


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
