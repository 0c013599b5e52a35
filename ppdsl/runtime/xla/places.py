"""Which process drives which rank, where several processes drive several XLA devices each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.units import counted

__all__ = ["Places"]


@dataclass(frozen=True)
class Places:
    """The ranks of all processes: those of the first process come first, in the order of its devices.

    Attributes:
        devices: How many each process has.
        own: This process.

    >>> places = Places((2, 2), own=1)
    >>> places.names, places.first, places.process_of(1), places.ranks_of(1, 3)
    (('0-1', '2-3'), 2, 0, (2,))
    """

    devices: tuple[int, ...]
    own: int

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.devices))

    @property
    def total(self) -> int:
        """How many ranks there can be."""
        return sum(self.devices)

    @property
    def first(self) -> int:
        """The rank of this process's first device."""
        return self._ends[self.own] - self.devices[self.own]

    @property
    def names(self) -> Sequence[str]:
        """What to call each process in a message: its ranks."""
        return tuple(
            str(end - 1) if count == 1 else f"{end - count}-{end - 1}"
            for end, count in zip(self._ends, self.devices, strict=True)
        )

    def process_of(self, rank: int) -> int:
        """Return the process that drives a rank.

        Raises:
            CallError: There are fewer devices.
        """
        for process, end in enumerate(self._ends):
            if rank < end:
                return process
        there = f"{len(self.devices)} processes have {counted(self.total, 'XLA device')} together"
        message = f"The pipeline has {rank + 1} ranks or more, but {there}."
        advice = f"place the stages on {counted(self.total, 'rank')}, or start with more devices"
        raise CallError(Diagnostic("xla-few-devices", message, help=advice))

    def require_all(self, ranks: int) -> None:
        """Look whether each process has a rank, and each rank a process.

        Raises:
            CallError: One has none.
        """
        self.process_of(max(0, ranks - 1))
        idle = len(self.devices) - 1
        if ranks <= self._ends[idle] - self.devices[idle]:
            message = f"The pipeline has {counted(ranks, 'rank')}, so the process of rank {self.names[idle]} has none."
            advice = "start fewer processes, or place the stages on more ranks"
            raise CallError(Diagnostic("xla-idle-process", message, help=advice))

    def ranks_of(self, process: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks that a process drives, of that many."""
        end = self._ends[process]
        return tuple(range(end - self.devices[process], min(end, ranks)))
