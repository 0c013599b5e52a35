"""A transport between processes: sends and receives that are under way, of one rank."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.processes.near import Arrival
from ppdsl.runtime.replicas.shards import waited
from ppdsl.runtime.transport import Parcel

if TYPE_CHECKING:
    from ppdsl.runtime.processes.distributed import DistributedWorld

__all__ = ["ProcessTransport"]

_WINDOW = 8
"""Sends to one rank that may be under way; a plan is legal even when every send waits for its receive."""


class ProcessTransport:
    """Carries the parcels of one process.

    Args:
        world: The processes.
    """

    def __init__(self, world: DistributedWorld) -> None:
        self._channels = world.channels
        self._device = world.device(world.rank) or torch.device("cpu")
        self._wire_device = torch.device("cpu") if world.staged else self._device
        # Pinned memory: half the copying, and a copy to the device that nobody waits for.
        self._pinned = world.staged and self._device.type == "cuda"
        self._near = world.channels.near
        self._sizes: dict[int, int] = {}
        self._receiving: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sending: dict[int, deque[tuple[Any, Parcel, torch.Tensor]]] = {}

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Start sending a tensor of the parcel's layout; it is kept alive until it has left.

        Raises:
            RunError: It is of a class that means more than its elements, which is all that would arrive.
        """
        tensor = tensor if type(tensor) is torch.Tensor else waited(tensor)
        if type(tensor) is not torch.Tensor:
            text = f"A {type(tensor).__name__} cannot be sent to another rank as what it is ({parcel.text})."
            advice = "let the module before the border return a plain tensor (use_local_output=True, or to_local())"
            raise RunError(Diagnostic("value-not-plain", text, help=advice))
        message = parcel.message
        size = self._near_size(parcel, message.target)
        if size < 0:
            return
        if self._wire_device != self._device:
            tensor = parcel.layout.empty(self._wire_device, pinned=self._pinned).copy_(tensor)
        if size:
            row = tensor
            work = self._near.send(message.target, parcel.index, tensor.data_ptr(), size)
            if work.left:
                return
        else:
            row = parcel.layout.wire(tensor)
            work = self._channels.start(row, message.source, message.target, parcel.index)
        queue = self._sending.setdefault(message.target, deque())
        queue.append((work, parcel, row))
        if len(queue) > _WINDOW:
            self._finish_oldest(queue)

    def recv(self, parcel: Parcel) -> None:
        """Post the receive of a parcel into a fresh tensor; what comes through a near line waits there."""
        message = parcel.message
        if self._near_size(parcel, message.source):
            return
        slot = parcel.layout.empty(self._wire_device, pinned=self._pinned)
        work = self._channels.start(parcel.layout.wire(slot), message.source, message.target, parcel.index)
        self._receiving[parcel.index] = (work, slot)

    def ready(self, parcel: Parcel) -> bool:
        """Waiting is all there is to do."""
        return True

    def wait(self, parcel: Parcel) -> torch.Tensor:
        """Return the tensor of a posted receive.

        Raises:
            RunError: The sender failed, is gone, or is too slow.
        """
        source = parcel.message.source
        size = self._near_size(parcel, source)
        if size:
            slot = parcel.layout.empty(self._wire_device, pinned=self._pinned)
            work: Any = Arrival(self._near, source, parcel.index, slot) if size > 0 else None
        else:
            work, slot = self._receiving.pop(parcel.index)
        if work is not None:
            self._channels.finish(work, slot, source, parcel.text)
        return slot if self._wire_device == self._device else slot.to(self._device, non_blocking=self._pinned)

    def drain(self) -> None:
        """Return when all that was sent has left.

        Raises:
            RunError: A receiver failed, is gone, or is too slow.
        """
        for queue in self._sending.values():
            while queue:
                self._finish_oldest(queue)

    def _near_size(self, parcel: Parcel, other: int) -> int:
        """Return the bytes of a parcel that goes through a near line, 0 for another one, -1 for one of no elements."""
        size = self._sizes.get(parcel.index)
        if size is None:
            size = parcel.layout.nbytes
            if size and not (self._wire_device.type == "cpu" and self._near.reaches(other, size)):
                size = 0
            elif not size:
                size = -1
            self._sizes[parcel.index] = size
        return size

    def _finish_oldest(self, queue: deque[tuple[Any, Parcel, torch.Tensor]]) -> None:
        work, parcel, row = queue[0]
        self._channels.finish(work, row, parcel.message.target, parcel.text)
        queue.popleft()

    def close(self) -> None:
        """Forget what is under way."""
        self._receiving.clear()
        self._sending.clear()
