"""Looking again quickly finds whatever a full look finds: what says "unchanged" has the same picture."""

from __future__ import annotations

import random
from collections import OrderedDict
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ppdsl.recording.numpy_state import NumpyNumbers
from ppdsl.recording.sameness import state_of
from ppdsl.recording.tape import Frame
from ppdsl.recording.upkeep import Upkeep, picture_of
from ppdsl.recording.watching import Watch


class Color(Enum):
    RED = 1


class Loud(str):
    """A text that says something else each time."""

    times = 0

    def __repr__(self) -> str:
        Loud.times += 1
        return f"{self}{Loud.times}"


def some_value(numbers: random.Random, depth: int = 3) -> Any:
    kind = numbers.randrange(13 if depth else 7)
    simple = (1, 2.5, "text", None, Color.RED, torch.float32, torch.zeros(1))
    if kind < 7:
        return simple[kind]
    inner = [some_value(numbers, depth - 1) for _ in range(numbers.randrange(3))]
    if kind == 7:
        return inner
    if kind == 8:
        return tuple(inner)
    if kind == 9:
        return OrderedDict(enumerate(inner))
    if kind == 10:
        return SimpleNamespace(**{f"name{i}": item for i, item in enumerate(inner)})
    if kind == 11:
        return {numbers.randrange(9) for _ in inner}
    return lambda: inner


def parts_of(value: Any) -> list[Any]:
    """All that can be changed in place."""
    inner: list[Any] = []
    if isinstance(value, (list, tuple)):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, SimpleNamespace):
        inner = list(vars(value).values())
    own = [value] if isinstance(value, (list, dict, set, SimpleNamespace)) else []
    return own + [part for item in inner for part in parts_of(item)]


def change(part: Any, numbers: random.Random) -> None:
    new = some_value(numbers, 1)
    if isinstance(part, list):
        part[:] = part[1:] if part and numbers.random() < 0.5 else [*part, new]
    elif isinstance(part, set):
        part ^= {numbers.randrange(9)}
    elif isinstance(part, dict):
        part[numbers.randrange(3)] = new
    else:
        setattr(part, f"name{numbers.randrange(3)}", new)


@pytest.mark.parametrize("seed", range(300))
def test_an_unchanged_watch_has_the_state_that_a_new_look_gives(seed: int) -> None:
    numbers = random.Random(seed)
    value = some_value(numbers)
    watch, before = Watch(value), state_of(value, 3)
    assert watch.state == before
    for part in numbers.sample(found := parts_of(value), min(len(found), numbers.randrange(3))):
        change(part, numbers)
    assert not watch.unchanged() or state_of(value, 3) == before


def test_what_may_change_unseen_is_never_said_to_be_unchanged() -> None:
    assert not Watch([Loud("a")]).unchanged()
    assert not Watch([lambda: 1]).unchanged()
    assert Watch(["a", Color.RED, {"b": [1]}]).unchanged()


class Holder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.numbers, self.scale, self.late = config, [1, {"deep": [2]}], 1.0, OrderedDict()
        self.layer, self.register = nn.Linear(2, 2), {}
        self.register_buffer("seen", torch.zeros(1))


CHANGES = {
    "number": lambda m: setattr(m.one, "scale", 2.0),
    "past __setattr__": lambda m: m.one.__dict__.update(scale=3.0),
    "same value, another type": lambda m: m.one.__dict__.update(scale=1),
    "new attribute": lambda m: setattr(m.one, "fresh", 1),
    "attribute gone": lambda m: delattr(m.one, "scale"),
    "deep in a list": lambda m: m.one.numbers[1]["deep"].append(3),
    "shared configuration": lambda m: setattr(m.one.config, "size", 8),
    "attributes of an empty dictionary": lambda m: setattr(m.one.late, "mark", 1),
    "parameter": lambda m: m.one.layer._parameters.update(weight=nn.Parameter(torch.ones(2, 2))),
    "buffer": lambda m: m.one._buffers.update(seen=torch.ones(1)),
    "submodule": lambda m: m.one.layer.add_module("more", nn.Linear(1, 1)),
    "submodule gone": lambda m: m.one._modules.pop("layer"),
    "hook": lambda m: m.one.layer.register_forward_hook(lambda *_: None),
    "mode": lambda m: m.one.layer.eval(),
    "an empty container": lambda m: m.one.register.update(a=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_look_finds_every_change_and_only_that(name: str) -> None:
    config = SimpleNamespace(size=4, names=["a"])
    model = nn.ModuleDict({"one": Holder(config), "two": Holder(config)})
    upkeep, frame = Upkeep(model), SimpleNamespace(changed={})
    upkeep.look(model, _as_frame(frame))
    upkeep.look(model, _as_frame(frame))
    assert not frame.changed
    before = {id(module): picture_of(module) for module in model.modules()}

    CHANGES[name](model)
    upkeep.look(model["one"], _as_frame(frame))
    upkeep.look(model, _as_frame(frame))
    expected = {
        (id(module), entry)
        for module in model.modules()
        if id(module) in before
        for entry in before[id(module)].keys() | picture_of(module).keys()
        if before[id(module)].get(entry) != picture_of(module).get(entry)
    }
    assert set(frame.changed) == expected != set()
    frame.changed.clear()
    upkeep.look(model, _as_frame(frame))
    assert not frame.changed


def _as_frame(stub: Any) -> Frame:
    frame: Frame = stub
    return frame


DRAWS = {
    "uniform": lambda: np.random.rand(),
    "normal": lambda: np.random.randn(),
    "many": lambda: np.random.rand(1248),
    "seed": lambda: np.random.seed(5),
    "other generator": lambda: np.random.set_state(np.random.RandomState(7).get_state()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_from_numpy_is_seen_once(name: str) -> None:
    state = np.random.get_state()
    try:
        np.random.seed(3)
        watched = NumpyNumbers()
        assert not watched.drawn()
        DRAWS[name]()
        assert watched.drawn()
        assert not watched.drawn()
        np.random.seed(4)
        np.random.randn()
        assert watched.drawn()
        np.random.randn()  # the second of two that the first call made
        assert watched.drawn()
        assert not watched.drawn()
    finally:
        np.random.set_state(state)
