"""A process of the elastic job: `elastic_worker.py FOLDER STEPS LIVES` trains the example and dies as it is told.

`LIVES` has a part for each time that torchrun starts the processes: `1@3` kills rank 1 after step 3, `0@4:5` kills
rank 0 in the step after step 4, at its fifth message; `host@3` ends the whole host, its torchrun included,
whose environment has `DOOMED`; `-` nothing.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppdsl.runtime.processes.distributed import DistributedWorld
from tests.runtime.delays import SlowTransport

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "07_elastic.py"


class DyingTransport(SlowTransport):
    """Kills its process at a message."""

    left = -1

    def _dawdle(self) -> None:
        DyingTransport.left -= 1
        if DyingTransport.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train until the end, if there is nothing that ends it before."""
    folder, steps, lives = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    marks = sorted(folder.glob("life-*"))
    dist.barrier()
    life = lives[len(marks)] if len(marks) < len(lives) else "-"
    if rank == 0:
        (folder / f"life-{len(marks)}").write_text(f"{ranks} ranks")
    dist.barrier()
    who, _, when = life.partition("@")
    step, _, message = when.partition(":")
    DistributedWorld.transport = lambda world, *_: DyingTransport(world)  # type: ignore[method-assign]

    def after_step(done: int) -> None:
        if who == "-" or done != int(step):
            return
        if who == "host" and "DOOMED" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if who == str(rank):
            if not message:
                os.kill(os.getpid(), signal.SIGKILL)
            DyingTransport.left = int(message)

    names: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    losses = names["train"](folder / "saved", ranks, steps, after_step)
    if rank == 0:
        (folder / "losses").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
