"""How much of a checkpoint this process has written, told to whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

__all__ = ["CountingPlanner", "Progress"]

Progress = Callable[[int, int], None]
"""Takes the bytes that are written and the bytes in all, of this process."""


class CountingPlanner(DefaultSavePlanner):
    """Tells how far the writing is: a writer asks for a tensor just before it writes it.

    Args:
        progress: Whom to tell; it is called in the thread that writes, at first with 0 and at last with all bytes.
    """

    def __init__(self, progress: Progress | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._progress = progress
        self._written = self._total = 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this process writes, after adding it up."""
        plan = super().finish_plan(new_plan)
        self._written, self._total = 0, sum(map(_size, plan.items))
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what is written next."""
        self._tell()
        self._written += _size(write_item)
        return super().resolve_data(write_item)

    def finished(self) -> None:
        """Say that all is written."""
        self._written = self._total
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._written, self._total)


def _size(item: WriteItem) -> int:
    """Return the bytes of a tensor; what is no tensor counts nothing."""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
