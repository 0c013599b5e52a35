"""Excerpts of rows with carets below them, for findings that have no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["draw_rows"]

_SHOWN_RANKS = 8
_SHOWN_STEPS = 24
_SHOWN_WIDTH = 100


def draw_rows(
    rows: Sequence[Sequence[object]],
    marks: Mapping[int, tuple[int, str]],
    *,
    around: tuple[int, int] = (6, 4),
    only_marked: bool = False,
) -> str:
    """Return rows as a grid, with carets and a few words below the marked steps.

    Long rows are cut around the mark (`...`); of many ranks only the marked ones are drawn.

    Args:
        rows: For each rank its steps.
        marks: For each marked rank the position of the step and what to say of it; the position may be the row's end.
        around: How many steps before and after the mark are drawn of a long row.
        only_marked: Whether to leave out the other ranks also when they are few.

    >>> print(draw_rows([["0F0", "0B0"], ["1B0", "1F0"]], {1: (0, "before 1F0")}))
    rank 0 | 0F0 0B0
    rank 1 | 1B0 1F0
           | ^^^ before 1F0
    """
    centre = next((position for position, _ in marks.values()), 0)
    wide = len(str(len(rows) - 1))
    lines = []
    for rank, row in enumerate(rows):
        if rank not in marks and (only_marked or len(rows) > _SHOWN_RANKS):
            continue
        position, words = marks.get(rank, (centre, ""))
        text, column, length = _window(row, position, around)
        lines.append(f"rank {rank:>{wide}} | {text}".rstrip())
        if rank in marks:
            lines.append(f"     {'':>{wide}} | {' ' * column}{'^' * length} {words}".rstrip())
    return "\n".join(lines)


def _window(steps: Sequence[object], position: int, around: tuple[int, int]) -> tuple[str, int, int]:
    """Return the drawn part of a row, the column of the step at `position`, and its width."""
    first, last = 0, len(steps)
    if last > _SHOWN_STEPS or sum(len(str(step)) + 1 for step in steps) > _SHOWN_WIDTH:
        first, last = max(0, position - around[0]), min(last, position + around[1] + 1)
    shown = ["..."] * (first > 0) + [str(step) for step in steps[first:last]] + ["..."] * (last < len(steps))
    index = min(position - first + (first > 0), len(shown))
    column = sum(len(step) + 1 for step in shown[:index])
    length = len(shown[index]) if index < len(shown) else 1
    return " ".join(shown), column, length
