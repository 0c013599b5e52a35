"""All ranks in one process: the debugger's pipeline, and what every other runtime has to equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.plan.messages import Message
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.one_process import OneProcess
from ppdsl.runtime.transport import Parcel

__all__ = ["InProcessWorld", "Mailbox"]


class Mailbox:
    """A transport between ranks of one process: tensors are handed over, or copied to another device.

    Args:
        device_of: The device of each rank; None when all ranks share one.
    """

    def __init__(self, device_of: Callable[[int], torch.device | None] | None = None) -> None:
        self._device_of = device_of
        self._parcels: dict[int, torch.Tensor] = {}

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Put `tensor` where its receiver finds it."""
        device = self._device_of(parcel.message.target) if self._device_of else None
        self._parcels[parcel.index] = tensor if device is None else tensor.to(device, non_blocking=True)

    def recv(self, parcel: Parcel) -> None:
        """Do nothing: what is sent is there."""

    def ready(self, parcel: Parcel) -> bool:
        """Whether the parcel was sent."""
        return parcel.index in self._parcels

    def wait(self, parcel: Parcel) -> torch.Tensor:
        """Return the parcel's tensor."""
        return self._parcels.pop(parcel.index)

    def drain(self) -> None:
        """Do nothing: sending ends at once."""

    def close(self) -> None:
        """Drop what nobody fetched."""
        self._parcels.clear()


class InProcessWorld(OneProcess):
    """Every rank is virtual and lives here; ranks are stepped in turn, each until it has to wait.

    Args:
        devices: None (parameters stay where they are), or for each rank its device; one device stands for all ranks.
    """

    def __init__(self, devices: Sequence[torch.device] | torch.device | None = None) -> None:
        self._devices = devices
        self._mailbox = Mailbox(None if devices is None else self.device)
        super().__init__(self._mailbox)

    def ranks_for(self, keys: int, placement: Mapping[int | str, int] | None) -> int:
        """Return the ranks of the placement, one for each stage key without one."""
        if placement is None:
            return keys
        return max(1, max(placement.values(), default=0) + 1)

    def device(self, rank: int) -> torch.device | None:
        """Return the device given for `rank`; ranks beyond the last device begin again at the first."""
        if self._devices is None or isinstance(self._devices, torch.device):
            return self._devices
        return self._devices[rank % len(self._devices)]

    def transport(self, rank: int, parcels: Mapping[Message, Parcel]) -> Mailbox:
        """Return the mailbox that all ranks share."""
        return self._mailbox

    def run(self, executors: Sequence[Executor]) -> None:
        """Step the ranks in turn, in the order of their numbers, until all have reached the end of their lists.

        Raises:
            RunError: A stage failed, or every rank waits for another one.
        """
        pending = list(executors)
        while pending:
            before = sum(executor.position for executor in pending)
            after = [executor for executor in pending if not executor.advance()]
            if after and len(after) == len(pending) and before == sum(executor.position for executor in pending):
                lines = "\n".join(f"rank {executor.rank} | waits {executor.situation.text}" for executor in pending)
                message = "Every rank waits for another one, so the step cannot go on."
                raise RunError(Diagnostic("deadlock", message, excerpt=lines))
            pending = after

    def share(
        self, tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, device: torch.device
    ) -> torch.Tensor | None:
        """Return the tensor itself: source and targets are one process."""
        return None if tensor is None else tensor.to(device)
