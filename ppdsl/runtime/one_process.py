"""What a world is when all its ranks live in one process: nobody to agree with, and one mailbox for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ppdsl.plan.messages import MessagePlan

__all__ = ["OneProcess"]


class _Box(Protocol):
    def close(self) -> None:
        """Drop what nobody fetched."""


class OneProcess:
    """The part of a `World` that does not depend on where the ranks of this process compute.

    Args:
        mailbox: Where ranks leave tensors for each other.
    """

    def __init__(self, mailbox: _Box) -> None:
        self._box = mailbox

    def holds(self, rank: int) -> bool:
        """Every rank lives here."""
        return rank >= 0

    def agree(self, moment: str, facts: Mapping[str, str]) -> None:
        """Return at once: there is nobody to disagree."""

    def refuse(self, moment: str, error: Exception) -> None:
        """Do nothing: there is nobody to tell."""

    def connect(self, plan: MessagePlan, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing: ranks of one process need no channels."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Leave nothing in the mailbox, however the step ends."""
        try:
            yield
        finally:
            self._box.close()

    def gather(self, text: str) -> tuple[str, ...]:
        """Return the text of this process, the only one."""
        return (text,)

    def close(self) -> None:
        """Drop what nobody fetched."""
        self._box.close()
