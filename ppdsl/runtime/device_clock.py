"""When a CUDA device computed what, read from events in its own queue: nothing waits while a step is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ppdsl.schedule.action import Action

__all__ = ["DeviceClock", "Measured"]


class Measured(NamedTuple):
    """One computation, in seconds of this process's clock (`time.perf_counter`)."""

    action: Action
    start: float
    end: float


class DeviceClock:
    """The computations of one step on one CUDA device.

    An event is reached when the device has done all that was queued before it, so a computation that waits for a
    message in the device's queue starts when that is there. The device is waited for twice: at the beginning, to know
    which moment of the process's clock its first event stands for, and when the times are read.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Action, Any, Any]] = []
        self._first = self._mark()
        torch.cuda.synchronize(device)
        self._zero = time.perf_counter()

    def run(self, action: Action, call: Callable[[int], Any], microbatch: int) -> None:
        """Queue a computation between two events."""
        start = self._mark()
        call(microbatch)
        self._marks.append((action, start, self._mark()))

    def read(self) -> list[Measured]:
        """Return the times of all computations, in their order; waits for the device."""
        torch.cuda.synchronize(self._device)
        return [Measured(action, self._at(start), self._at(end)) for action, start, end in self._marks]

    def _mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _at(self, event: Any) -> float:
        return self._zero + float(self._first.elapsed_time(event)) / 1e3
