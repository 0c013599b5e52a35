"""Many pipelines in one process, one after the other: `hygiene.py` prints what each rank held early and late."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.runtime.processes.near import LARGEST
from tests.runtime.forked import run_ranks

PIPELINES, WARM = 50, 5
MICROBATCHES = 2


WIDTH = 1 + LARGEST // 8
"""Elements in a row of two, so that gloo carries them."""


class Wide(nn.Module):
    """Three tensors on the way from the first stage to the second, for gloo, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            one, two, three = torch.tanh(self.a(x)).chunk(3, -1)
            small = x * 2.0
        with pp.stage(1):
            return self.b(one * two + three) + small


class Handle:
    """A handle of torch's that counts how often somebody waits for it."""

    waits: ClassVar[Counter[int]] = Counter()

    def __init__(self, work: Any) -> None:
        self._work = work
        self._number = len(Handle.waits)
        Handle.waits[self._number] = 0

    def wait(self, *arguments: Any) -> Any:
        Handle.waits[self._number] += 1
        return self._work.wait(*arguments)


def held() -> dict[str, int]:
    """Return how many threads and open files there are, and groups that torch knows."""
    gc.collect()
    for thread in threading.enumerate():
        # They end by themselves, in a moment.
        if thread.name.startswith("ppdsl"):
            thread.join(30.0)
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def body(rank: int) -> str:
    """Build, train and let go; every other pipeline is closed, the rest is only dropped."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    send, receive = dist.isend, dist.irecv
    dist.isend = lambda *args, **kwargs: Handle(send(*args, **kwargs))
    dist.irecv = lambda *args, **kwargs: Handle(receive(*args, **kwargs))
    x = torch.randn(2 * MICROBATCHES, 4)
    seen = []
    for number in range(PIPELINES):
        model = Wide()
        pipe = pp.pipeline(
            model, (x[:2],), targets=x[:2], loss=nn.functional.mse_loss, microbatches=MICROBATCHES, timeout=60.0
        )
        pipe.step(x, targets=x)
        if number % 2:
            pipe.close()
        del pipe
        if number + 1 in (WARM, PIPELINES):
            dist.barrier()
            seen.append(held())
    waits = Counter(Handle.waits.values())
    dist.destroy_process_group()
    return json.dumps({"early": seen[0], "late": seen[1], "waits": waits})


if __name__ == "__main__":
    print(json.dumps([asdict(ended) for ended in run_ranks(int(sys.argv[1]), body, seconds=200.0)]))
