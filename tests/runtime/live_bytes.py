"""Counts the bytes that live on each virtual rank of this process, after every step of its list."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ppdsl.plan.messages import Compute, Direction, Free, Wait
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.inprocess import InProcessWorld, Mailbox
from ppdsl.runtime.transport import Parcel
from ppdsl.schedule.action import Action, ActionKind

__all__ = ["CountingWorld", "Ledger"]

SCALAR = 16
"""Bytes of what is not counted: a micro-batch's loss."""
_NOBODY = -1


class Ledger(TorchDispatchMode):
    """Notes every storage that an operator makes, for whom, and when it dies.

    Attributes:
        rank: Who runs.
        forward: Whether it runs forward, or takes a value that was sent to it.
        values: Live bytes of each rank that were made while it ran forward.
        all: Live bytes of each rank.
        peaks: The most that were alive at once of each rank, in the middle of operators' calls too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.forward = 0, False
        self.values: Counter[int] = Counter()
        self.all: Counter[int] = Counter()
        self.peaks: Counter[int] = Counter()
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in given | self._seen:
                self._note(storage)
        return result

    def _note(self, storage: Any) -> None:
        size, rank, forward, key = storage.nbytes(), self.rank, self.forward, id(storage)
        if size <= SCALAR:
            return
        self._seen.add(key)
        self._count(rank, size, forward=forward)

        def gone() -> None:
            self._seen.discard(key)
            self._count(rank, -size, forward=forward)

        weakref.finalize(storage, gone)

    def _count(self, rank: int, size: int, *, forward: bool) -> None:
        self.all[rank] += size
        self.values[rank] += size if forward else 0
        self.peaks[rank] = max(self.peaks[rank], self.all[rank])


class _CopyingMailbox(Mailbox):
    """Gives the receiver a copy, as any other transport does; what is under way belongs to nobody."""

    def __init__(self, world: CountingWorld) -> None:
        super().__init__()
        self._world = world

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        ledger = self._world.ledger
        rank, ledger.rank = ledger.rank, _NOBODY
        super().send(parcel, tensor.clone())
        ledger.rank = rank

    def wait(self, parcel: Parcel) -> torch.Tensor:
        return super().wait(parcel).clone()


class CountingWorld(InProcessWorld):
    """Virtual ranks that run one step of their lists at a time.

    Attributes:
        ledger: What lives.
        after: For each rank its actions with the bytes of forward values that live after each, and what it frees.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mailbox = _CopyingMailbox(self)
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.ledger = Ledger()
        self.after: dict[int, list[tuple[Action, int]]] = {}

    def run(self, executors: Sequence[Executor]) -> None:
        with self.ledger:
            pending = list(executors)
            while pending:
                pending = [executor for executor in pending if not self._advance(executor)]

    def _advance(self, executor: Executor) -> bool:
        """Run until it has to wait; return whether it has come to its end."""
        row = executor.plan.rows[executor.rank]
        done = self.after.setdefault(executor.rank, [])
        self.ledger.rank = executor.rank
        while executor.position < len(row):
            step = row[executor.position]
            self.ledger.forward = _is_forward(step)
            if not executor.advance(executor.position + 1):
                return False
            live = self.ledger.values[executor.rank]
            if isinstance(step, Compute):
                done.append((step.action, live))
            elif isinstance(step, Free):
                done[-1] = (done[-1][0], live)
        return True


def _is_forward(step: Any) -> bool:
    match step:
        case Compute(action):
            return action.kind is ActionKind.FORWARD
        case Wait(message):
            return message.direction is Direction.FORWARD
        case _:
            return False
