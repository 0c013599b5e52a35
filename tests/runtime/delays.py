"""Ranks that run in a random order, and messages that take their time."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.plan.messages import Message
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.inprocess import InProcessWorld, Mailbox
from ppdsl.runtime.processes.distributed import DistributedWorld, ProcessTransport
from ppdsl.runtime.transport import Parcel

_PATIENCE = 200


class SlowMailbox(Mailbox):
    """Says that a parcel is not there yet when it is."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def ready(self, parcel: Parcel) -> bool:
        return super().ready(parcel) and self._chance.random() < 0.6


class SlowWorld(InProcessWorld):
    """Virtual ranks that take turns at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._mailbox = SlowMailbox(self._chance)

    def run(self, executors: Sequence[Executor]) -> None:
        pending, idle = list(executors), 0
        while pending:
            executor = self._chance.choice(pending)
            before = executor.position
            if executor.advance():
                pending.remove(executor)
            idle = 0 if executor.position != before or not pending else idle + 1
            if idle > _PATIENCE * len(executors):
                raise RunError(Diagnostic("deadlock", "Nothing moves any more."))


class SlowTransport(ProcessTransport):
    """Waits at random before it sends or receives."""

    chance = random.Random(0)

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        self._dawdle()
        super().send(parcel, tensor)

    def wait(self, parcel: Parcel) -> torch.Tensor:
        self._dawdle()
        return super().wait(parcel)

    def _dawdle(self) -> None:
        if self.chance.random() < 0.1:
            time.sleep(self.chance.random() * 0.003)


def slow_transport(world: DistributedWorld, rank: int, parcels: Mapping[Message, Parcel]) -> Any:
    return SlowTransport(world)
