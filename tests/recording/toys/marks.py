"""Toys about where an operation belongs: blocks, cuts, begin and place, visits, skips, branches."""

from __future__ import annotations

from torch import Tensor, nn

import ppdsl as pp
from tests.recording.toys.base import Net, matrix, toy

__all__: list[str] = []


@toy("4", stages="0 1", edges="0>1")
class TwoBlocks(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x).relu()
        with pp.stage(1):
            return self.b(h)


@toy("4", stages="first second", edges="first>second")
class StringKeys(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("first"):
            h = self.a(x)
        with pp.stage("second"):
            return self.b(h)


@toy("4", stages="0 1", edges="0>1")
class ComputedKeys(Net):
    """Blocks 0 and 1 are stage 0, blocks 2 and 3 are stage 1: the same key again is the same stage."""

    def setup(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            with pp.stage(i // 2):
                x = block(x).tanh()
        return x


@toy("4")
class KeysInTheLoopVariable(Net):
    """`for stage_number in ...: with pp.stage(stage_number)`, one more stage in each round."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate((self.a, self.b, self.c, self.d)):
            with pp.stage(number):
                x = x + layer(x)
        return x


@toy("4", stages="0 1", edges="0>1")
class ReusedMarkObject(Net):
    """One mark object, entered twice."""

    def forward(self, x: Tensor) -> Tensor:
        first = pp.stage(0)
        with first:
            h = self.a(x)
        with first:
            h = self.b(h)
        with pp.stage(1):
            return self.c(h)


@toy("4", stages="0 1 2", edges="0>1 1>2")
class NestedBlocks(Net):
    """The innermost block wins, the outer one is restored."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
            with pp.stage(2):
                y = self.c(h)
        return self.d(y)


@toy("4", stages="0 1 0'", edges="0>1 1>0'")
class OuterStageGoesOnAfterInner(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            with pp.stage(1):
                h = self.b(h)
            return self.c(h)


@toy("4", stages="0 1 0'", edges="0>1 1>0'")
class OuterStageIsRestoredAfterAnException(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            try:
                with pp.stage(1):
                    h = self.b(h)
                    raise KeyError("the user's own")
            except KeyError:
                h = self.c(h)
            return h


@toy("4", stages="0 1", edges="0>1")
class ReturnFromInsideABlock(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        for layer in (self.b, self.c):
            with pp.stage(1):
                h = layer(h)
                if layer is self.c:
                    return h
        return self.d(h)


@pp.stage(1)
def decorated_function(layer: nn.Module, h: Tensor, *, scale: float = 1.0) -> Tensor:
    return layer(h) * scale


@toy("4", stages="0 1", edges="0>1")
class DecoratedFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        return decorated_function(self.b, h, scale=0.5)


@toy("4", stages="0 1", edges="0>1")
class DecoratedMethods(Net):
    @pp.stage(0)
    def encode(self, x: Tensor) -> Tensor:
        return self.a(x).relu()

    @pp.stage(1)
    def decode(self, h: Tensor) -> Tensor:
        return self.b(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class DecoratedForwardOfAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @pp.stage("late")
    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h)


@toy("4", stages="early late", edges="early>late")
class DecoratedForward(Net):
    def setup(self) -> None:
        self.late = DecoratedForwardOfAModule()

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("early"):
            h = self.a(x)
        return self.late(h)


@toy("4", stages="0 1 2", edges="0>1 1>2")
class Cutpoints(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = pp.cutpoint(self.a(x))
        h = pp.cutpoint(self.b(h).relu(), name="middle")
        return self.c(h)


@toy("4", stages="0 1", edges="0>1")
class OptionalCutpointIsOff(Net):
    """An optional cut is no border until a spec or the planner switches it on."""

    def forward(self, x: Tensor) -> Tensor:
        h = pp.cutpoint(self.a(x))
        h = pp.cutpoint(self.b(h), optional=True)
        return self.c(h)


@toy("4", stages="0 1", edges="0>1 0>1 0>1")
class CutpointTakesATree(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = pp.cutpoint({"h": self.a(x), "rest": [self.b(x), (self.c(x), 3, None)]})
        y, number, nothing = state["rest"][1]
        return state["h"] + state["rest"][0] + y * number + (0 if nothing is None else 1)


class CutInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(pp.cutpoint(self.up(x)).relu())


@toy("4", "3.2", stages="0 1", edges="0>1")
class CutpointInsideASubmodule(Net):
    """The submodule crosses the cut, so it is inlined; what follows it is the next stage."""

    def setup(self) -> None:
        self.block = CutInside()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.block(self.a(x)))


@toy("4", stages="0 1 2", edges="0>1 1>2")
class BeginStays(Net):
    """Embedding before the first begin is stage 0; head and loss stay in the last."""

    def setup(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def mark(self) -> None:
        pp.begin(self.blocks[1], 1)
        pp.begin(self.blocks[3], 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for block in self.blocks:
            h = block(h).relu()
        return self.d(h)


@toy("4", "3.2", stages="0 1", edges="0>1")
class BeginInsideADenseBlock(Net):
    """A begin on a child splits its parent; it is not popped when the parent returns."""

    def setup(self) -> None:
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def mark(self) -> None:
        pp.begin(self.block[2], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.block(self.a(x)) + x)


@toy("4", stages="0 1 0'", edges="0>1 1>0'")
class PlaceIsExactlyThisModule(Net):
    def mark(self) -> None:
        for module, key in ((self.a, 0), (self.b, 1), (self.c, 0)):
            pp.place(module, key)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.c(h + self.b(h))


@toy("4", stages="0 1", edges="0>1")
class PlacedModuleCalledTwice(Net):
    def mark(self) -> None:
        pp.place(self.a, 0)
        pp.place(self.b, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.b(self.a(x)).relu())


@toy("4", "3.4", stages="0 1 2", edges="0>1 1>2")
class CodeAfterTheBlocksStaysWithTheLast(Net):
    """Outside any block the stage is floating: no loop back to stage 0 for the last lines."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(2):
            h = self.c(h)
        return self.d(h).log_softmax(-1)


@toy("3.4", stages="0 1", edges="0>1")
class CodeBeforeTheBlocksGoesToItsConsumer(Net):
    """Nothing before it is marked: the first consumer takes it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with pp.stage(0):
            h = self.b(h)
        with pp.stage(1):
            return self.c(h)


@toy("3.4", stages="0 1", edges="0>1")
class GlueBetweenBlocks(Net):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        h = (h * 2).relu()
        with pp.stage(1):
            return self.b(h)


@toy("4")
class NoMarksAtAll(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@toy("4", "3.30", inputs=matrix)
class SharedModuleBegunOnce(Net):
    """One module called at two places of one stage, with begin on another module."""

    def mark(self) -> None:
        pp.begin(self.b, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.a(x))
        return self.b(h)
