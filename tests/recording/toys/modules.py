"""Toys about module calls: which are called whole, which are inlined, which must be probed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, toy

__all__: list[str] = []


class KeepsItsInside(nn.Module):
    """Makes a tensor inside and leaves it on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x).sigmoid()
        return x * self.last


@toy("3.1", "3.2", lazy=True)
class InnerTensorIsUsedOutside(Net):
    def setup(self) -> None:
        self.keeper = KeepsItsInside()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.keeper(self.a(x))
        with pp.stage(1):
            return self.b(h) + self.keeper.last.sum()


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.first(x)
        with pp.stage(1):
            return self.second(h)


@toy("3.2", stages="0 1", edges="0>1")
class ModuleCrossesStages(Net):
    def setup(self) -> None:
        self.block = Crossing()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.block(x).relu())


class ReadsFromOutside(nn.Module):
    """Uses a tensor that is not among its arguments."""

    def __init__(self, shelf: list[Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.shelf[-1]


@toy("3.2", lazy=True)
class TensorComesInThroughAClosure(Net):
    def setup(self) -> None:
        self.shelf: list[Tensor] = []
        self.reader = ReadsFromOutside(self.shelf)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            self.shelf.append(self.a(x))
        with pp.stage(1):
            y = self.reader(self.b(x))
        self.shelf.clear()
        return y


class SetsOnAnother(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].hint = self.inner(x)
        return x * 2


class HasHint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.hint: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.hint


@toy("3.2", lazy=True)
class TensorIsSetOnAnotherModule(Net):
    def setup(self) -> None:
        self.reader = HasHint()
        self.setter = SetsOnAnother(self.reader)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.setter(self.a(x))
            h = self.reader(h)
        with pp.stage(1):
            return self.b(h)


class Cache:
    """Grows while the model runs, as Hugging Face's caches do."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return torch.cat(self.keys)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(self.inner(x))
        return (x @ keys.T).softmax(-1) @ keys


@toy("3.2")
class PythonObjectAmongTheArgumentsChanges(Net):
    def setup(self) -> None:
        self.layers = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                x = layer(x, cache)
        return x


@toy("3.2")
class HookAppendsToAList(Net):
    """Hidden states collected by forward hooks, as feature extractors do."""

    def setup(self) -> None:
        self.seen: list[Tensor] = []
        for layer in (self.a, self.b):
            layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.seen.clear()
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h.relu())
        result = (h, *self.seen)
        self.seen.clear()
        return result


class MaybeSkips(nn.Module):
    """Returns its input object unchanged when told so (layer drop)."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.active else x


@toy("3.3")
class ModuleReturnsItsInput(Net):
    def setup(self) -> None:
        self.on, self.off = MaybeSkips(True), MaybeSkips(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.off(self.on(self.a(x)))
        with pp.stage(1):
            return self.off(self.b(self.off(h)))


@toy("3.3")
class IdentityAndDropoutInEval(Net):
    def setup(self) -> None:
        self.id, self.drop = nn.Identity(), nn.Dropout(0.5)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.drop(self.id(self.a(x)))
        with pp.stage(1):
            return self.drop(h), self.b(self.id(h))


@toy("3.3")
class WholeModelReturnsItsInput(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return x, self.b(h)


@toy("4")
class SequentialLoop(Net):
    def setup(self) -> None:
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with pp.stage(number // 3):
                x = layer(x)
        return x


@toy("4", stages="0 1", edges="0>1")
class SequentialSlices(Net):
    """A slice of a Sequential is a new module made while the model runs."""

    def setup(self) -> None:
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.layers[:2](x)
        with pp.stage(1):
            return self.layers[2:](h)


@toy("4")
class ModuleDictLoop(Net):
    def setup(self) -> None:
        self.parts = nn.ModuleDict({"up": nn.Linear(4, 8), "act": nn.GELU(), "down": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for name, part in self.parts.items():
            with pp.stage(name):
                x = part(x)
        return x


class Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.here = nn.Linear(4, 4)
        self.children_ = nn.ModuleList(Tree(depth - 1) for _ in range(2 if depth else 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.here(x).tanh()
        for child in self.children_:
            x = x + child(x)
        return x


@toy("3.2")
class DeepTreeOfModules(Net):
    def setup(self) -> None:
        self.tree = Tree(3)

    def mark(self) -> None:
        pp.begin(self.tree.children_[1].children_[0], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.tree(self.a(x)))


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, rounds: int) -> Tensor:
        return self.inner(x) if rounds == 0 else self(self.inner(x).relu(), rounds - 1)


@toy("3.2", "3.30")
class ModuleCallsItself(Net):
    def setup(self) -> None:
        self.loop = CallsItself()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.loop(self.a(x), 2)
        with pp.stage(1):
            return self.b(h)


@toy("3.24", "3.30", outcome="sum-order", stages="0 1", edges="0>1")
class SharedModuleInTwoStages(Net):
    """ALBERT: one layer, called in both stages."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).relu()
        with pp.stage(1):
            return self.a(h)


@toy("3.2")
class KeywordOnlyModule(Net):
    def setup(self) -> None:
        self.bilinear = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(input=x)
        with pp.stage(1):
            return self.bilinear(input2=h, input1=x)


@toy("3.22")
class PartialAndLambda(Net):
    def setup(self) -> None:
        self.activation = functools.partial(F.leaky_relu, negative_slope=0.3)
        self.scale = lambda h, k=2: h * k

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.activation(self.a(x))
        with pp.stage(1):
            return self.scale(self.activation(self.b(h)), k=3)


class Remembers(nn.Module):
    """An attribute that is a tensor made in its own stage and used in the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.aux = y.pow(2).mean()
        return y


@toy("3.2", lazy=True)
class AuxiliaryLossInAnAttribute(Net):
    """Collected at the end from modules of both stages."""

    def setup(self) -> None:
        self.r1, self.r2 = Remembers(), Remembers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            h = self.r1(x)
        with pp.stage(1):
            y = self.r2(h)
            return y, self.r1.aux + self.r2.aux


class FailsAtTheEnd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("the user's own")


@toy("3.1")
class ModuleRaisesAndIsCaught(Net):
    """A call that raised left nothing: the frame is closed and forgotten."""

    def setup(self) -> None:
        self.fails = FailsAtTheEnd()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            try:
                h = self.fails(h)
            except ValueError:
                h = h * 2
        with pp.stage(1):
            return self.b(h)


class Swaps(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return right, left, right


@toy("3.3", "3.8")
class ModuleSwapsItsInputs(Net):
    """Three results, two tensors, none of them new."""

    def setup(self) -> None:
        self.swaps = Swaps()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with pp.stage(0):
            left, right, again = self.swaps(self.a(x), x)
        with pp.stage(1):
            return self.b(left) + again, self.swaps(right, left)[0]


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :2], x[:, 2:]


@toy("3.7", "3.2")
class ModuleReturnsViewsOfItsInput(Net):
    """A write through one of them must show in what the caller holds."""

    def setup(self) -> None:
        self.views = Views()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            left, _right = self.views(h)
            left.mul_(3)
        with pp.stage(1):
            return self.b(h)


class Calls(nn.Module):
    """Gets a module, or a function, among its arguments."""

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        return layer(x)


@toy("3.2", "3.22")
class ModuleAndFunctionAsArguments(Net):
    def setup(self) -> None:
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.calls(self.a, x)
        with pp.stage(1):
            return self.calls(lambda t: t.tanh() + h.sum(), self.calls(self.b, h))


@toy("3.2", lazy=True)
class GivenTensorIsAlsoReadThroughAClosure(Net):
    """The reader is given the tensor and finds it in its list too: called whole, it would find the list empty."""

    def setup(self) -> None:
        self.shelf: list[Tensor] = []
        self.reader = ReadsFromOutside(self.shelf)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            self.shelf.append(h)
            y = self.reader(h)
            self.shelf.clear()
        with pp.stage(1):
            return self.b(y)


@toy("3.2", "3.22")
class FunctionArgumentClosesOverItsOtherArgument(Net):
    def setup(self) -> None:
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            h = self.calls(lambda t: t * h.sum(), h)
        with pp.stage(1):
            return self.b(h)
