"""All models of the zoo, in the order of the table."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ppdsl.annotate import MarkKind
from tests.zoo.case import Call, Case, Mark, weighted_squares
from tests.zoo.held_out import HELD_OUT_CASES
from tests.zoo.huggingface import HUGGINGFACE_CASES
from tests.zoo.vision import VISION_CASES

__all__ = ["CASES", "case_named"]


class DoubleConv(nn.Sequential):
    """Two convolutions with batch norm; one level of a U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597); skips cross two levels and levels are returned to."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down0 = DoubleConv(3, width)
        self.down1 = DoubleConv(width, 2 * width)
        self.down2 = DoubleConv(2 * width, 4 * width)
        self.bottom = DoubleConv(4 * width, 8 * width)
        self.up2 = DoubleConv(12 * width, 4 * width)
        self.up1 = DoubleConv(6 * width, 2 * width)
        self.up0 = DoubleConv(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a map of two classes, [batch, 2, height, width]."""
        skip0 = self.down0(image)
        skip1 = self.down1(nn.functional.max_pool2d(skip0, 2))
        skip2 = self.down2(nn.functional.max_pool2d(skip1, 2))
        hidden = self.bottom(nn.functional.max_pool2d(skip2, 2))
        for skip, up in ((skip2, self.up2), (skip1, self.up1), (skip0, self.up0)):
            hidden = nn.functional.interpolate(hidden, scale_factor=2.0)
            hidden = up(torch.cat([hidden, skip], dim=1))
        return self.head(hidden)


def _image(microbatch: int, size: int) -> Call:
    generator = torch.Generator().manual_seed(100 + microbatch)
    return Call((torch.randn(2, 3, size, size, generator=generator),))


def _levels() -> tuple[Mark, ...]:
    keys = {"down0": 0, "down1": 1, "down2": 2, "bottom": 3, "up2": 2, "up1": 1, "up0": 0, "head": 0}
    return tuple(Mark(name, key, MarkKind.PLACE) for name, key in keys.items())


OWN_CASES = (Case("unet", UNet, partial(_image, size=16), _levels(), loss=weighted_squares),)

CASES = (*HUGGINGFACE_CASES, *VISION_CASES, *OWN_CASES, *HELD_OUT_CASES)


def case_named(name: str) -> Case:
    """Return the case with this name, or raise KeyError."""
    return {case.name: case for case in CASES}[name]
