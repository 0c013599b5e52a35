"""Does each collective work on the devices of this process? Asked once, before the first use, in bounded time.

A collective that does not work hangs, and torch_xla then ends the process. So on CPU devices the test runs in a process
of its own, with the same environment. Chips belong to one process, so there it runs in this one, and waits no longer
than it may.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.inspection.bounded import ENDED, lines_of_module
from ppdsl.runtime.xla import adapter

__all__ = ["Verdict", "require", "self_test"]

TIMEOUT = 60.0
"""Seconds for all collectives together, beside the time to load torch_xla."""
_LOADING = 120.0
"""Seconds in which torch_xla is loaded, at most."""
_OK, _FAILED = "ppdsl passed", "ppdsl failed"
_CASES = "ppdsl.runtime.xla.collectives.cases"
_IN_CHILD = "PPDSL_XLA_SELF_TEST_CHILD"
_ENOUGH = 2
"""After so many processes that ended or hung the rest is given up."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test found about one collective.

    Attributes:
        collective: Its name; `send by all_reduce` is the emulation of every move.
        passed: Whether its values are right.
        reason: Why it does not work, or "".
    """

    collective: str
    passed: bool
    reason: str = ""


_known: dict[str, Verdict] = {}
_asking = threading.RLock()


def self_test(timeout: float = TIMEOUT) -> tuple[Verdict, ...]:
    """Test every collective on the devices of this process, once; later calls return what was found.

    Args:
        timeout: Seconds for all of them together.

    Returns:
        A verdict for each, whatever happened: the test itself neither hangs nor ends the process.

    Raises:
        RunError: This process cannot run collectives at all: SPMD is on, or other processes have devices too.
    """
    with _asking:
        if not _known:
            _refuse_what_cannot_be_driven()
            run = _in_another_process if adapter.device_kind() == "CPU" else _in_this_process
            _known.update({verdict.collective: verdict for verdict in run(timeout)})
        return tuple(_known.values())


def require(collective: str) -> None:
    """Return when a collective may be used.

    Raises:
        RunError: Its self-test failed.
    """
    if os.environ.get(_IN_CHILD):
        return
    self_test()
    verdict = _known[collective]
    if not verdict.passed:
        message = f"{collective} does not work on the XLA devices of this process: {verdict.reason}."
        raise RunError(Diagnostic("collective-unavailable", message, help=_remedy(collective)))


def _remedy(collective: str) -> str:
    pool = os.environ.get("XLA_THREAD_POOL_SIZE", "")
    devices = adapter.device_count()
    if adapter.device_kind() == "CPU" and (not pool.isdigit() or int(pool) < devices):
        return f"set XLA_THREAD_POOL_SIZE to {devices} or more before python starts: every device needs a thread"
    by_sum = _known.get("send by all_reduce")
    if collective in {"send", "collective_permute", "scatter", "gather"} and by_sum and by_sum.passed:
        return "say transport='all_reduce', which works here"
    return "run `ppdsl doctor --device xla`"


def _refuse_what_cannot_be_driven() -> None:
    own, all_of_them = adapter.device_count(), adapter.replica_count()
    if adapter.is_spmd():
        message = "The process is in SPMD mode (use_spmd()), which hides its devices behind one."
        help_text = "use collectives in a process without SPMD"
        raise RunError(Diagnostic("spmd-hides-devices", message, help=help_text))
    if own != all_of_them:
        message = f"This process drives {own} of the {all_of_them} XLA devices that a collective would need."
        help_text = "collectives work between the devices of one process; let it drive all of them"
        raise RunError(Diagnostic("devices-of-other-processes", message, help=help_text))


# ---------------------------------------------------------------- where it runs


def _in_this_process(timeout: float) -> Iterator[Verdict]:
    from ppdsl.runtime.xla.collectives.cases import CASES, run_case

    ends = time.monotonic() + timeout
    os.environ[_IN_CHILD] = "1"
    try:
        for name in CASES:
            reason = run_case(name, max(ends - time.monotonic(), 1.0))
            yield Verdict(name, not reason, reason)
    finally:
        del os.environ[_IN_CHILD]


def _in_another_process(timeout: float) -> Iterator[Verdict]:
    from ppdsl.runtime.xla.collectives.cases import CASES

    waiting = list(CASES)
    ends = time.monotonic() + timeout + _LOADING
    ended = ""
    for _ in range(_ENOUGH):
        left = max(ends - time.monotonic(), 1.0)
        for line in lines_of_module(_CASES, waiting, left, {_IN_CHILD: "1"}):
            kind, _, rest = line.partition(": ")
            name, _, reason = rest.partition(": ")
            if line.startswith(ENDED):
                ended = f"its test ran in a process of its own, and {rest}" if rest else "its test said nothing"
            elif kind in {_OK, _FAILED} and name in waiting:
                waiting.remove(name)
                yield Verdict(name, kind == _OK, reason)
        if not waiting:
            return
        yield Verdict(waiting.pop(0), passed=False, reason=ended)
    for name in waiting:
        yield Verdict(name, passed=False, reason=f"not tested after the one before: {ended}")
