"""The store of torch.distributed, asked with patience of our own.

A call of torch's store waits for ever when the process that holds it hangs, or the way to it is cut: nothing comes
back, and nothing says so. Here each call is made by a thread that nobody waits for longer than the time-out says.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from ppdsl.diagnostics import Diagnostic, RunError

__all__ = ["PatientStore"]

_HOME = "it lives in rank 0, or in the torchrun of the first node when that started the ranks"


class PatientStore:
    """A store whose calls return within the time-out, or raise.

    After a call that got no answer all others raise at once: the thread is lost with it.

    Args:
        store: What to ask.
        rank: This process.
        patience: Seconds that a call may take.
    """

    def __init__(self, store: Store, rank: int, patience: float) -> None:
        self._store = store
        self._rank = rank
        self._patience = patience
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._begun = 0.0
        self._lost: tuple[str, str] | None = None
        self.doing = ""
        """What this rank does, for the text of an error (`before step 3`)."""

    def set(self, key: str, value: str) -> None:
        """Write a note.

        Raises:
            RunError: The store is gone, or does not answer.
        """
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return a note that is there.

        Raises:
            RunError: The store is gone, or does not answer.
        """
        found: bytes = self._ask(self._store.get, key)
        return found

    def check(self, keys: list[str]) -> bool:
        """Whether all these notes are there.

        Raises:
            RunError: The store is gone, or does not answer.
        """
        found: bool = self._ask(self._store.check, keys)
        return found

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Write a note if it is as expected; an empty one may be absent.

        Raises:
            RunError: The store is gone, or does not answer.
        """
        self._ask(self._store.compare_set, key, expected, value)

    def delete_key(self, key: str) -> None:
        """Remove a note.

        Raises:
            RunError: The store is gone, or does not answer.
        """
        self._ask(self._store.delete_key, key)

    def close(self) -> None:
        """Let the thread end when it has nothing left to do."""
        with self._starting:
            if self._thread is not None:
                self._requests.put(None)
                self._thread = None

    @property
    def lost(self) -> bool:
        """Whether the store is known not to answer."""
        return self._lost is not None

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._lost is not None:
            raise self._failure()
        self._start()
        request = _Request(call, arguments)
        self._begun = self._begun or time.monotonic()
        self._requests.put(request)
        while not request.done.acquire(timeout=max(0.001, self._remaining())):
            # Another thread's call may have been under way before; what counts is the one that gets no answer.
            if self._remaining() <= 0:
                message = "The store of torch.distributed gave no answer"
                self._lost = f"{message} within {self._patience:g} seconds", f"{_HOME}: it hangs, or the way is cut"
                raise self._failure()
        if isinstance(request.error, RuntimeError):
            self._lost = "The store of torch.distributed is gone, and with it the process that holds it", _HOME
            raise self._failure() from request.error
        if request.error is not None:
            raise request.error
        return request.result

    def _failure(self) -> RunError:
        message, advice = self._lost or ("", "")
        doing = f"; rank {self._rank} noticed {self.doing}" if self.doing else ""
        return RunError(Diagnostic("store-lost", f"{message}{doing}.", help=advice))

    def _remaining(self) -> float:
        return (self._begun or time.monotonic()) + self._patience - time.monotonic()

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ppdsl-store", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            self._begun = time.monotonic()
            try:
                request.result = request.call(*request.arguments)
            except BaseException as error:
                request.error = error
            self._begun = 0.0
            request.done.release()


class _Request:
    """One call, and what came of it."""

    __slots__ = ("arguments", "call", "done", "error", "result")

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.call = call
        self.arguments = arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = _thread.allocate_lock()
        self.done.acquire()
