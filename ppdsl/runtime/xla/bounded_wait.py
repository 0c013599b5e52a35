"""Calls of torch_xla that may never return, made so that the thread that wants them can be told.

A thread inside torch_xla cannot be interrupted. So another one makes the call, and the caller waits for it in Python,
until the result is there or the devices are found to be stuck. torch_xla lets other threads run while it waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ppdsl.runtime.xla.stuck import INSIDE, WATCH

__all__ = ["starting", "waiting"]

P = ParamSpec("P")
T = TypeVar("T")


def starting(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Start a program; it may take as long as its compilation takes.

    Args:
        call: Of torch_xla; it waits where a device has not even taken an earlier program.
        *args: For it.
        **kwargs: For it.

    Raises:
        RunError: The devices are stuck.
    """
    return _bounded(call, args, kwargs, waits=False)


def waiting(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Wait for a device, no longer than the `timeout` of the pipeline that runs after anything has ended.

    Args:
        call: Of torch_xla.
        *args: For it.
        **kwargs: For it.

    Raises:
        RunError: The devices are stuck.
    """
    return _bounded(call, args, kwargs, waits=True)


class _Call:
    """One call, given to the thread that makes it."""

    __slots__ = ("_args", "_call", "_kwargs", "_over", "begun", "done", "error", "value", "waits")

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any, *, waits: bool) -> None:
        self._call, self._args, self._kwargs = call, args, kwargs
        self.waits = waits
        self.begun = time.monotonic()
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def make(self) -> None:
        """Make the call, and wake the one who wants it."""
        try:
            self.value = self._call(*self._args, **self._kwargs)
        except BaseException as error:
            self.error = error
        self.done = True
        self.wake()

    def wake(self) -> None:
        """Let `wait` return."""
        with contextlib.suppress(RuntimeError):  # it may have been woken before
            self._over.release()

    def wait(self) -> None:
        """Return when the call is made, or the devices are stuck."""
        self._over.acquire()


class _Maker:
    """A thread that makes calls for another one, and ends with it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name="ppdsl xla calls", daemon=True).start()

    def give(self, call: _Call) -> None:
        """Have a call made."""
        self._calls.put(call)

    def __del__(self) -> None:
        self._calls.put(None)


_makers = threading.local()


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    INSIDE.here = True
    while (call := calls.get()) is not None:
        call.make()
        del call


def _bounded(call: Callable[..., T], args: Any, kwargs: Any, *, waits: bool) -> T:
    if getattr(INSIDE, "here", False):
        return call(*args, **kwargs)
    one = _Call(call, args, kwargs, waits=waits)
    WATCH.enter(one)
    try:
        maker = getattr(_makers, "own", None)
        if maker is None:
            maker = _makers.own = _Maker()
        maker.give(one)
        one.wait()
    finally:
        WATCH.leave(one)
        if not one.done:
            # Interrupted, or in vain: the next call is not to wait behind this one.
            _makers.own = None
    if not one.done:
        WATCH.require()
    if one.error is not None:
        raise one.error
    value: T = one.value
    return value
