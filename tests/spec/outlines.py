"""Small models as outlines, without torch: a forward is a function that calls modules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ppdsl.graph.outline import Cutpoint, ModelOutline, ModuleCall, ModuleInfo, ParameterInfo, Step
from ppdsl.source import Span
from ppdsl.spec.partition import AtCutpoint as AtCut
from ppdsl.spec.partition import (
    CallOf,
    Difference,
    OfType,
    Part,
    PartKind,
    Path,
    Regex,
    Rest,
    Selection,
)
from ppdsl.units import Bytes, Flops

HERE = Span("net.ppspec", 1, 1, 1, 2)


@dataclass
class Net:
    """Builds an outline: declare modules, then record calls and steps.

    >>> net = Net()
    >>> _ = net.module("a", count=4)
    >>> with_a = net.run("a")
    >>> [step.name for step in net.outline().steps]
    ['linear']
    """

    name: str = "Net"
    modules: dict[str, ModuleInfo] = field(default_factory=dict)
    parameters: dict[str, ParameterInfo] = field(default_factory=dict)
    calls: list[list] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    cutpoints: list[Cutpoint] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules[""] = ModuleInfo("", (self.name,))
        self._begin("")

    def module(
        self, name: str, kind: str = "Linear", count: int = 0, aliases: Sequence[str] = (), trainable: bool = True
    ) -> str:
        """Declare a module, and the containers around it; `count` above 0 gives it a parameter `weight`."""
        parent = name.rpartition(".")[0]
        if parent not in self.modules:
            self.module(parent, "ModuleList")
        own = (f"{name}.weight",) if count else ()
        self.modules[name] = ModuleInfo(name, (kind,), own, tuple(aliases))
        if count:
            names = tuple(f"{n}.weight" for n in (name, *aliases))
            self.parameters[names[0]] = ParameterInfo(names, count, Bytes(4 * count), trainable)
        return name

    def parameter(self, name: str, count: int = 1) -> str:
        """Declare a parameter right in a module."""
        owner = name.rpartition(".")[0]
        info = self.modules[owner]
        self.modules[owner] = ModuleInfo(owner, info.types, (*info.parameters, name), info.aliases)
        self.parameters[name] = ParameterInfo((name,), count, Bytes(4 * count))
        return name

    def tie(self, first: str, second: str) -> None:
        """Make two parameters one."""
        one = self.parameters[first]
        del self.parameters[second]
        self.parameters[first] = ParameterInfo((*one.names, second), one.count, one.bytes, one.trainable)

    def call(self, name: str, body: Callable[[], int]) -> int:
        """Call a module whose forward is `body`, which returns a step."""
        self._begin(name)
        result = body()
        self._end()
        return result

    def run(self, name: str, *needs: int, flops: int = 1, op: str = "linear") -> int:
        """Call a module that is one step, with all of its parameters."""
        return self.call(name, lambda: self.step(*needs, flops=flops, op=op, parameters=self._own(name)))

    def step(self, *needs: int, flops: int = 1, op: str = "add", parameters: Sequence[str] = ()) -> int:
        """Record one step in the innermost call."""
        index = len(self.steps)
        call = self.stack[-1] if self.stack else None
        self.steps.append(Step(index, call, op, tuple(needs), tuple(parameters), Flops(flops), Bytes(8)))
        return index

    def cutpoint(self, name: str | None = None) -> None:
        """Pass a cutpoint."""
        self.cutpoints.append(Cutpoint(name, len(self.steps), False))

    def finish(self) -> None:
        """End the model's own call: what follows is the loss."""
        self._end()

    def outline(self) -> ModelOutline:
        """Return what was built."""
        while self.stack:
            self._end()
        # Only now is a tied parameter's second owner known by the first name.
        first = {name: p.names[0] for p in self.parameters.values() for name in p.names}
        modules = tuple(
            ModuleInfo(m.name, m.types, tuple(first[p] for p in m.parameters), m.aliases) for m in self.modules.values()
        )
        steps = tuple(
            Step(s.index, s.call, s.name, s.needs, tuple(first[p] for p in s.parameters), s.flops, s.bytes)
            for s in self.steps
        )
        calls = tuple(ModuleCall(*call) for call in self.calls)
        return ModelOutline(self.name, modules, tuple(self.parameters.values()), calls, steps, tuple(self.cutpoints))

    def _own(self, name: str) -> tuple[str, ...]:
        return self.modules[name].parameters

    def _begin(self, name: str) -> None:
        index = len(self.calls)
        number = sum(call[1] == name for call in self.calls)
        self.calls.append([index, name, number, self.stack[-1] if self.stack else None, len(self.steps), -1])
        self.stack.append(index)

    def _end(self) -> None:
        self.calls[self.stack.pop()][5] = len(self.steps)


def chain(blocks: int = 12, flops: Sequence[int] | None = None, counts: Sequence[int] | None = None) -> ModelOutline:
    """`transformer.wte`, `transformer.h.0` to `.11` with `attn` and `mlp`, `transformer.ln_f`, `lm_head`; tied."""
    net = Net("GPT")
    net.module("transformer", "Transformer")
    net.module("transformer.wte", "Embedding", count=100)
    for at in range(blocks):
        net.module(f"transformer.h.{at}", "Block")
        net.module(f"transformer.h.{at}.attn", "Attention", count=(counts or [4] * blocks)[at])
        net.module(f"transformer.h.{at}.mlp", "MLP", count=8)
    net.module("transformer.ln_f", "LayerNorm", count=2)
    net.module("lm_head", "Linear", count=100)
    net.tie("transformer.wte.weight", "lm_head.weight")

    def body() -> int:
        x = net.step(net.run("transformer.wte", flops=0), op="add")
        for at in range(blocks):
            weight = (flops or [10] * blocks)[at]

            def block(at: int = at, x: int = x, weight: int = weight) -> int:
                y = net.run(f"transformer.h.{at}.attn", x, flops=weight)
                return net.step(net.run(f"transformer.h.{at}.mlp", y, flops=weight), x)

            x = net.call(f"transformer.h.{at}", block)
        return net.run("transformer.ln_f", x)

    net.run("lm_head", net.call("transformer", body), flops=50)
    return net.outline()


def towers(left: int = 3, right: int = 3, interleaved: bool = False) -> ModelOutline:
    """Two chains that run beside each other, `text.0` and so on and `image.0` and so on, and `join`."""
    net = Net("Towers")
    for at in range(left):
        net.module(f"text.{at}", "Block", count=4)
    for at in range(right):
        net.module(f"image.{at}", "Block", count=4)
    net.module("join", "Join", count=4)
    order = [("text", at) for at in range(left)] + [("image", at) for at in range(right)]
    if interleaved:
        order.sort(key=lambda pair: pair[1])
    last: dict[str, int] = {}
    for tower, at in order:
        last[tower] = net.run(f"{tower}.{at}", *([last[tower]] if tower in last else []), flops=10)
    net.run("join", *last.values())
    return net.outline()


def path(text: str, span: Span = HERE) -> Path:
    """Return a path from its text: `transformer.h[0:6]`, `encoder.*`, `**`."""
    parts: list[Part] = []
    for piece in text.split("."):
        head, *brackets = piece.replace("]", "").split("[")
        if head:
            kind = {"*": PartKind.STAR, "**": PartKind.DEEP}.get(head, PartKind.NAME)
            parts.append(Part(kind, head if kind is PartKind.NAME else ""))
        for inner in brackets:
            if inner == "*":
                parts.append(Part(PartKind.ALL))
            elif ":" in inner:
                start, stop = (int(bound) if bound else None for bound in inner.split(":"))
                parts.append(Part(PartKind.SLICE, start=start, stop=stop))
            else:
                parts.append(Part(PartKind.INDEX, index=int(inner)))
    return Path(tuple(parts), span)


def sel(text: str, span: Span = HERE) -> Selection:
    """Return a selection from its text, as specs write it."""
    if " - " in text:
        left, _, right = text.rpartition(" - ")
        return Difference(sel(left, span), sel(right, span), span)
    if text == "rest":
        return Rest(span)
    if text.startswith("/"):
        return Regex(text.strip("/"), span)
    if text.startswith("type("):
        return OfType(text[5:-1], span)
    if text.startswith("cut("):
        return AtCut(text[4:-1], span)
    if text.startswith("call("):
        inner, _, number = text[5:-1].rpartition(", ")
        return CallOf(path(inner, span), int(number), span)
    return path(text, span)
