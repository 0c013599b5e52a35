"""Toys about writing: in-place operations on what was received, views, layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, Outcome, tensors, toy

__all__: list[str] = []


@toy("3.6", stages="0 1", edges="0>1")
class ReluWritesWhatItReceived(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h.relu_())


@toy("3.6", stages="0 1", edges="0>1")
class ReluModuleWritesWhatItReceived(Net):
    """The write happens inside an opaque module; only the version counter shows it."""

    def setup(self) -> None:
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            self.relu(h)
            return self.b(h)


@toy("3.6", stages="0 1 2", edges="0>1 1>2 1>2")
class WrittenValueIsReadLater(Net):
    """Stage 2 reads the tensor of stage 0 after stage 1 wrote it: the edge comes from the writer."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h.mul_(2)
            y = self.b(h)
        with pp.stage(2):
            return self.c(y) + h


@toy("3.6", outcome="sum-order", stages="0 1 2", edges="0>1,2 1>2")
class OldValueIsReadBeforeTheWrite(Net):
    """Stage 1 reads the value before stage 2 writes it in place."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * 1.5
        with pp.stage(1):
            y = h.exp()
        with pp.stage(2):
            h += 1
            return self.c(y) + h.sin()


@toy("3.6", stages="0 1 2", edges="0>1 0>2 1>2")
class AddIntoASkip(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            skip = h * 2
        with pp.stage(1):
            y = self.b(h)
        with pp.stage(2):
            skip += y
            return self.c(skip)


@toy("3.6", stages="0 1", edges="0>1")
class WriteAtAnIndex(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h[:, 1] = 0.5
            h[0] *= 2
            return self.b(h)


@toy("3.6", inputs=lambda: ((torch.randn(4, 4), torch.tensor([2, 0])), {}))
class IndexPutWithAnInput(Net):
    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h.index_put_((rows,), torch.ones(2, 4), accumulate=True)
            return self.b(h)


@toy("3.6")
class MaskedFillAndClamp(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            mask = x > 0
        with pp.stage(1):
            h.masked_fill_(mask, 0.25).clamp_(-0.5, 0.5)
            return self.b(h)


@toy("3.6")
class OutArgument(Net):
    """`out=` writes a tensor that another stage allocated; autograd allows it only without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            room = torch.zeros_like(x)
            h = self.a(x)
        with pp.stage(1):
            torch.mul(x, 3.0, out=room)
            return self.b(h) + room


@toy("3.6")
class FreshZerosAreFilled(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            out = torch.zeros(4, 8)
            out[:, :4] = h
            out[:, 4:] = self.b(h)
            return out


@toy("3.6", stages="0 1 2", edges="0>1 1>2")
class ZerosAreFilledByTwoStages(Net):
    """Each stage fills a part; the next one gets what was written so far."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(4, 12)
        with pp.stage(0):
            out[:, :4] = self.a(x)
        with pp.stage(1):
            out[:, 4:8] = self.b(out[:, :4].clone())
        with pp.stage(2):
            out[:, 8:] = self.c(out[:, 4:8].clone())
            return out


@toy("3.6")
class WritesTheCallersTensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if x.requires_grad else x
        with pp.stage(0):
            x.mul_(2)
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) + x


@toy("3.6")
class DataIsWritten(Net):
    """`.data` and `copy_` under no_grad: autograd does not see the write."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
            with torch.no_grad():
                y.copy_(y * 0.5)
            return self.c(y)


@toy("3.6")
class InplaceDropoutAndActivations(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = F.dropout(h, 0.5, training=self.training, inplace=True)
            h = F.leaky_relu(h, 0.1, inplace=True)
            return self.b(F.silu(h, inplace=False))


@toy("3.6")
class AssignmentThroughPlusEqualsOnASlice(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h[..., :2] += self.b(x)[..., 2:]
            return self.c(h)


@toy("3.7", stages="0 1", edges="0>1")
class ViewIsSent(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).view(2, 2, 4).transpose(0, 1)
        with pp.stage(1):
            return self.b(h)


@toy("3.7")
class ViewIsWrittenWithinAStage(Net):
    """The base changes with its view: stage 1 must get the changed base."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            row = h[0]
            row.mul_(3)
        with pp.stage(1):
            return self.b(h)


@toy("3.7")
class BaseIsWrittenWithinAStage(Net):
    """The view changes with its base."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            row = h[:2]
            h.mul_(3)
            y = row.sum(0)
        with pp.stage(1):
            return self.b(h) + y


@toy("3.7", "6.4", outcome=Outcome.REFUSED)
class ViewIsReadAfterItsBaseWasWrittenElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            row = h[0]
        with pp.stage(1):
            h.mul_(3)
            y = self.b(h)
        with pp.stage(2):
            return self.c(y) + row


@toy("3.7", "6.4", outcome=Outcome.REFUSED)
class BaseIsReadAfterItsViewWasWrittenElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            row = h[0]
        with pp.stage(1):
            row.mul_(3)
            y = self.b(row)
        with pp.stage(2):
            return self.c(h) + y


@toy("3.7", stages="0 1", edges="0>1 0>1")
class ViewAndBaseAreReadInTheNextStage(Net):
    """Nobody writes: two names of one memory are harmless."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        row = h[1:3]
        with pp.stage(1):
            return self.b(h).sum() + self.c(row)


@toy("3.7")
class ChunksAreSent(Net):
    def setup(self) -> None:
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        with pp.stage(1):
            h = (q @ k.T).softmax(-1)
        with pp.stage(2):
            return self.b(h @ v)


@toy("3.7")
class SplitAndUnbind(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            left, right = self.a(x).split([1, 3], dim=1)
            rows = self.b(x).unbind(0)
        with pp.stage(1):
            return self.c(torch.cat([right, left], dim=1)) + rows[1] * rows[3]


@toy("3.7")
class ViewIsMadeAndWrittenInTheNextStage(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h.view(-1)[::2].add_(1)
            return self.b(h)


@toy("3.7", stages="0 1", edges="0>1")
class ExpandedTensorIsSent(Net):
    """Stride 0: a contiguous receive buffer holds the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)[:1].expand(4, 4)
        with pp.stage(1):
            return self.b(h)


@toy("3.7", inputs=tensors((2, 3, 4, 4)))
class ChannelsLastIsSent(Net):
    def setup(self) -> None:
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.conv1(x.to(memory_format=torch.channels_last))
        with pp.stage(1):
            y = self.conv2(h)
            return y.contiguous() if h.is_contiguous(memory_format=torch.channels_last) else y * 0


@toy("3.7")
class TransposedLayoutSteersPython(Net):
    """Layout is known while recording: what asks for it gets the truth."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).T
        with pp.stage(1):
            return self.b(h) if not h.is_contiguous() else self.c(h)


@toy("3.7", inputs=lambda: ((torch.randn(4, 4).to_sparse(),), {}))
class SparseInput(Net):
    """A sparse tensor has no storage to compare."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = torch.sparse.mm(x, self.a.weight)
        with pp.stage(1):
            return self.b(h)


@toy("3.7")
class ComplexEdge(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = torch.fft.rfft(self.a(x))
        with pp.stage(1):
            return self.b(torch.fft.irfft(h * (1 + 2j), n=4))


@toy("3.7")
class RealViewOfAComplexEdge(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = torch.view_as_complex(self.a(x).view(4, 2, 2))
        with pp.stage(1):
            return self.b(torch.view_as_real(h).flatten(1))


@toy("3.7", stages="0 1")
class IntegerAndBooleanEdges(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
            best, positive = h.argmax(-1), h > 0
        with pp.stage(1):
            return self.b(F.one_hot(best, 4).float()) * positive, best


@toy("3.6", "3.7")
class WriteIntoAReceivedView(Net):
    """The view shares memory with a value of the sender."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).sin()
            part = h[:, :2]
        with pp.stage(1):
            part += 1
            return torch.cat([part, part], dim=1) * self.b(x)


def two() -> Any:
    return (torch.randn(4, 4), torch.randn(4, 4)), {}


@toy("3.6", inputs=two)
class SetDataOfAReceivedTensor(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            g = self.b(h).detach()
            g.data = y
            return self.c(g) + self.d(h)


@toy("3.3", "3.6", stages="0 1 2", edges="0>1 1>2 1>2")
class ConversionThatGivesTheSameTensorBack(Net):
    """`float()`, `contiguous()` and `to()` return the very tensor when there is nothing to do."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            same = h.float().contiguous().to("cpu")
            same.mul_(2)
            y = self.b(x.to(same))
        with pp.stage(2):
            return self.c(y) + h


@toy("3.6")
class BooleanMaskIsWritten(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            keep = x > 0
            h = self.a(x) * keep.float()
        with pp.stage(1):
            keep[:, 0] = True
            keep &= h > -0.2
            return self.b(h) * keep.float()


@toy("3.7")
class EmptyAndScalarEdges(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            nothing, total = h[:0], h.sum()
        with pp.stage(1):
            return torch.cat([nothing, self.b(h)]) * total


@toy("3.7", stages="0 1", edges="0>1")
class ViewOfAnInputIsWritten(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        with pp.stage(0):
            left, _right = x.split(2, dim=1)
            left.add_(1)
            h = self.a(x)
        with pp.stage(1):
            return self.b(h)


@toy("3.6")
class ScatterAndIndexAdd(Net):
    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(4).expand(4, 4)
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            out = torch.zeros_like(h).scatter_(0, index, h).index_add_(0, index[0], h)
            return self.b(out)


@toy("3.6", "3.8", stages="0 1", edges="0>1")
class WrittenAfterBeingAnOutput(Net):
    """The output is the tensor object: what is written later shows in it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            result = [h]
            y = self.b(h.detach() * 2)
            h.mul_(3)
            return result[0], y
