"""A U-Net: its skip connections go straight from the stage that makes them to the stage that needs them.

python examples/02_unet.py                                          one process, five virtual ranks
torchrun --standalone --nproc-per-node 4 examples/02_unet.py        four processes, two stages on the first
ppdsl graph --model examples/02_unet.py:make                        the five stages and what goes between them
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ppdsl as pp

STAGES = 5


def block(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1), nn.GroupNorm(2, channels_out), nn.SiLU()
    )


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.down0, self.down1 = block(1, width), block(width, 2 * width)
        self.middle = block(2 * width, 4 * width)
        self.up1, self.up0 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, image):
        with pp.stage(0):
            fine = self.down0(image)
        with pp.stage(1):
            coarse = self.down1(F.avg_pool2d(fine, 2))
        with pp.stage(2):
            x = self.middle(F.avg_pool2d(coarse, 2))
        with pp.stage(3):  # `coarse` comes from stage 1 directly, and its gradient goes back there
            x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), coarse], dim=1))
        with pp.stage(4):  # `fine` comes from stage 0
            x = self.up0(torch.cat([F.interpolate(x, scale_factor=2.0), fine], dim=1))
            return self.head(x)


def batches(steps, rows):
    """Images of one bright blob each, with noise and without."""
    chance = torch.Generator().manual_seed(1)
    axis = torch.arange(16, dtype=torch.float64)
    for _ in range(steps):
        y, x = torch.rand(2, rows, 1, 1, 1, generator=chance, dtype=torch.float64) * 16
        clean = torch.exp(-((axis[:, None] - y) ** 2 + (axis - x) ** 2) / 8)
        yield clean + 0.3 * torch.randn(clean.shape, generator=chance, dtype=torch.float64), clean


def make(rows=2):
    """The model and one micro-batch."""
    torch.manual_seed(0)
    ((noisy, clean),) = batches(1, rows)
    return {"model": UNet().double(), "args": (noisy,), "loss": F.mse_loss, "targets": (clean,)}


def placement(ranks):
    """Neighbours together, the first ranks more: five stages on four ranks are 0 0 1 2 3."""
    return {stage: stage * ranks // STAGES for stage in range(STAGES)}


def train(ranks=STAGES, steps=5, microbatches=8):
    pipe = pp.pipeline(**make(rows=2), microbatches=microbatches, placement=placement(ranks))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for noisy, clean in batches(steps, rows=2 * microbatches):
        result = pipe.step(noisy, targets=clean)
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
