"""Toys about what goes in and comes out: trees of arguments and results, of modules and of the model."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ppdsl as pp
from tests.recording.toys.base import Net, tensors, toy

__all__: list[str] = []


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class State:
    h: Tensor
    count: int = 0
    extra: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class FrozenState:
    h: Tensor
    name: str = "state"


class ModelOutput(OrderedDict):
    """As in Hugging Face: a dict whose values are also attributes and items, without those that are None."""

    def __init__(self, **values: Any) -> None:
        super().__init__((k, v) for k, v in values.items() if v is not None)
        for name, value in values.items():
            super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class TakesAll(nn.Module):
    """Takes and gives every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, tree: dict[str, Any], *rest: Tensor, scale: float = 1.0, name: str | None = None) -> Any:
        y = self.inner(tree["h"]) * scale + sum(rest)
        pair = tree["pair"]
        return {"y": y, "pair": Pair(pair.right, pair.left), "list": [y, None, 3, name], "state": State(y * 2, 5)}


@toy("3.22")
class TreesOfModules(Net):
    def setup(self) -> None:
        self.first, self.second = TakesAll(), TakesAll()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            out = self.first({"h": self.a(x), "pair": Pair(x, self.b(x))}, x, x * 2, scale=0.5, name="first")
        with pp.stage(1):
            out = self.second({"h": out["state"].h, "pair": out["pair"]}, out["list"][0], name=out["list"][3])
            return out["y"] + out["pair"].left * out["list"][2] + out["state"].count


@toy("3.22", inputs=lambda: (({"x": torch.randn(4, 4), "mask": torch.ones(4, 4)},), {"scale": 2.0, "mode": "full"}))
class DictArgument(Net):
    def forward(self, batch: dict[str, Tensor], *, scale: float, mode: str) -> dict[str, Any]:
        with pp.stage(0):
            h = self.a(batch["x"])
        with pp.stage(1):
            y = self.b(h) * batch["mask"] * scale
            return {"y": y, "mode": mode, "count": 3, "nothing": None}


@toy("3.22", inputs=lambda: ((), {"right": torch.randn(4, 4), "left": torch.randn(4, 4)}))
class KeywordArgumentsOnly(Net):
    """Given in another order than declared."""

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(left)
        with pp.stage(1):
            return self.b(h) - right


@toy("3.22", inputs=lambda: ((Pair(torch.randn(4, 4), torch.randn(4, 4)), [torch.randn(4, 4), None, 2]), {}))
class NamedTupleAndListArguments(Net):
    def forward(self, pair: Pair, rest: list[Any], extra: Tensor | None = None) -> Pair:
        with pp.stage(0):
            h = self.a(pair.left) + rest[0]
        with pp.stage(1):
            return Pair(self.b(h), pair.right * rest[2])


@toy("3.22", inputs=lambda: ((torch.randn(4, 4), None, 3, "relu", (2, 2)), {}))
class ArgumentsThatAreNoTensors(Net):
    def forward(self, x: Tensor, mask: Tensor | None, rounds: int, activation: str, size: tuple[int, ...]) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            for _ in range(rounds):
                h = getattr(F, activation)(self.b(h))
            return h.view(*size, 4) if mask is None else h


@toy("3.22", inputs=tensors((4, 4), (4, 4), (4, 4)))
class StarArguments(Net):
    def forward(self, *parts: Tensor, **options: Any) -> Tensor:
        with pp.stage(0):
            h = self.a(sum(parts[1:], parts[0]))
        with pp.stage(1):
            return self.b(h) + parts[2]


@toy("3.22", inputs=tensors((4, 4), bias=(4,)))
class DefaultArguments(Net):
    def forward(self, x: Tensor, scale: float = 0.5, bias: Tensor | None = None) -> Tensor:
        with pp.stage(0):
            h = self.a(x) * scale
        with pp.stage(1):
            return self.b(h) + bias


@toy("3.22")
class TupleOutput(Net):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h), (h, [None, 7]), {}


@toy("3.22")
class NamedTupleOutput(Net):
    def forward(self, x: Tensor) -> Pair:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return Pair(left=h, right=self.b(h))


@toy("3.22")
class DataclassOutput(Net):
    def forward(self, x: Tensor) -> tuple[State, FrozenState]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return State(self.b(h), 4), FrozenState(h, "first")


@toy("3.22")
class DictLikeOutput(Net):
    def forward(self, x: Tensor) -> ModelOutput:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return ModelOutput(logits=self.b(h), hidden=(h,), attentions=None)


@toy("3.22")
class ModelOutputBetweenStages(Net):
    """A stage reads attributes of an output object that another stage filled."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            out = ModelOutput(logits=self.a(x), hidden=(x,), attentions=None)
        with pp.stage(1):
            return self.b(out.logits) + out[1][0] if out.attentions is None else out.logits


@toy("3.22", inputs=lambda: ((State(torch.randn(4, 4), 2),), {}))
class DataclassArgument(Net):
    def forward(self, state: State) -> Tensor:
        with pp.stage(0):
            h = self.a(state.h) * state.count
        with pp.stage(1):
            return self.b(h) if state.extra is None else h


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x


@toy("3.22")
class GeneratorAsAResult(Net):
    """A generator module runs only when it is read, in the stage that reads it."""

    def setup(self) -> None:
        self.pyramid = Generates()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            levels = list(self.pyramid(self.a(x)))
        with pp.stage(1):
            return self.b(levels[0]) + levels[2]


class SumsUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return self.inner(sum(parts))


@toy("3.22")
class GeneratorAsAnArgument(Net):
    def setup(self) -> None:
        self.sums = SumsUp()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.sums(h * k for k in range(1, 4)) + self.sums(iter([h, x]))


@toy("3.22")
class SlicesAndEllipsis(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            part = slice(1, None)
        with pp.stage(1):
            return self.b(h[..., None, :][part, 0, :])[:, torch.tensor([0, 2])]


@toy("3.22")
class GlueOfAllKinds(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = F.layer_norm(self.a(x), (4,))
            q = torch.einsum("ij,kj->ik", h, h)
        with pp.stage(1):
            parts = torch.stack([h, q], dim=0).permute(1, 0, 2).flatten(1)
            top, index = parts.topk(4, dim=-1)
            sorted_ = torch.sort(top, descending=True).values
            y = torch.cat([sorted_, F.pad(h, (1, 1))], dim=1).gather(1, index)
            return self.b(y) @ torch.linalg.norm(h, dim=0, keepdim=True).T


@toy("3.22")
class OperatorsOfAllKinds(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = 2 - self.a(x) ** 2
            h = 1 / (1 + abs(h)) + (-h).detach() // 3 + h % 2
        with pp.stage(1):
            keep = (h > 0) & ~(h > 2) | (x == 0)
            return self.b(h) * keep + (h @ x.T).mT


@toy("3.22")
class TensorMethodsByTheirClass(Net):
    """`torch.Tensor.relu(x)`, `torch.ops.aten`, bound methods kept in a variable."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = torch.Tensor.relu(self.a(x))
            add = h.add
        with pp.stage(1):
            return self.b(torch.ops.aten.mul.Tensor(add(1), x))


def sequences() -> Any:
    return (torch.randn(4, 3, 4), torch.tensor([4, 2, 1])), {}


class Packs(nn.Module):
    """Packed sequences stay inside of one module: it is probed, and called whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths)
        if not isinstance(packed, PackedSequence):
            raise TypeError
        return pad_packed_sequence(self.rnn(packed)[0], total_length=x.shape[0])[0]


@toy("3.22", "3.14", inputs=sequences)
class PackedSequenceInsideAModule(Net):
    def setup(self) -> None:
        self.packs = Packs()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.packs(h, lengths))


@toy("3.22", "3.8", inputs=lambda: ((), {"x": (shared := torch.randn(4, 4)), "y": shared}))
class SameTensorTwiceInTheArguments(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + y
        with pp.stage(1):
            return self.b(h) * y


class Result:
    """An object of the user's own, with a number beside its tensors."""

    def __init__(self, tensor: Tensor, rows: int) -> None:
        self.tensor = tensor
        self.rows = rows


@toy("3.22", "5.10")
class ObjectOutput(Net):
    def forward(self, x: Tensor) -> Result:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return Result(self.b(h), len(x))
