"""Kills ranks at random moments of their saves: `save_kills.py KILLS SEED`; what is there afterwards loads.

Each time two ranks go on from the last checkpoint and save after each step; in the second save one of them is killed at
a call of a function, any of all that a save makes. At the end they train on, and have the losses of the plain model.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppdsl as pp
from tests.effort import calls_of
from tests.runtime.faults import Chain
from tests.runtime.forked import run_ranks

MICROBATCHES = 2


def batch() -> Tensor:
    return torch.randn(2 * MICROBATCHES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


Save = Callable[..., object]


def trained(folder: Path, steps: int, save: Save = pp.save) -> list[float]:
    """Train two ranks on from the last checkpoint, until that many steps are done."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    x, model = batch(), Chain(2)
    pipe = pp.pipeline(
        model, (x[:2],), targets=x[:2], loss=nn.functional.mse_loss, microbatches=MICROBATCHES, timeout=4.0
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses: list[float] = []
    if (folder / "latest").exists():
        found = pp.load(pipe, folder, optimizer)
        losses = found.extra
        if found.steps != len(losses):
            raise RuntimeError(f"{found.steps} steps, but {len(losses)} losses")
    for _ in range(len(losses), steps):
        losses.append(pipe.step(x, targets=x).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        save(pipe, folder, optimizer, extra=losses, keep=2)
    pipe.close()
    dist.destroy_process_group()
    return losses


def doomed(folder: Path, victim: int, part: float, rank: int) -> str:
    """Train until one rank is killed, when it has made that part of the calls of a save."""
    calls: list[int] = []

    def save(*args: object, **kwargs: object) -> None:
        if not calls:
            calls.append(calls_of(lambda: pp.save(*args, **kwargs)))
        elif rank == victim:
            kill_after(int(part * calls[0]))
            pp.save(*args, **kwargs)
        else:
            pp.save(*args, **kwargs)

    trained(folder, 10**6, save)
    return "not killed"


def kill_after(calls: int) -> None:
    """Kill this process when it has made that many calls."""
    left = calls

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_call"):
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(note)


def plain(steps: int) -> list[float]:
    """Train the plain model."""
    x, model = batch(), Chain(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for part in x.chunk(MICROBATCHES):
            loss = nn.functional.mse_loss(model(part), part) / MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    """Kill, and look; then train a little to the end and compare with the plain model."""
    kills, chance = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    folder = Path(tempfile.mkdtemp())
    left_behind = 0
    for number in range(kills):
        victim, part = chance.randrange(2), chance.random()
        ended = run_ranks(2, lambda rank, v=victim, p=part: doomed(folder, v, p, rank), seconds=90.0)
        left_behind += any(folder.glob(".writing-*"))
        if ended[victim].code != -signal.SIGKILL or ended[1 - victim].code != 1:
            sys.exit(f"kill {number} of rank {victim}: {[(end.code, end.text, end.stderr) for end in ended]}")
    latest = (folder / "latest").read_text().strip() if (folder / "latest").exists() else "step-0"
    steps = int(latest.split("-")[1]) + 2

    def finish(rank: int) -> str:
        losses = trained(folder, steps)
        far = max(abs(one - two) for one, two in zip(losses, plain(steps), strict=True))
        return "as the plain model" if far < 1e-10 else f"off by {far}"

    said = {end.text for end in run_ranks(2, finish, seconds=90.0)}
    print(f"{kills} kills, {left_behind} in the middle of a save, {steps} steps: {', '.join(said)}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
