"""The four shapes of models that every schedule has to run: chain, U-Net, branches and encoder-decoder, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp

ROWS = 2


class Block(nn.Module):
    """Weights of all kinds: a product, a norm, a bias."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(width, 9), nn.Linear(9, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(functional.gelu(self.one(self.norm(x))))


class Chain(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key, block in enumerate(self.blocks):
            with pp.stage(key):
                x = block(x)
        return x


class UNet(nn.Module):
    """Skips from each stage of the way down to its partner on the way up; buffers in the norms."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        half = stages // 2
        widths = [2, *(3 + level for level in range(half))]
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for key, down in enumerate(self.down):
            with pp.stage(key):
                x = torch.relu(down(x))
                skips.append(x)
        for key, up in enumerate(self.up, len(self.down)):
            with pp.stage(key):
                x = torch.tanh(up(torch.cat([x, skips[-1 - (key - len(self.down))]], 1)))
        return x


class Branches(nn.Module):
    """Four branches from one stem to one join."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stem, self.join = Block(), nn.Linear(6, 6)
        self.branches = nn.ModuleList(Block() for _ in range(4))
        self.pairs = nn.ModuleList(Block() for _ in range(2 if stages == 8 else 0))
        # Where each branch runs, and where what comes after.
        self.keys, self.last = ((1, 2, 3, 4), 7) if stages == 8 else ((0, 1, 2, 3), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with pp.stage(0):
            h = self.stem(x)
            if self.keys[0] == 0:
                made = [self.branches[0](h)]
        for key, branch in zip(self.keys, self.branches, strict=True):
            if key == 1 and self.last == 7:
                made = []
            if 0 < key < self.last:
                with pp.stage(key):
                    made.append(branch(h))
        for number, pair in enumerate(self.pairs):
            with pp.stage(5 + number):
                made.append(pair(made[2 * number] * made[2 * number + 1]))
        with pp.stage(self.last):
            if self.keys[-1] == self.last:
                made.append(self.branches[3](h))
            return self.join(torch.tanh(sum(made[1:], made[0] * h)))


class Translator(nn.Module):
    """An encoder, and a decoder each stage of which uses the encoder's result."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(stages // 2))
        self.decoder = nn.ModuleList(Block() for _ in range(stages // 2))
        self.cross = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages // 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for key, block in enumerate(self.encoder):
            with pp.stage(key):
                x = block(x)
        for key, (block, cross) in enumerate(zip(self.decoder, self.cross, strict=True), len(self.encoder)):
            with pp.stage(key):
                y = block(y + (y @ cross(x).transpose(1, 2)).softmax(-1) @ x)
        return y


@dataclass(frozen=True)
class Shape:
    """A model for a number of stages, and the shapes of its inputs and its target, without the rows."""

    make: Callable[[int], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    target: tuple[int, ...]

    def model(self, stages: int) -> nn.Module:
        torch.manual_seed(3)
        return self.make(stages).double()

    def batch(self, microbatches: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(4)
        rows = ROWS * microbatches
        return [torch.randn(rows, *shape).double() for shape in self.inputs], torch.randn(rows, *self.target).double()

    def pipeline(self, model: nn.Module, microbatches: int, **options: object) -> pp.Pipeline:
        inputs, target = self.batch(microbatches)
        example = tuple(tensor[:ROWS] for tensor in inputs)
        loss = functional.mse_loss
        return pp.pipeline(model, example, targets=target[:ROWS], loss=loss, microbatches=microbatches, **options)

    def plain(self, stages: int, microbatches: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """Run the plain loop; return the model with its gradients, the loss and the output of the whole batch."""
        model = self.model(stages)
        inputs, target = self.batch(microbatches)
        total, outputs = torch.zeros((), dtype=torch.float64), []
        for m in range(microbatches):
            rows = slice(m * ROWS, (m + 1) * ROWS)
            output = model(*(tensor[rows] for tensor in inputs))
            loss = functional.mse_loss(output, target[rows])
            (loss / microbatches).backward()
            total = total + loss.detach() * (1.0 / microbatches)
            outputs.append(output.detach())
        return model, total, torch.cat(outputs)


SHAPES = {
    "chain": Shape(Chain, ((6,),), (6,)),
    "unet": Shape(UNet, ((2, 4, 4),), (2, 4, 4)),
    "branches": Shape(Branches, ((6,),), (6,)),
    "encoder_decoder": Shape(Translator, ((3, 6), (2, 6)), (2, 6)),
}
