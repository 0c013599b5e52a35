"""When the programs of a step ran on their devices, as torch_xla has noted it, while the driver goes on.

torch_xla keeps, without Python, the moment when each program ended and how long before that the device had taken it,
but not which program it was. In a measured step the driver therefore goes on after an action when the device has taken
its program: the program is the one that was taken meanwhile. The others, which move tensors, follow from their order.
Nothing is launched for it and nobody waits until a device has computed something.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.executor import Executor, Measured
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.schedule.action import Action

__all__ = ["Launch", "Ran", "Stopwatch", "placed", "times_of"]

_PATIENCE = 10.0
"""Seconds in which torch_xla has to note what has ended."""
_LOOK = 0.002
"""Seconds between two looks at it."""
_BLUR = 1e-5
"""Seconds by which two clocks may differ."""
_OFTEN = 256
"""Programs between two looks before; torch_xla keeps the times of the last 1024."""


class Launch(NamedTuple):
    """One action's program.

    Attributes:
        rank: Whose.
        action: What it computes.
        begun: When the driver began to start it.
        started: When the driver had started it.
        operands: What brought what it gets from other ranks: places in the order of all programs.
        program: Its own place; None: it had nothing to compute.
    """

    rank: int
    action: Action
    begun: float
    started: float
    operands: Sequence[int]
    program: int | None


class Ran(NamedTuple):
    """One program, in seconds of `time.perf_counter`.

    Attributes:
        taken: When the device took it.
        ended: When it ended.
    """

    taken: float
    ended: float


class Stopwatch:
    """Measures one step.

    Args:
        executors: Of all ranks of this process.
    """

    def __init__(self, executors: Iterable[Executor]) -> None:
        self._executors = {executor.rank: executor for executor in executors}
        self._launches: list[Launch] = []
        self._devices: list[int] = []
        self._before = 0
        self._ended: dict[int, tuple[float, float]] = {}
        self._looked = 0
        # What has begun before would end among what is measured.
        xla_adapter.wait()
        self._first = self._seen = xla_adapter.executions()[0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take note of the programs that the body starts."""
        xla_adapter.JOURNALS.append(self._devices)
        try:
            yield
        finally:
            xla_adapter.JOURNALS.remove(self._devices)

    def delivering(self) -> None:
        """Take note that what is started from now on brings the operands of the next actions."""
        self._before = len(self._devices)

    @contextmanager
    def launching(self, rank: int, action: Action, device: torch.device, *, waits: bool) -> Iterator[None]:
        """Take note of the program that the body starts.

        Args:
            rank: Whose.
            action: What it computes.
            device: Where.
            waits: Whether it gets something from other ranks.
        """
        mine = range(self._before, len(self._devices)) if waits else ()
        operands = [place for place in mine if self._devices[place] == device.index]
        before, begun = len(self._devices), time.perf_counter()
        yield
        program = len(self._devices) - 1 if len(self._devices) > before else None
        self._launches.append(Launch(rank, action, begun, time.perf_counter(), operands, program))
        if len(self._devices) - self._looked >= _OFTEN:
            self._look()

    def finish(self) -> None:
        """Return when the step's programs have ended; the executors have their times then.

        Raises:
            RunError: A program does not end, or torch_xla does not say when.
        """
        xla_adapter.wait()
        end = time.monotonic() + _PATIENCE
        self._look()
        while len(self._ended) < len(self._devices):
            if time.monotonic() > end:
                message = (
                    f"torch_xla has noted the end of {len(self._ended)} of {len(self._devices)} programs of the step."
                )
                raise RunError(Diagnostic("xla-stuck", message, help="run `ppdsl doctor --device xla`"))
            time.sleep(_LOOK)
            self._look()
        shift = time.perf_counter() - time.time()
        ran = [Ran(end - nanoseconds * 1e-9 + shift, end + shift) for end, nanoseconds in self._ended.values()]
        for launch, measured in times_of(self._launches, placed(self._launches, ran)):
            self._executors[launch.rank].measured.append(measured)

    def _look(self) -> None:
        """Take notice of programs that have ended."""
        self._looked = len(self._devices)
        count, last = xla_adapter.executions()
        for number, sample in zip(range(count - 1, self._seen - 1, -1), reversed(last), strict=False):
            self._ended[number - self._first] = sample
        self._seen = count


def placed(launches: Sequence[Launch], ran: Iterable[Ran]) -> dict[int, Ran]:
    """Return each program by its place.

    Args:
        launches: Those of actions, in their order; each one's program was taken while it was started.
        ran: All programs.

    >>> from ppdsl.schedule.action import parse_action
    >>> action = Launch(0, parse_action("0F0"), 2.0, 3.0, operands=(0,), program=2)
    >>> placed([action], [Ran(1.0, 9.0), Ran(2.1, 9.0), Ran(2.5, 4.0)])
    {2: Ran(taken=2.5, ended=4.0), 0: Ran(taken=1.0, ended=9.0), 1: Ran(taken=2.1, ended=9.0)}
    """
    rest = sorted(ran)
    count, found = len(rest), {}
    for launch in launches:
        if launch.program is None:
            continue
        mine = [
            at for at, program in enumerate(rest) if launch.begun - _BLUR <= program.taken <= launch.started + _BLUR
        ]
        # An earlier one may be late, but not later than this one, as a rule.
        at = mine[-1] if mine else min(range(len(rest)), key=lambda at: abs(rest[at].taken - launch.started))
        found[launch.program] = rest.pop(at)
    places = (place for place in range(count) if place not in found)
    # What other threads of the process start is not among the places.
    return found | dict(zip(places, rest, strict=False))


def times_of(launches: Iterable[Launch], ran: Mapping[int, Ran]) -> Iterator[tuple[Launch, Measured]]:
    """Yield for each action when its program ran.

    It could run when its device had taken it, the rank's action before it had ended, and what came from other ranks was
    there.

    Args:
        launches: In the order in which they were started.
        ran: Each program by its place.

    >>> from ppdsl.schedule.action import parse_action
    >>> first = Launch(0, parse_action("0F0"), 0.9, 1.1, operands=(), program=0)
    >>> second = Launch(0, parse_action("0F1"), 1.4, 1.6, operands=(1,), program=2)
    >>> ran = {0: Ran(1.0, 4.0), 1: Ran(1.2, 5.0), 2: Ran(1.5, 7.5)}
    >>> [(measured.start, measured.end) for _, measured in times_of([first, second], ran)]
    [(1.0, 4.0), (5.0, 7.5)]
    """
    free: dict[int, float] = {}
    for launch in launches:
        own = Ran(launch.started, launch.started) if launch.program is None else ran[launch.program]
        there = [ran[place].ended for place in launch.operands if place in ran]
        start = max(own.taken, free.get(launch.rank, own.taken), *there)
        free[launch.rank] = max(own.ended, free.get(launch.rank, own.ended))
        yield launch, Measured(launch.action, min(start, own.ended), own.ended)
