"""Training that survives: a checkpoint after each step; a job goes on from the last one with any number of ranks.

python examples/07_elastic.py                                      one process; stops after step 3, goes on with 2 ranks
export FOLDER=here TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 4 --max-restarts 2 examples/07_elastic.py
                                                       kill a process: torchrun starts all again, and they go on
torchrun --standalone --nproc-per-node 2 examples/07_elastic.py                     goes on with fewer ranks
"""

import itertools
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ppdsl as pp

SPEC = Path(__file__).with_suffix(".ppspec")  # divides the model for as many ranks as there are
WIDTH, BLOCKS, ROWS, MICROBATCHES = 16, 8, 2, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + 0.2 * self.two(torch.tanh(self.one(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(steps, rows):
    """Points and a smooth function of them; always the same ones, so that who goes on can skip those that are done."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.rand(rows, 4, generator=chance, dtype=torch.float64)
        yield x, 2 * x.sum(1, keepdim=True) + x[:, :1].sin()


def make(rows=ROWS):
    """The model and one micro-batch."""
    torch.manual_seed(0)
    ((x, y),) = batches(1, rows)
    return {"model": Net().double(), "args": (x,), "loss": nn.functional.mse_loss, "targets": (y,)}


def train(folder, ranks, steps, after_step=lambda step: None):
    """Train until that many steps are done in all, from the last checkpoint in the folder if there is one."""
    pipe = pp.pipeline(**make(), spec=SPEC, spec_params={"ranks": ranks}, timeout=30.0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    if Path(folder, "latest").exists():
        losses = pp.load(pipe, folder, optimizer).extra
    for x, y in itertools.islice(batches(steps, ROWS * MICROBATCHES), len(losses), None):
        losses.append(pipe.step(x, targets=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        pp.save(pipe, folder, optimizer, extra=losses, keep=2)  # whole or not at all, whenever a process dies
        after_step(len(losses))
    pipe.close()
    return losses


def report(folder, ranks, rank):
    """Train in two goes, of which the second knows nothing but the folder."""
    losses = train(folder, ranks[0], 3)
    if rank == 0:
        print(*(f"step {step}  loss {loss:.6f}" for step, loss in enumerate(losses, 1)), sep="\n")
        print("step 3 is saved; another pipeline goes on from there")
    losses = train(folder, ranks[1], 5)
    if rank == 0:
        print(*(f"step {step}  loss {loss:.6f}" for step, loss in enumerate(losses[3:], 4)), sep="\n")
    return losses


def main():
    torch.set_num_threads(1)  # for tensors this small more threads are slower
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            return report(folder, (4, 2), 0)
    # Started by torchrun, once or again: this process is one rank.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chosen = [os.environ.get("FOLDER") or (tempfile.mkdtemp() if rank == 0 else None)]
    dist.broadcast_object_list(chosen)
    losses = report(chosen[0], (ranks, ranks), rank)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    losses = main()
