"""A schedule as data: for each rank its actions in order."""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.schedule.action import Action

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """For each rank its computations in order; nothing about messages.

    Attributes:
        name: The family (`1f1b`), or the file it came from.
        rows: For each rank its actions.
        placement: For each stage index its rank.
        microbatches: Number of micro-batches in a step.
        forward_only: Whether the step has no backward.
        overlaps: For each rank the positions of actions that may run together with the one after them (DualPipeV's
            pairs of a forward and a backward); empty: none on any rank. Rows keep them in sequence.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    forward_only: bool = False
    overlaps: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))
