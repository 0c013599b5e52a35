"""`ppdsl doctor --device cpu`: torch, the cores, the threads of each process, and gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import torch

from ppdsl.runtime.inspection.run import Check, Status

__all__ = ["checks"]


def checks() -> Iterator[Check]:
    """Yield the checks."""
    yield Check("torch", Status.OK, torch.__version__)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("cores", Status.OK, str(cores))
    yield _threads(cores)
    yield _gloo()


def _threads(cores: int) -> Check:
    told = os.environ.get("OMP_NUM_THREADS")
    name = "OMP_NUM_THREADS"
    if told:
        return Check(name, Status.OK, told)
    if cores == 1:
        return Check(name, Status.OK, "not set; there is one core")
    found = f"not set: every process takes {torch.get_num_threads()} threads"
    return Check(name, Status.WARN, found, "set it to the cores divided by the processes; torchrun sets it to 1")


def _gloo() -> Check:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        remedy = "install a build of torch with it; pipelines in one process work without"
        return Check("gloo", Status.WARN, "this torch is built without it", remedy)
    # A group of one process: whether gloo finds an interface and starts.
    try:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
        torch.distributed.all_reduce(torch.ones(2))
        torch.distributed.destroy_process_group()
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        return Check("gloo", Status.FAIL, words, "set GLOO_SOCKET_IFNAME to an interface that works, such as lo")
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return Check("gloo", Status.OK, f"starts, on {interface}" if interface else "starts")
