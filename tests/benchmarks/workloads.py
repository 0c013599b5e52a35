"""Models to measure with: each as one marked module, and as the list of parts that a user of another tool cuts by hand.

Both views share their parameters, so that gradients of one can be compared with the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp

__all__ = ["WORKLOADS", "Chain", "Part", "Workload"]


class Block(nn.Module):
    """A causal transformer block, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Tokens(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position


class Perceptron(nn.Sequential):
    """Two layers with an activation between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Chain(nn.Module):
    """Units in order, cut into stages of near-equal numbers of the units in the middle.

    Args:
        units: What runs.
        stages: How many stages.
        ends: Units that go with the first and with the last stage, beside their share.
    """

    def __init__(self, units: Sequence[nn.Module], stages: int, ends: int = 0) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        middle = len(units) - 2 * ends
        self.cuts = [0, *(ends + round(i * middle / stages) for i in range(1, stages)), len(units)]

    def forward(self, x: Tensor) -> Tensor:
        for stage, (start, end) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            with pp.stage(stage):
                for unit in self.units[start:end]:
                    x = unit(x)
        return x


class Convolutions(nn.Sequential):
    """Two convolutions that keep the image's size."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()
        )


class UNet(nn.Module):
    """Two levels down and up again; the skips go from stage 0 to 3 and from 1 to 2."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        c = width
        self.enc0, self.down0 = Convolutions(3, c), nn.Conv2d(c, 2 * c, 2, stride=2)
        self.enc1, self.down1 = Convolutions(2 * c, 2 * c), nn.Conv2d(2 * c, 4 * c, 2, stride=2)
        self.mid, self.up1 = Convolutions(4 * c, 4 * c), nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
        self.dec1, self.up0 = Convolutions(4 * c, 2 * c), nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.dec0, self.head = Convolutions(2 * c, c), nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            first, deeper = self.descend(x)
        with pp.stage(1):
            second, deepest = self.descend_again(deeper)
        with pp.stage(2):
            up = self.turn(second, deepest)
        with pp.stage(3):
            return self.finish(first, up)

    def descend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.enc0(x)
        return skip, self.down0(skip)

    def descend_again(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.enc1(x)
        return skip, self.down1(skip)

    def turn(self, skip: Tensor, x: Tensor) -> Tensor:
        up = self.up1(self.mid(x))
        result: Tensor = self.up0(self.dec1(torch.cat([up, skip], 1)))
        return result

    def finish(self, skip: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.dec0(torch.cat([x, skip], 1)))
        return result


class Experts(nn.Module):
    """A trunk, four equal branches, and their sum."""

    def __init__(self, width: int = 256, hidden: int = 1024, classes: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.branches = nn.ModuleList(Perceptron(width, hidden) for _ in range(4))
        self.join = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            x = self.trunk(x)
        parts = []
        for number, branch in enumerate(self.branches):
            with pp.stage(number):
                parts.append(branch(x))
        with pp.stage(3):
            return self.meet(*parts)

    def meet(self, *parts: Tensor) -> Tensor:
        result: Tensor = self.join(sum(parts[1:], parts[0]))
        return result


@dataclass(frozen=True)
class Part:
    """One stage's own computation as plain modules: the least that any pipeline has to compute.

    Attributes:
        stage: Key of the stage it belongs to.
        run: Takes tensors and returns a tensor or a tuple of them.
        takes: Names of what it takes; `x` is the input.
        gives: Names of what it returns.
    """

    stage: int
    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """A model with data.

    Attributes:
        name: Short.
        make: Builds the model for a number of stages.
        batch: Returns input and target of so many rows.
        loss: Of output and target.
        rows: Rows of a micro-batch.
        parts: The model's stages as plain computations, in an order that can run.
        chain: Whether it can be cut into a chain of modules.
        device: Where model and data are.
    """

    name: str
    make: Callable[[int], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    rows: int
    parts: Callable[[Any], list[Part]]
    chain: bool = True
    device: torch.device = _CPU

    def model(self, stages: int) -> nn.Module:
        """Return the model on its device, always with the same parameters."""
        torch.manual_seed(20_240)
        return self.make(stages).to(self.device)

    def data(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Return a batch, always the same."""
        x, y = self.batch(self.rows * microbatches, torch.Generator().manual_seed(7))
        return x.to(self.device), y.to(self.device)

    def settle(self) -> None:
        """Wait until the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _parts_of_chain(model: Chain) -> list[Part]:
    parts = []
    for stage, (start, end) in enumerate(zip(model.cuts, model.cuts[1:], strict=False)):
        takes = "x" if stage == 0 else f"h{stage - 1}"
        parts.append(Part(stage, nn.Sequential(*model.units[start:end]), (takes,), (f"h{stage}",)))
    return parts


def _parts_of_unet(model: UNet) -> list[Part]:
    return [
        Part(0, model.descend, ("x",), ("skip0", "d0")),
        Part(1, model.descend_again, ("d0",), ("skip1", "d1")),
        Part(2, model.turn, ("skip1", "d1"), ("up",)),
        Part(3, model.finish, ("skip0", "up"), ("y",)),
    ]


def _parts_of_experts(model: Experts) -> list[Part]:
    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        trunk = model.trunk(x)
        return trunk, model.branches[0](trunk)

    def last(trunk: Tensor, *others: Tensor) -> Tensor:
        return model.meet(*others, model.branches[3](trunk))

    middle = [Part(i, model.branches[i], ("t",), (f"b{i}",)) for i in (1, 2)]
    return [Part(0, first, ("x",), ("t", "b0")), *middle, Part(3, last, ("t", "b0", "b1", "b2"), ("y",))]


def _language(name: str, width: int, heads: int, length: int, vocabulary: int, rows: int) -> Workload:
    def make(stages: int) -> nn.Module:
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        blocks = [Block(width, heads) for _ in range(8)]
        return Chain([Tokens(vocabulary, width, length), *blocks, head], stages, ends=1)

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        first, second = (torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(2))
        return first, second

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return Workload(name, make, batch, loss, rows, _parts_of_chain)


def _numbers(
    before: tuple[int, ...], after: tuple[int, ...]
) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, *before, generator=generator), torch.randn(rows, *after, generator=generator)

    return batch


WORKLOADS = {
    workload.name: workload
    for workload in (
        _language("gpt", width=256, heads=4, length=128, vocabulary=1000, rows=2),
        _language("tiny", width=32, heads=2, length=8, vocabulary=64, rows=1),
        Workload(
            "unet", lambda _: UNet(), _numbers((3, 32, 32), (2, 32, 32)), functional.mse_loss, 4, _parts_of_unet, False
        ),
        Workload(
            "experts", lambda _: Experts(), _numbers((32, 256), (32, 64)), functional.mse_loss, 8, _parts_of_experts,
            False,
        ),
        Workload(
            "mlp16", lambda stages: Chain([Perceptron(128, 256) for _ in range(16)], stages), _numbers((128,), (128,)),
            functional.mse_loss, 64, _parts_of_chain,
        ),
    )
}  # fmt: skip
"""By name."""
