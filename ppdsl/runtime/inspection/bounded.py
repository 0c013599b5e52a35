"""What may hang or end its process runs in another one, which is heard line by line and never outlives its time."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

__all__ = ["ENDED", "lines_of_module"]

ENDED = "ended: "
"""Begins the last line: why no more was said; nothing follows it when the process ended well."""
_INSIDE = "PPDSL_BOUNDED"
_FATAL = re.compile(r"(?:F\d{4} |[-\d]+ [\d:.]+: F )[^\]]*\] (.*)")
"""A line after which glog, or abseil, ends the process."""


def lines_of_module(
    module: str,
    arguments: Sequence[str],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    *,
    quote: bool = False,
) -> Iterator[str]:
    """Run `python -m module` and yield the lines of its standard output, at last one that begins with `ENDED`.

    Args:
        module: With its packages.
        arguments: Of the module.
        timeout: Seconds after which the process, and all that it started, is killed.
        environment: Variables beside those of this process.
        quote: Whether the last line of one that did not end well goes on with what it said about that.
    """
    ends = time.monotonic() + timeout
    # A process started from one that is bounded itself dies with it: it stays in the group.
    own_group = _INSIDE not in os.environ
    said: queue.Queue[str | None] = queue.Queue()
    with (
        tempfile.TemporaryFile() as errors,
        _started(module, arguments, environment, errors, own_group=own_group) as child,
    ):

        def read() -> None:
            for line in child.stdout or ():
                said.put(line.rstrip("\n"))
            said.put(None)

        threading.Thread(target=read, name=f"ppdsl {module}", daemon=True).start()
        why = f"it did not end within {timeout:g} seconds"
        try:
            with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
                while (line := said.get(timeout=max(ends - time.monotonic(), 0.01))) is not None:
                    yield line
                why = _how_it_ended(child.wait(timeout=max(ends - time.monotonic(), 1.0)))
        finally:  # also when the reader has heard enough
            with contextlib.suppress(ProcessLookupError):
                if own_group:
                    os.killpg(child.pid, signal.SIGKILL)
                else:
                    child.kill()
        words = _last_words(errors) if quote and why else ""
    yield ENDED + why + (f": {words}" if words else "")


def _started(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None, errors: IO[bytes], *, own_group: bool
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **(environment or {}), _INSIDE: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        errors="replace",
        process_group=0 if own_group else None,
    )


def _last_words(errors: IO[bytes]) -> str:
    r"""Return what a process said about its end: the text of a fatal line of a C++ library's log, or its last line.

        >>> import io
    >>> _last_words(io.BytesIO(b"2026-01-01 10:00:00.1: F xla/flags.cc:2] Unknown flag: --a\n*** Check failure"))
    'Unknown flag: --a'
    >>> _last_words(io.BytesIO(b"Traceback (most recent call last):\nKeyError: 'x'\n"))
    "KeyError: 'x'"
    """
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    fatal = [found[1] for line in lines if (found := _FATAL.match(line))]
    return (fatal or lines[-1:] or [""])[0]


def _how_it_ended(status: int) -> str:
    """Return how a process ended, "" when well.

    >>> _how_it_ended(3), _how_it_ended(-6)
    ('it ended with exit status 3', 'it was ended by SIGABRT')
    """
    if status >= 0:
        return f"it ended with exit status {status}" if status else ""
    names = {one.value: one.name for one in signal.Signals}
    return f"it was ended by {names.get(-status, f'signal {-status}')}"
