"""Parallel branches: four experts between a trunk and a join run at the same time, each on a rank of its own.

python examples/03_experts.py                                          one process, six virtual ranks
torchrun --standalone --nproc-per-node 4 examples/03_experts.py        an expert on each of four processes
ppdsl graph --model examples/03_experts.py:make                        the diamond of six stages
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ppdsl as pp

EXPERTS = 4
KEYS = ["trunk", *(f"expert {i}" for i in range(EXPERTS)), "join"]


class Experts(nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, width), nn.Tanh())
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        with pp.stage("trunk"):
            h = self.trunk(x)
            gates = self.gate(h).softmax(dim=-1)
        votes = []
        for i, expert in enumerate(self.experts):
            with pp.stage(f"expert {i}"):  # a computed key; no expert waits for another one
                votes.append(expert(h))
        with pp.stage("join"):
            mixed = sum(gates[:, i : i + 1] * vote for i, vote in enumerate(votes))
            return self.head(h + mixed).squeeze(-1)


def batches(steps, rows):
    """Points of eight numbers, and a function of them that has a different form in four regions."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(rows, 8, generator=chance, dtype=torch.float64)
        yield x, torch.where(x[:, 0] > 0, x[:, 2], x[:, 3]).tanh() + torch.where(x[:, 1] > 0, x[:, 4], x[:, 5]).tanh()


def make(rows=8, width=16, hidden=64):
    """The model and one micro-batch."""
    torch.manual_seed(0)
    ((x, y),) = batches(1, rows)
    return {"model": Experts(width, hidden).double(), "args": (x,), "loss": F.mse_loss, "targets": (y,)}


def placement(ranks):
    """The trunk on the first rank, the join on the last, the experts on all ranks in turn."""
    if ranks >= len(KEYS):
        return {key: rank for rank, key in enumerate(KEYS)}
    return {"trunk": 0, **{f"expert {i}": i % ranks for i in range(EXPERTS)}, "join": ranks - 1}


def train(ranks=len(KEYS), steps=5, microbatches=8):
    pipe = pp.pipeline(**make(rows=8), microbatches=microbatches, placement=placement(ranks))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(steps, rows=8 * microbatches):
        result = pipe.step(x, targets=y)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    return losses


def main():
    torch.set_num_threads(1)  # for tensors this small more threads are slower
    if "RANK" not in os.environ:
        losses, rank = train(), 0
    else:  # started by torchrun: this process is one rank
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        losses, rank = train(dist.get_world_size()), dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        for step, loss in enumerate(losses, 1):
            print(f"step {step}  loss {loss:.6f}")
    return losses


if __name__ == "__main__":
    losses = main()
