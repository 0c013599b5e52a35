"""Toys about tensors of the model that forward reads and writes: buffers, parameters, plain attributes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, Outcome, tensors, toy

__all__: list[str] = []


@toy("3.20")
class BufferIsReadInGlue(Net):
    def setup(self) -> None:
        self.register_buffer("scale", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * self.scale
        with pp.stage(1):
            return self.b(h)


@toy("3.20")
class BufferIsReadInTwoStages(Net):
    """Nobody writes it: every stage reads its own."""

    def setup(self) -> None:
        self.register_buffer("scale", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * self.scale
        with pp.stage(1):
            return self.b(h) - self.scale


@toy("3.20")
class BufferIsWrittenInPlaceInGlue(Net):
    def setup(self) -> None:
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = h - self.seen
        with pp.stage(1):
            return self.b(h)


@toy("3.20")
class BufferIsReassignedInGlue(Net):
    """`self.ema = ...` is a write of the live module, in the stage of the value."""

    def setup(self) -> None:
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
            return self.b(h + self.ema)


@toy("3.20")
class BufferCountsCalls(Net):
    def setup(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            self.calls += 1
            h = self.a(x) * self.calls
        with pp.stage(1):
            return self.b(h)


@toy("6.6", "3.20", outcome=Outcome.REFUSED)
class BufferIsWrittenInOneStageAndReadInAnother(Net):
    def setup(self) -> None:
        self.register_buffer("level", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.level.add_(h.detach().mean(0))
        with pp.stage(1):
            return self.b(h) * self.level


@toy("6.6", "3.20", outcome=Outcome.REFUSED)
class BufferIsReassignedInOneStageAndReadInAnother(Net):
    def setup(self) -> None:
        self.register_buffer("level", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) - self.level
        with pp.stage(1):
            self.level = h.detach().mean(0)
            return self.b(h)


@toy("3.20", inputs=tensors((6, 4)))
class BatchNormInBothStages(Net):
    def setup(self) -> None:
        self.norm1, self.norm2 = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.norm1(self.a(x)).relu()
        with pp.stage(1):
            return self.norm2(self.b(h))


@toy("3.20", "6.6", outcome=Outcome.REFUSED, inputs=tensors((6, 4)))
class SharedBatchNormInTwoStages(Net):
    """Its running mean is written in both stages."""

    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.norm(self.a(x))
        with pp.stage(1):
            return self.norm(self.b(h))


@toy("3.20", outcome="sum-order", inputs=tensors((6, 4)))
class BatchNormInEvalIsOnlyRead(Net):
    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.fill_(0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.norm(self.a(x))
        with pp.stage(1):
            return self.norm(self.b(h))


@toy("3.20", inputs=tensors((6, 4)))
class FunctionalBatchNormInGlue(Net):
    """Writes its buffers through arguments."""

    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            n = self.norm
            h = F.batch_norm(h, n.running_mean, n.running_var, n.weight, n.bias, training=self.training, momentum=0.2)
            return self.b(h)


@toy("3.20")
class SpectralNorm(Net):
    """A parametrization with buffers that change in forward."""

    def setup(self) -> None:
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.spectral(h))


@toy("6.7", "3.20")
class StateIsCarriedWithinAStage(Net):
    """Read and set in one stage: the live attribute is used, micro-batch after micro-batch."""

    def setup(self) -> None:
        self.state = torch.zeros(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h) + self.state
            self.state = y.detach()
            return y


@toy("3.20")
class TensorInAPlainAttribute(Net):
    """Neither parameter nor buffer: read from the live module."""

    def setup(self) -> None:
        self.numbers = torch.linspace(1, 2, 4)
        self.by_name = {"shift": torch.linspace(-1, 1, 4)}

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * self.numbers
        with pp.stage(1):
            return self.b(h) + self.by_name["shift"]


@toy("3.20", "3.28")
class OldWeightNorm(Net):
    """A forward pre-hook that sets a plain tensor `weight` on its module in each call."""

    def setup(self) -> None:
        torch.nn.utils.weight_norm(self.b)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.20", inputs=lambda: ((torch.randint(0, 9, (3, 5)),), {}))
class EmbeddingRenormalisesItself(nn.Module):
    """`max_norm` writes the parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.embed(tokens)
        with pp.stage(1):
            return self.head(h)


@toy("3.20")
class MomentumTeacher(Net):
    """Weights of a frozen twin follow those of a layer, in glue."""

    def setup(self) -> None:
        self.c.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            with torch.no_grad():
                for slow, fast in zip(self.c.parameters(), self.b.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                target = self.c(h)
            return self.b(h) - target


@toy("6.6", "3.20", outcome=Outcome.REFUSED)
class WeightIsWrittenInOneStageAndUsedInAnother(Net):
    def setup(self) -> None:
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            with torch.no_grad():
                self.a.weight.mul_(0.9)
            return self.b(h)


@toy("3.20")
class BufferDictAndLists(Net):
    """A queue in a buffer, written at a running position that is a buffer as well."""

    def setup(self) -> None:
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            rows = (self.position + torch.arange(4)) % 8
            self.queue[rows] = h.detach()
            self.position.add_(4).remainder_(8)
            return self.b(h) @ self.queue.clone().T
