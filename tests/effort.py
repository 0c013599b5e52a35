"""How much Python a call runs, counted: what a test may assert where time would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["calls_of"]


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions, Python's and built-in ones, `work` calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
