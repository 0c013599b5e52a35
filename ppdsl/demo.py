"""The model of `ppdsl demo`: a small U-Net that learns to remove noise, marked with five stages.

Its skip connections go from stage 1 to 3 and from 0 to 4 directly, past the stages between::

    0 ── 1 ── 2 ── 3 ── 4
    │    └─────────┘    │
    └───────────────────┘
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ppdsl.annotate import stage

__all__ = ["UNet", "make", "noisy_blobs"]


class UNet(nn.Module):
    """A U-Net with two levels.

    Args:
        width: Channels of the first level; twice and four times as many below.

    >>> UNet()(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 1, 16, 16])
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down0 = nn.Sequential(_block(1, width), _block(width, width))
        self.down1 = nn.Sequential(_block(width, 2 * width), _block(2 * width, 2 * width))
        self.middle = nn.Sequential(_block(2 * width, 4 * width), _block(4 * width, 4 * width))
        self.up1 = _block(6 * width, 2 * width)
        self.up0 = _block(3 * width, width)
        self.head = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Remove noise from images.

        Args:
            image: Noisy images, [batch, 1, height, width]; height and width are multiples of 4.
        """
        with stage(0):
            fine = self.down0(image)
        with stage(1):
            coarse = self.down1(F.avg_pool2d(fine, 2))
        with stage(2):
            deep = self.middle(F.avg_pool2d(coarse, 2))
        with stage(3):
            deep = F.interpolate(deep, scale_factor=2.0)
            deep = self.up1(torch.cat([deep, coarse], dim=1))
        with stage(4):
            deep = F.interpolate(deep, scale_factor=2.0)
            clean: torch.Tensor = self.head(self.up0(torch.cat([deep, fine], dim=1)))
        return clean


def noisy_blobs(count: int, generator: torch.Generator, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of one bright blob each with noise, and the same without, [count, 1, size, size].

    Args:
        count: Number of images.
        generator: Where chance comes from.
        size: Pixels along each side.
    """
    axis = torch.arange(size, dtype=torch.float32)
    centre = torch.rand(count, 2, generator=generator) * size
    rows = axis[None, :, None] - centre[:, 0, None, None]
    columns = axis[None, None, :] - centre[:, 1, None, None]
    clean = torch.exp(-(rows**2 + columns**2) / (size / 2))[:, None]
    return clean + 0.3 * torch.randn(clean.shape, generator=generator), clean


def make(images: int = 4) -> dict[str, Any]:
    """Return the model with one micro-batch, as `ppdsl graph --model ppdsl.demo:make` takes it.

    Args:
        images: In one micro-batch.
    """
    torch.manual_seed(0)
    noisy, clean = noisy_blobs(images, torch.Generator().manual_seed(0))
    return {"model": UNet(), "args": (noisy,), "loss": nn.functional.mse_loss, "targets": (clean,)}


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.SiLU(),
    )
