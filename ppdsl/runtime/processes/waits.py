"""Who waits for whom: a rank that has waited in vain learns at whom the chain of waiting ranks ends.

The one that it waited for may itself wait for another, and that one for the rank that hangs. While the main thread of
a rank waits, its watch notes that in the store, so it can be read although nobody there can answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass

from ppdsl.diagnostics import RunError
from ppdsl.runtime.processes.store import PatientStore

__all__ = ["Wait", "Waits"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits.

    Attributes:
        rank: Who.
        peer: For whom.
        text: For what ("forward of `skip`, stage 0 to 2, micro-batch 1").
    """

    rank: int
    peer: int
    text: str


class Waits:
    """The waits of one pipeline's processes.

    Args:
        store: Where notes are kept.
        rank: This process.
        timeout: Seconds that a wait may last; what lasts half of them is noted.
    """

    def __init__(self, store: PatientStore, rank: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._long = timeout / 2
        self._current: tuple[float, int, str] | None = None
        self._noted: tuple[float, int, str] | None = None

    def begin(self, peer: int, text: str) -> None:
        """Remember that the main thread waits now."""
        self._current = time.monotonic(), peer, text

    def end(self) -> None:
        """Remember that it goes on."""
        self._current = None

    def note(self) -> None:
        """Write down a long wait, and when it is over; called by the watch several times a second.

        Raises:
            RunError: The store is lost.
        """
        current = self._current
        wait = current if current is not None and time.monotonic() - current[0] > self._long else None
        if wait is not self._noted:
            self._store.set(f"waits/{self._rank}", "" if wait is None else json.dumps(wait[1:]))
            self._noted = wait

    def chain(self, peer: int) -> tuple[Wait, ...]:
        """Return who waits for whom from a rank on, until one that waits for nobody."""
        found: list[Wait] = []
        with contextlib.suppress(RunError):
            while peer not in (self._rank, *(wait.rank for wait in found)):
                key = f"waits/{peer}"
                text = self._store.get(key) if self._store.check([key]) else b""
                if not text:
                    break
                found.append(Wait(peer, *json.loads(text)))
                peer = found[-1].peer
        return tuple(found)
