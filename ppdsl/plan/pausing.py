"""Making millions of small objects at once, without looking for garbage among them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the collector of cyclic garbage; plans of large schedules are made in half the time and less.

    Steps, messages and events hold no cycles, so nothing piles up meanwhile. Usable as a decorator.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
