"""Ranks as forked children of one process that has imported torch already: to start one takes no time.

Only a process that has run nothing of torch's yet may fork them, so this is for scripts that tests start, not for the
tests' own process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

__all__ = ["Ended", "run_ranks"]

Body = Callable[[int], object]


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: Its exit status; minus the number of the signal that killed it; None: it was still there at the end.
        text: What its body returned, or the error that it ended with.
        seconds: How long after the first one that ended.
        stderr: What it wrote to standard error.
    """

    code: int | None
    text: str
    seconds: float
    stderr: str


def run_ranks(ranks: int, body: Body, *, seconds: float, store_in_rank_0: bool = False) -> list[Ended]:
    """Run `body(rank)` in that many processes and return how each ended; who is left after `seconds` is killed.

    What the body returns, as text, or the error that it raises, is what the rank said. Then it leaves as a script does:
    threads are waited for, and what was to be done at exit is done.

    Args:
        ranks: How many.
        body: What each of them does; `torch.distributed` can be initialised there.
        seconds: When to give up.
        store_in_rank_0: Whether rank 0 holds the store, as without a launcher; otherwise a process of its own does.
    """
    # A temporary directory's object would remove it at the end of each child.
    folder = tempfile.mkdtemp()
    try:
        port = _free_port()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not store_in_rank_0)
        children = {_fork(lambda rank=rank: _rank(rank, body, Path(folder))): rank for rank in range(ranks)}
        holder = None if store_in_rank_0 else _fork(lambda: _hold_store(port))
        try:
            codes, times = _wait(children, seconds)
        finally:
            for pid in [*children, holder]:
                if pid is not None:
                    _kill(pid)
        return [
            Ended(codes.get(rank), _read(folder, f"{rank}"), times.get(rank, seconds), _read(folder, f"{rank}.err"))
            for rank in range(ranks)
        ]
    finally:
        shutil.rmtree(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _fork(body: Callable[[], int]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = body()
    # As at the end of a script; what the parent has still to clean up is the parent's.
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code)


def _read(folder: str, name: str) -> str:
    path = Path(folder, name)
    return path.read_text() if path.exists() else ""


def _wait(children: dict[int, int], seconds: float) -> tuple[dict[int, int], dict[int, float]]:
    end, first = time.monotonic() + seconds, None
    codes: dict[int, int] = {}
    times: dict[int, float] = {}
    pending = dict(children)
    while pending and time.monotonic() < end:
        for pid, rank in list(pending.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del pending[pid]
                first = first or time.monotonic()
                codes[rank], times[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - first
                children.pop(pid)
        stopped = set(pending) and all(_is_stopped(pid) for pid in pending)
        if stopped:
            break
        time.sleep(0.02)
    return codes, times


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _hold_store(port: int) -> int:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(3600)
    return int(store.port)


def _rank(rank: int, body: Body, folder: Path) -> int:
    errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    try:
        said = str(body(rank))
        code = 0
    except BaseException as error:
        said, code = f"{type(error).__name__}: {error}", 1
        # As Python does for an error that ends a script.
        sys.last_value = error
        traceback.print_exc()
    (folder / str(rank)).write_text(said)
    return code
