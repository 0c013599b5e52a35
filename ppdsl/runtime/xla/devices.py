"""All ranks of a pipeline on the XLA devices of this process: rank `r` is `xla:r`, one thread drives them all.

What a stage computes is traced, and started on its device as one program when the action ends; the driver does not wait
for it. It goes through the plan in ticks: all transfers of a tick first, then all programs.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ppdsl.plan.messages import Message
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.moving import is_xla
from ppdsl.runtime.one_process import OneProcess
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.choice import choose
from ppdsl.runtime.xla.driver import Driver
from ppdsl.runtime.xla.optimizers import start_after_optimizers
from ppdsl.runtime.xla.start import require_devices, start
from ppdsl.runtime.xla.stuck import WATCH
from ppdsl.runtime.xla.transport import XlaMailbox

__all__ = ["XlaWorld"]


class XlaWorld(OneProcess):
    """Every rank is an XLA device of this process.

    Args:
        transport: `host`, `permute`, or `auto`.
        timeout: Seconds to wait for devices after anything on them has ended.
    """

    def __init__(self, transport: str = "auto", timeout: float = math.inf) -> None:
        self._timeout = WATCH.limit = timeout
        self.devices = start()
        start_after_optimizers()
        self.choice = choose(transport, xla_adapter.device_of, self.devices)
        self._carrier = self.choice.make()
        self._mailbox = XlaMailbox()
        super().__init__(self._mailbox)
        self._drivers: weakref.WeakKeyDictionary[Executor, Driver] = weakref.WeakKeyDictionary()
        self._parcels: Mapping[Message, Parcel] = {}

    def ranks_for(self, keys: int, placement: Mapping[int | str, int] | None) -> int:
        """Return the ranks of the placement; without one as many as are wanted and there are."""
        if placement is None:
            return min(keys, self.devices)
        return max(1, max(placement.values(), default=0) + 1)

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank.

        Raises:
            CallError: There are fewer devices.
        """
        require_devices(rank + 1, self.devices)
        return xla_adapter.device_of(rank)

    def transport(self, rank: int, parcels: Mapping[Message, Parcel]) -> XlaMailbox:
        """Return the mailbox that all ranks share."""
        self._parcels = parcels
        return self._mailbox

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Leave nothing in the mailbox, however the step ends.

        Raises:
            RunError: The devices are stuck since an earlier step.
        """
        WATCH.require()
        WATCH.limit = self._timeout
        with super().step():
            yield

    def run(self, executors: Sequence[Executor]) -> None:
        """Start everything of a step, tick by tick.

        Raises:
            RunError: A stage failed.
        """
        driver = self._drivers.get(executors[0])
        if driver is None:
            parcels = self._parcels
            carrier = self.choice.make()
            carrier.plan(parcels.values())
            driver = self._drivers[executors[0]] = Driver(executors, parcels, self._mailbox, carrier, self._move)
        driver.step()

    def share(
        self, tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, device: torch.device
    ) -> torch.Tensor | None:
        """Return the tensor on `device`: source and targets are one process."""
        return None if tensor is None else self._move(tensor, device)

    def _move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device or not is_xla(device) or not is_xla(tensor.device):
            return tensor.to(device)
        return self._carrier.move(tensor, device)

    def explain(self) -> dict[str, Any]:
        """Return what moves tensors and why, and what the stages' programs were found to do."""
        said = dict.fromkeys(text for driver in self._drivers.values() for text in driver.programs.warnings)
        transport = {"name": self.choice.name, "reason": self.choice.reason}
        return {"devices": f"{self.devices} {xla_adapter.device_kind()}", "transport": transport, "xla": list(said)}
