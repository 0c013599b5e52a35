"""Toys about what torch and its users do with modules: hooks, flags, recurrent layers, overridden calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, tensors, toy
from tests.recording.toys.modules import Crossing

__all__: list[str] = []


class CheckpointLayer(nn.Module):
    """Overrides `__call__`, as Hugging Face's checkpointing layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class CallsCrossing(CheckpointLayer):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.inner(x)
        with pp.stage(1):
            return h.relu()


@toy("3.12")
class OverriddenCall(Net):
    def setup(self) -> None:
        self.twice, self.crossing = CheckpointLayer(), CallsCrossing()

    def forward(self, x: Tensor) -> Tensor:
        h = self.crossing(x)
        with pp.stage(1):
            return self.twice(h) + self.b(h)


@toy("3.13")
class ForwardIsCalledDirectly(Net):
    def setup(self) -> None:
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a.forward(x)
        with pp.stage(1):
            return self.b.forward(self.drop.forward(h))


@toy("3.13")
class FunctionalDropoutWithTrainingFlag(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = F.dropout(self.a(x), 0.3, training=self.training)
        with pp.stage(1):
            return F.dropout(self.b(h), 0.3, self.training)


@toy("3.13")
class DropoutModulesWithTheSameSeed(Net):
    def setup(self) -> None:
        self.drop1, self.drop2 = nn.Dropout(0.5), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.drop1(self.a(x))
        with pp.stage(1):
            return self.drop2(self.b(h)) + torch.rand_like(h)


@toy("3.23", inputs=tensors((3, 4, 4)))
class RecurrentLayers(Net):
    """RNNs keep a second list of their weights."""

    def setup(self) -> None:
        self.lstm, self.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h, (last, _) = self.lstm(self.a(x))
        with pp.stage(1):
            y, hidden = self.gru(h, last)
            return y, hidden


@toy("3.23", inputs=tensors((3, 4, 4)))
class MultiheadAttention(Net):
    def setup(self) -> None:
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.attention(h, h, x)


@toy("3.23", inputs=tensors((3, 4, 8)))
class TransformerEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def mark(self) -> None:
        pp.begin(self.encoder.layers[1], 1)
        pp.begin(self.encoder.layers[2], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


@toy("3.23")
class ModulesInAPlainList(Net):
    """Not registered anywhere: torch does not list their parameters, so nobody trains them."""

    def setup(self) -> None:
        self.hidden = [nn.Linear(4, 4) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.hidden[0](self.a(x))
        with pp.stage(1):
            return self.hidden[1](self.b(h))


@toy("3.29")
class ScriptModuleIsOneCall(Net):
    def setup(self) -> None:
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.scripted(h))


@toy("3.12")
class CompiledSubmodule(Net):
    """A compiled submodule runs eagerly while recording."""

    def setup(self) -> None:
        self.compiled = torch.compile(nn.Linear(4, 4), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.compiled(h))


@toy("3.28")
class HooksChangeValues(Net):
    """Pre-hooks and hooks run at their place, once, with the module called whole."""

    def setup(self) -> None:
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.b.register_forward_hook(lambda module, args, output: output + 1)
        self.c.register_forward_pre_hook(
            lambda module, args, kwargs: ((), {"input": args[0] * kwargs.pop("scale")}), with_kwargs=True
        )

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.c(self.b(h), scale=3)


@toy("3.28")
class HooksOnAnInlinedModule(Net):
    """The module crosses stages: its hooks are recorded as glue."""

    def setup(self) -> None:
        self.block = Crossing()
        self.block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.block.register_forward_hook(lambda module, args, output: output.relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.block(x))


class ChangesItsFlag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.inner.training:
            return x
        self.inner.eval()
        y = self.inner(x)
        self.inner.train()
        return y


@toy("3.13")
class TrainingFlagChangesWhileRunning(Net):
    def setup(self) -> None:
        self.flag = ChangesItsFlag()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.flag(self.a(x))
        with pp.stage(1):
            return self.b(h)


class ReturnsItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self) -> Tensor:
        return self.table


@toy("3.3", "3.23")
class ModuleReturnsItsParameter(Net):
    def setup(self) -> None:
        self.table = ReturnsItsParameter()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + self.table()
        with pp.stage(1):
            return self.b(h)
