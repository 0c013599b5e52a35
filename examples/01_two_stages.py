"""Two stages: mark a model in its forward pass, then train it as a pipeline.

python examples/01_two_stages.py                                            one process, both stages in it
torchrun --standalone --nproc-per-node 2 examples/01_two_stages.py          a process for each stage
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import ppdsl as pp


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.back = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x):
        with pp.stage(0):
            h = self.front(x)
        with pp.stage(1):
            return self.back(h)


def batches(steps, rows):
    """Points of eight numbers; the largest of the first three says the class."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(rows, 8, generator=chance, dtype=torch.float64)
        yield x, x[:, :3].argmax(dim=1)


def make(rows=4):
    """The model and one micro-batch: `ppdsl graph --model examples/01_two_stages.py:make`."""
    torch.manual_seed(0)
    ((x, labels),) = batches(1, rows)
    return {"model": Classifier().double(), "args": (x,), "loss": nn.functional.cross_entropy, "targets": (labels,)}


def train(steps=5, microbatches=8):
    pipe = pp.pipeline(**make(rows=4), microbatches=microbatches)
    # In a list, as a rank without a stage (the third of four processes) has no parameters.
    optimizer = torch.optim.AdamW([{"params": pipe.parameters()}], lr=1e-2)
    losses = []
    for x, labels in batches(steps, rows=4 * microbatches):
        result = pipe.step(x, targets=labels)  # forward and backward of all micro-batches
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())  # the same number on every rank
    return losses


def main():
    torch.set_num_threads(1)  # for tensors this small more threads are slower
    if "RANK" not in os.environ:
        losses, rank = train(), 0
    else:  # started by torchrun: this process is one rank
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        losses, rank = train(), dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        for step, loss in enumerate(losses, 1):
            print(f"step {step}  loss {loss:.6f}")
    return losses


if __name__ == "__main__":
    losses = main()
