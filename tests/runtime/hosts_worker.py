"""What each of two hosts runs: it trains, loses the other one in a step, trains again, loses it between two steps."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppdsl as pp

MICROBATCHES, TIMEOUT = 4, 5.0


class Chain(nn.Module):
    """Two stages; in the first one the link can be cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.cut = nn.Linear(4, 4), nn.Linear(4, 4), Cut()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.cut(torch.tanh(self.a(x)))
        with pp.stage(1):
            return self.b(h)


class Cut(nn.Module):
    """Has the link cut in micro-batch 2, when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.folder is not None and type(x) is Tensor:
            self.calls += 1
            if self.calls == 3:
                have_it_cut(self.folder, 1)
        return x * 1.0


def have_it_cut(folder: Path, number: int) -> None:
    """Ask for it and wait until it is."""
    (folder / f"cut-{number}").touch()
    wait_for(folder / f"is-cut-{number}")


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.01)


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2 * MICROBATCHES, 4, dtype=torch.float64, generator=chance) for _ in range(2))
    return x, y


def train(pipe: pp.Pipeline, steps: int) -> list[float]:
    """Return the losses of some steps."""
    x, y = batch()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(x, targets=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain(steps: int) -> list[float]:
    """Return the losses of the plain model."""
    (x, y), model = batch(), Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def build(model: Chain) -> pp.Pipeline:
    x, y = batch()
    return pp.pipeline(
        model, (x[:2],), targets=y[:2], loss=nn.functional.mse_loss, microbatches=MICROBATCHES, timeout=TIMEOUT
    )


def attempt(pipe: pp.Pipeline) -> str:
    """Return the error of training on, and whether it came in time."""
    begun = time.monotonic()
    try:
        train(pipe, 1000)
    except pp.PpdslError as error:
        late = time.monotonic() - begun - TIMEOUT
        return f"{type(error).__name__}: {error}\n{'in time' if late < 20 else f'{late:.1f} seconds late'}"
    return "no error"


def main(folder: Path) -> None:
    """Play both scenes, and write down what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    said = folder / f"said-{rank}"
    model = Chain()
    pipe = build(model)
    near = all(abs(one - two) < 1e-12 for one, two in zip(train(pipe, 5), plain(5), strict=True))
    lines = [f"equal: {near}"]
    model.cut.folder = folder
    lines.append(attempt(pipe))
    pipe.close()
    said.write_text("\n".join(lines))
    (folder / f"joins-{rank}").touch()
    wait_for(folder / f"joins-{1 - rank}")
    # Packets find their way again after a while, longer than the time-out of the pipeline.
    dist.barrier()
    pipe = build(Chain())
    near = all(abs(one - two) < 1e-12 for one, two in zip(train(pipe, 5), plain(5), strict=True))
    lines.append(f"equal: {near}")
    dist.barrier()
    if rank == 0:
        have_it_cut(folder, 2)
    wait_for(folder / "is-cut-2")
    lines.append(attempt(pipe))
    said.write_text("\n".join(lines))
    (folder / f"done-{rank}").write_text(str(os.getpid()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
