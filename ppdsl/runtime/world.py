"""What a pipeline needs of its surroundings: which ranks there are, agreement, and moving a tensor between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ppdsl.plan.messages import Message, MessagePlan
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.transport import Parcel, Transport

__all__ = ["World"]


class World(Protocol):
    """All ranks of a pipeline, seen from one process."""

    def ranks_for(self, keys: int, placement: Mapping[int | str, int] | None) -> int:
        """Return how many ranks there are, for a model with that many stage keys."""

    def holds(self, rank: int) -> bool:
        """Whether `rank` lives in this process."""

    def device(self, rank: int) -> torch.device | None:
        """Return where `rank` computes; None: wherever its parameters are."""

    def agree(self, moment: str, facts: Mapping[str, str]) -> None:
        """Return when every rank has come here with the same facts.

        Raises:
            CallError: Facts differ, or another rank refused.
            RunError: A rank does not come.
        """

    def refuse(self, moment: str, error: Exception) -> None:
        """Tell the ranks that come here that this one does not go on."""

    def connect(self, plan: MessagePlan, pairs: Sequence[tuple[int, int]]) -> None:
        """Open the channels of a plan and of further ordered pairs of ranks, in the same order on every rank."""

    def transport(self, rank: int, parcels: Mapping[Message, Parcel]) -> Transport:
        """Return what carries the parcels of one plan to and from `rank`."""

    def step(self) -> AbstractContextManager[None]:
        """Return the scope of a step: whatever is raised inside ends all ranks with its text."""

    def run(self, executors: Sequence[Executor]) -> None:
        """Run the lists of this process's ranks to their ends.

        Raises:
            RunError: A rank failed.
        """

    def share(
        self, tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, device: torch.device
    ) -> torch.Tensor | None:
        """Give `source`'s tensor to `targets`; each returns it on `device`, others return None."""

    def gather(self, text: str) -> tuple[str, ...]:
        """Return the text of every process, in the order of ranks."""

    def close(self) -> None:
        """Let go of channels and threads."""
