"""What a rank does: round after round, until the time is over or a rank is gone."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import ppdsl as pp
from ppdsl.plan.messages import Message
from ppdsl.recording import compat
from ppdsl.runtime.processes.distributed import DistributedWorld
from ppdsl.runtime.transport import Parcel
from tests.runtime import delays
from tests.soak.rounds import Fault, Round, draw
from tests.trust.entry import differences

__all__ = ["Session"]

PATIENCE, SHORT = 60.0, 10.0
"""The time-out of a round in which nothing happens, and of one with a fault."""
LIMIT = 150.0
"""A round that takes longer hangs."""
BAD_LUCK = "bad luck"
LATE = "did not come to the building of the pipeline"


@dataclass(frozen=True)
class Session:
    """Processes that stay together.

    Attributes:
        name: `seed/ranks/session`.
        faults: Which kinds of faults may happen.
        often: The part of rounds in which one does.
        until: When to end, by the clock that all processes of a machine share.
        first: The number of the first round.
        rounds: How many; None: as many as the time allows.
        folder: Where each rank keeps its diary.
    """

    name: str
    faults: Collection[str]
    often: float
    until: float
    folder: Path
    first: int = 0
    rounds: int | None = None

    def run(self, rank: int) -> None:
        """Be one of its ranks."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", pp.PpdslWarning)
        DistributedWorld.transport = _transport  # type: ignore[method-assign]
        store = PrefixStore("soak", compat.default_store())
        diary = (self.folder / f"{rank}.jsonl").open("a")
        for number in itertools.count(self.first):
            if rank == 0:
                over = time.monotonic() > self.until or (self.rounds is not None and number >= self.first + self.rounds)
                store.set(f"go/{number}", "" if over else "go")
            if not store.get(f"go/{number}"):
                break
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            drawn = draw(f"{self.name}/{number}", self.faults, self.often)
            diary.write(json.dumps({"begun": drawn.name, "text": drawn.text}) + "\n")
            diary.flush()
            said = _play(drawn, rank)
            diary.write(json.dumps({"round": drawn.name, "text": drawn.text, **said, **_measure()}) + "\n")
            diary.flush()
            if said["struck"] and drawn.fault is not None and drawn.fault.what != "raise":
                break
            if said["wrong"]:
                break
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


def _play(drawn: Round, rank: int) -> dict[str, Any]:
    """Return what came of a round."""
    _Striking.prepare(drawn, rank)
    begun = time.monotonic()
    timeout = PATIENCE if drawn.fault is None else SHORT
    wrong: list[str] = []
    error = ""
    try:
        wrong = differences(drawn.entry, drawn.microbatches, steps=drawn.steps, timeout=timeout, **drawn.options)
    except pp.PpdslError as caught:
        error = str(caught)
        if drawn.fault is None:
            wrong = [f"{type(caught).__name__}: {caught}"]
        else:
            wrong = _unclear(error, drawn.fault)
    except Exception as caught:
        wrong = [f"{type(caught).__name__}: {caught}"]
    seconds = time.monotonic() - begun
    struck = error != ""
    if struck and seconds > 3 * SHORT + 20:
        wrong.append(f"the error came after {seconds:.1f} seconds")
    if drawn.fault is not None and LATE in error:
        # On a machine that is busy with other things a rank may come later than a short time-out allows.
        wrong, struck = [], False
    return {"wrong": wrong, "error": error, "struck": struck, "seconds": round(seconds, 2)}


def _unclear(error: str, fault: Fault) -> list[str]:
    """Return what an error lacks."""
    needed = [f"ank {fault.rank}"] if fault.what == "kill" else []
    needed += [BAD_LUCK] if fault.what == "raise" else []
    return [f"{part!r} is not in the error: {error}" for part in needed if part not in error]


def _measure() -> dict[str, int]:
    """Return what must not grow: pages of memory, tensors, threads, open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects() if _is_plain(one))
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "tensors": tensors,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "python_threads": threading.active_count(),
    }


def _is_plain(one: object) -> bool:
    return issubclass(type(one), torch.Tensor)


class _Striking(delays.SlowTransport):
    """Waits at random, and strikes at its time."""

    fault: Fault | None = None
    rank = 0
    events = 0

    @classmethod
    def prepare(cls, drawn: Round, rank: int) -> None:
        delays.SlowTransport.chance = random.Random(drawn.seed + rank)
        cls.fault, cls.rank, cls.events = drawn.fault, rank, 0

    def _dawdle(self) -> None:
        super()._dawdle()
        fault = _Striking.fault
        if fault is None or fault.rank != _Striking.rank:
            return
        _Striking.events += 1
        if _Striking.events == fault.event:
            strike(fault.what)


def strike(what: str) -> None:
    """Do it."""
    sys.stderr.flush()
    match what:
        case "raise":
            raise ValueError(BAD_LUCK)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def _transport(world: DistributedWorld, rank: int, parcels: Mapping[Message, Parcel]) -> Any:
    return _Striking(world)
