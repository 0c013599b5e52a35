"""A thread that ends a wait of the main thread when another rank has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ppdsl.diagnostics import RunError
from ppdsl.runtime.processes.board import Board

__all__ = ["Watch"]


class Watch:
    """Looks for failures of other ranks while a step runs, and notes a long wait of its own, several times a second.

    Between steps its thread sleeps in a lock, so that it never stands inside torch when the interpreter ends.

    Args:
        board: Where failures are published.
        interrupt: Gives the function that makes a pending wait of the main thread end; None when nobody waits any more.
    """

    def __init__(self, board: Board, interrupt: Callable[[], Callable[[], None] | None]) -> None:
        self._board = board
        self._interrupt = interrupt
        self._active = threading.Event()
        self._closed = False
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ppdsl-watch", daemon=True)
            self._thread.start()
        self._active.set()

    def __exit__(self, *_: object) -> None:
        self._active.clear()

    def _run(self) -> None:
        while True:
            self._active.wait()
            time.sleep(0.1)
            with self._busy:
                if self._closed:
                    return
                if self._active.is_set() and self._failed_elsewhere():
                    interrupt = self._interrupt()
                    if interrupt is not None:
                        interrupt()
                    return

    def _failed_elsewhere(self) -> bool:
        try:
            self._board.waits.note()
            failure = self._board.failure()
        except RunError:
            # The store is gone, and with it the process that held it.
            return True
        return failure is not None and failure[0] != self._board.rank

    def close(self) -> None:
        """End the thread; it is not inside torch when this returns."""
        with self._busy:
            self._closed = True
        self._active.set()
