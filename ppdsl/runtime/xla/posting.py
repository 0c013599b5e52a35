"""Tensors between the XLA devices of different processes: over gloo, through the memory of both hosts.

gloo would take an XLA tensor without a word and send something else, so all that it gets are copies on the CPU. To make
one, somebody has to wait until the device has computed it; a thread does, and the driver goes on.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.processes.board import Board
from ppdsl.runtime.processes.channels import Channels
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.places import Places
from ppdsl.runtime.xla.transport import Carrier, XlaMailbox

__all__ = ["HostsMailbox", "Outbox"]

_WINDOW = 8
"""Sends to one process that may be under way; no order of rounds relies on more than none."""
_LOOK = 0.2
"""Seconds between two looks at the failures of others."""
_GRACE = 1.0
"""Seconds to give the thread when a step has failed: a device ends what it has begun."""
_CPU = torch.device("cpu")


class Outbox:
    """Sends tensors to other processes when they are computed, in the order in which it gets them.

    Args:
        channels: What moves bytes.
        board: Where failures are published.
        places: Who drives which rank.
    """

    def __init__(self, channels: Channels, board: Board, places: Places) -> None:
        self._channels = channels
        self._board = board
        self._places = places
        self._requests: queue.SimpleQueue[tuple[Parcel, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way: dict[int, deque[tuple[Any, Parcel, torch.Tensor]]] = {}
        self._moved = threading.Condition()
        self._given = self._done = 0
        self._dropping = False
        self._failure: RunError | None = None

    def give(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Have a tensor sent, whose computation was started.

        Raises:
            RunError: An earlier one could not be sent.
        """
        self.raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ppdsl outbox", daemon=True)
            self._thread.start()
        under_way = self._under_way.setdefault(self._places.process_of(parcel.message.target), deque())
        self._given += 1
        self._requests.put((parcel, tensor))
        while len(under_way) > _WINDOW:
            self._finish_oldest(under_way)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            parcel, tensor = request
            try:
                if not self._dropping:
                    self._send(parcel, tensor)
            except Exception as error:
                self._failure = self._failure or _unsent(parcel, error)
                self._board.publish(self._failure)
                self._stop()
            del request, tensor
            with self._moved:
                self._done += 1
                self._moved.notify_all()

    def _send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        row = parcel.layout.wire(parcel.layout.conform(xla_adapter.host_copy(tensor)))
        target = self._places.process_of(parcel.message.target)
        work = _started(self._channels, row, self._places.own, target, parcel.index)
        self._under_way[target].append((work, parcel, row))
        if isinstance(work, _Broken):
            self._stop()

    def _stop(self) -> None:
        """Send no more, and end the driver's wait: it may be for an answer to what was not sent."""
        self._dropping = True
        self._channels.break_off()

    def _finish_oldest(self, under_way: deque[tuple[Any, Parcel, torch.Tensor]]) -> None:
        work, parcel, row = under_way[0]
        self._channels.finish(work, row, self._places.process_of(parcel.message.target), parcel.text)
        under_way.popleft()

    def drain(self) -> None:
        """Return when all that was given has left.

        Raises:
            RunError: Something could not be sent, or another process failed.
        """
        while not self._is_idle(_LOOK):
            # The thread's own wait for a device is bounded.
            self._board.raise_failure("while its devices finished the step")
        self.raise_failure()
        for under_way in self._under_way.values():
            while under_way:
                self._finish_oldest(under_way)

    def _is_idle(self, seconds: float) -> bool:
        with self._moved:
            return self._moved.wait_for(lambda: self._done == self._given, seconds)

    def raise_failure(self) -> None:
        """Raise why something could not be sent, if there is such a thing.

        Raises:
            RunError: There is.
        """
        if self._failure is not None:
            raise self._failure

    def clear(self) -> None:
        """Let nothing begin that a failed step has left; what is under way stays, as gloo may still read it."""
        self._dropping = True
        if self._is_idle(_GRACE):
            self._dropping = False

    def close(self) -> None:
        """End the thread; it is not inside torch when this returns, unless a device hangs."""
        self._dropping = True
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(_GRACE)
            self._thread = None


class _Broken:
    """Stands for the moving of bytes that could not even begin: waiting for it says why."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, _timeout: Any) -> None:
        """Raise what torch has raised.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(str(self._error)) from self._error


def _unsent(parcel: Parcel, error: Exception) -> RunError:
    if isinstance(error, RunError):
        return error
    said = str(error).strip().partition("\n")[0] or "no text"
    message = f"Rank {parcel.message.source} could not send {parcel.text}: {type(error).__name__}: {said}"
    found = RunError(Diagnostic("xla-not-sent", message, help="its device may be out of memory"))
    found.__cause__ = error
    return found


def _started(channels: Channels, row: torch.Tensor, source: int, target: int, tag: int) -> Any:
    try:
        return channels.start_apart(row, source, target, tag)
    except RuntimeError as error:
        return _Broken(error)


class HostsMailbox(XlaMailbox):
    """The transport of the ranks of one of several processes.

    Args:
        channels: What moves bytes between processes.
        board: Where failures are published.
        places: Who drives which rank.
    """

    def __init__(self, channels: Channels, board: Board, places: Places) -> None:
        super().__init__()
        self.outbox = Outbox(channels, board, places)
        self._channels = channels
        self._places = places
        self._leaving: list[tuple[Parcel, torch.Tensor]] = []
        self._coming: dict[int, tuple[Any, torch.Tensor]] = {}

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Keep `tensor` for `deliver`, or for `hand_over` when another process gets it."""
        if self._places.process_of(parcel.message.target) == self._places.own:
            super().send(parcel, tensor)
        elif parcel.layout.numel:
            self._leaving.append((parcel, tensor))

    def hand_over(self) -> None:
        """Have the tensors sent that other processes get, now that their computation was started.

        Raises:
            RunError: Something could not be sent.
        """
        leaving, self._leaving = self._leaving, []
        for parcel, tensor in leaving:
            self.outbox.give(parcel, tensor)

    def post(self, parcel: Parcel) -> None:
        """Post the receive of what another process sends, ahead of its use."""
        slot = parcel.layout.empty(_CPU)
        work = None
        if parcel.layout.numel:
            source = self._places.process_of(parcel.message.source)
            row = parcel.layout.wire(slot)
            work = _started(self._channels, row, source, self._places.own, parcel.index)
        self._coming[parcel.index] = work, slot

    def deliver(self, parcels: Sequence[Parcel], carrier: Carrier) -> None:
        """Bring parcels to their targets; waits for those that other processes send.

        Raises:
            RunError: The sender failed, is gone, or is too slow.
        """
        super().deliver([parcel for parcel in parcels if parcel.index not in self._coming], carrier)
        devices = set()
        for parcel in parcels:
            if parcel.index in self._coming:
                work, slot = self._coming.pop(parcel.index)
                if work is not None:
                    source = self._places.process_of(parcel.message.source)
                    self._channels.finish(work, slot, source, parcel.text)
                device = xla_adapter.device_of(parcel.message.target - self._places.first)
                self._there[parcel.index] = slot.to(device)
                devices.add(device)
        for device in devices:
            # Uploads now: a scalar that is not on the device yet would become a constant of the next program.
            xla_adapter.launch(device)

    def drain(self) -> None:
        """Return when all that was sent has left.

        Raises:
            RunError: Something could not be sent, or another process failed.
        """
        self.outbox.drain()

    def close(self) -> None:
        """Drop what nobody fetched; a posted receive stays, as gloo may still write to it."""
        super().close()
        self._leaving.clear()
        self.outbox.clear()
