"""Are the XLA devices of this process stuck? One thread looks; whoever waits for them is told, and so is who does not.

Devices that run a collective wait for each other. One that never comes keeps the others, and a thread inside torch_xla
cannot be interrupted; XLA's CPU client then ends the process, 15 seconds after the first of them came. So this module
counts which programs have ended. When none has for too long it asks each device for an answer, and what it finds
becomes one error, raised where Python waits (`bounded_wait`).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ppdsl.diagnostics import Diagnostic, RunError, render_plain
from ppdsl.units import counted

__all__ = ["INSIDE", "WATCH", "Waiter", "Watch"]

PATIENCE = 9.0
"""Seconds in which nothing ends while devices wait for each other; the CPU client ends the process after 15."""
_PROBE = 1.0
"""Seconds that a device has to answer in."""
_UNHEARD = 2.0
"""Seconds in which somebody has to raise the error; then it is written, and the process ended."""
_INTERVAL = 0.5

INSIDE = threading.local()
"""`INSIDE.here` is set in threads whose calls of torch_xla nobody has to bound."""


class Waiter(Protocol):
    """Somebody who waits for torch_xla.

    Attributes:
        begun: Since when (`time.monotonic`).
        waits: Whether for a device, so that time counts.
    """

    begun: float
    waits: bool

    def wake(self) -> None:
        """Let it find the error."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A program that all devices have to run.

    Attributes:
        text: What it is, to begin a sentence.
        begun: When it was started.
        due: How many programs have ended when it has.
    """

    text: str
    begun: float
    due: int


class Watch:
    """What is known of the devices of this process.

    Attributes:
        limit: Seconds to wait for devices that do not wait for each other.
        error: Why nothing runs on them any more, or None.
        heard: Whether somebody raises it.
    """

    def __init__(self) -> None:
        self.limit = math.inf
        self.error: Diagnostic | None = None
        self.heard = False
        self._waiters: set[Waiter] = set()
        self._transfers: deque[_Transfer] = deque()
        self._last: dict[str, str] = {}
        self._extra = 0
        self._asked: dict[int, threading.Thread] = {}
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- told by those who use the devices

    def enter(self, waiter: Waiter) -> None:
        """Take notice of somebody who begins to wait.

        Raises:
            RunError: It would be in vain.
        """
        self.require()
        self._waiters.add(waiter)
        self._wake()

    def leave(self, waiter: Waiter) -> None:
        """Take notice that it waits no longer."""
        self._waiters.discard(waiter)

    def transfer(self, text: str, programs: int) -> None:
        """Take notice that a program is about to be started on each device, and each will wait for the others.

        Args:
            text: What it is, to begin a sentence.
            programs: On how many devices.
        """
        self.require()
        self._transfers.append(_Transfer(text, time.monotonic(), _adapter().launched() + programs))
        self._wake()

    def started(self, device: str, name: str) -> None:
        """Take notice of the program that a device got last."""
        self._last[device] = name

    def require(self) -> None:
        """Return when devices can be used.

        Raises:
            RunError: They are stuck.
        """
        if self.error is not None:
            self.heard = True
            raise RunError(self.error)

    # ---------------------------------------------------------------- the thread that looks

    def _wake(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    atexit.register(self._leave_process)
                    self._thread = threading.Thread(target=self._look, name="ppdsl xla watch", daemon=True)
                    self._thread.start()
        if not self._changed.is_set():
            self._changed.set()

    def _look(self) -> None:
        INSIDE.here = True
        ended, since = -1, time.monotonic()
        while self.error is None:
            if not self._waiters and not self._transfers:
                self._changed.clear()
                if not self._waiters and not self._transfers:
                    self._changed.wait()
                    # What ran without being counted as started, by torch.compile say, is no progress of a transfer.
                    self._extra = max(self._extra, _adapter().finished() - _adapter().launched())
            time.sleep(_INTERVAL)
            now, count = time.monotonic(), _adapter().finished()
            if count != ended:
                ended, since = count, now
            self._judge(now, since, self._under_way(count))
        time.sleep(_UNHEARD)
        if not self.heard:
            self._write()
            _end_process()

    def _under_way(self, count: int) -> _Transfer | None:
        """Return the first transfer that has not ended when `count` programs have."""
        with self._lock:
            while self._transfers and self._transfers[0].due + self._extra <= count:
                self._transfers.popleft()
            return self._transfers[0] if self._transfers else None

    def _judge(self, now: float, since: float, transfer: _Transfer | None) -> None:
        if transfer is not None and _waits_for_each_other():
            quiet = now - max(since, transfer.begun)
            if quiet >= min(PATIENCE, self.limit):
                silent = self._silent()
                if silent:
                    self._declare(transfer.text, quiet + _PROBE, silent, together=True)
                else:
                    self._extra = max(self._extra, _adapter().finished() - _adapter().launched())
                    self._transfers.clear()
                return
        begun = [waiter.begun for waiter in tuple(self._waiters) if waiter.waits]
        quiet = now - max(since, min(begun)) if begun else 0.0
        if quiet >= self.limit:
            silent = self._silent()
            if silent:  # otherwise a program is being compiled
                self._declare("What was started on XLA devices", quiet, silent, together=False)

    def _silent(self) -> list[int]:
        """Return the devices that do not answer; one that has nothing to do answers at once."""
        adapter = _adapter()
        for position in range(adapter.device_count()):
            if position not in self._asked or not self._asked[position].is_alive():
                thread = threading.Thread(target=_ask, args=(position,), name=f"ppdsl xla:{position}?", daemon=True)
                self._asked[position] = thread
                thread.start()
        ends = time.monotonic() + _PROBE
        for thread in self._asked.values():
            thread.join(max(ends - time.monotonic(), 0.01))
        return [position for position, thread in self._asked.items() if thread.is_alive()]

    def _declare(self, text: str, seconds: float, silent: Sequence[int], *, together: bool) -> None:
        devices = _adapter().device_count()
        names = " and ".join(filter(None, (", ".join(map(_name, silent[:-1])), *map(_name, silent[-1:]))))
        answer = f"{names} {'does' if len(silent) == 1 else 'do'} not answer"
        rows = []
        for position in range(devices):
            last = self._last.get(_name(position), "")
            says = "does not answer" if position in silent else "answers"
            rows.append(f"{_name(position)} | {says}{f' | last started: {last}' if last else ''}")
        message = f"{text} did not end: no program has ended for {seconds:.0f} seconds, and {answer}."
        remedy = _remedy(devices, left_out=together and len(silent) < devices, together=together)
        help_text = f"{remedy}; start the process again, as nothing runs on its XLA devices any more"
        self.error = Diagnostic("xla-stuck", message, help=help_text, excerpt="\n".join(rows))
        for waiter in tuple(self._waiters):
            self.heard = True
            waiter.wake()

    # ---------------------------------------------------------------- the end of the process

    def _write(self) -> None:
        """Write the error, and where the main thread is: inside torch_xla, where no error can be raised."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
        where = "".join(traceback.format_stack(frame)) if frame is not None else ""
        if self.error is not None:
            sys.stderr.write(f"The main thread waits here:\n{where}{render_plain([self.error])}\n")

    def _leave_process(self) -> None:
        """End the process without torch_xla, which would wait for its devices, and keep Python from running."""
        while self.error is None and self._thread is not None and self._thread.is_alive():
            if self._under_way(_adapter().finished()) is None:
                break
            time.sleep(0.02)
        if self.error is not None:
            if not self.heard:
                self._write()
            _end_process()


def _end_process() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _name(position: int) -> str:
    return f"xla:{position}"


def _ask(position: int) -> None:
    INSIDE.here = True
    _adapter().wait([_adapter().device_of(position)])


def _waits_for_each_other() -> bool:
    """Whether a collective is given up by XLA itself, and its process with it."""
    return bool(_adapter().device_kind() == "CPU")


def _remedy(devices: int, *, left_out: bool, together: bool) -> str:
    threads = int(os.environ.get("XLA_THREAD_POOL_SIZE") or os.cpu_count() or 1)
    if _waits_for_each_other() and threads < devices:
        return f"set XLA_THREAD_POOL_SIZE={devices}: {counted(threads, 'thread')} cannot run {devices} devices at once"
    if "xla_tpu_use_enhanced_launch_barrier=true" in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return "take xla_tpu_use_enhanced_launch_barrier=true out of LIBTPU_INIT_ARGS"
    if left_out:
        return "start each collective on all devices"
    if together:
        return 'look for a stage that never ends, or give transport="host", where no device waits for another'
    return "look for a stage that never ends, or give a longer timeout="


def _adapter() -> Any:
    from ppdsl.runtime.xla import adapter  # which bounds its own calls by this module

    return adapter


WATCH = Watch()
"""Of this process: torch_xla has one runtime for all its threads and pipelines."""
