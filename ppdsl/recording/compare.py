"""Two recordings of one micro-batch must be the same: whatever Python counted, drew or built in between shows here.

Only what would be run again is compared: calls between modules, and modules called whole with their arguments. What
happens inside a whole module is its own business.
"""

from __future__ import annotations

import operator
import types
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording.findings import labels_of
from ppdsl.recording.items import Collapsed, Item, collapse
from ppdsl.recording.replay import slice_of
from ppdsl.recording.structure import Atom, Branch, Template, same_shape_of, unpack
from ppdsl.recording.tape import Record, Tape, Value, ValueKind, meta_of, origin
from ppdsl.source import Place

__all__ = ["difference"]


def difference(first: Tape, second: Tape, *, built: bool = False) -> RecordingError | None:
    """Return the error that describes where two recordings part, or None when they agree.

    Args:
        first: A recording.
        second: Another one of the same call.
        built: Overlook that one builds a constant (a mask, a table of positions) which the other finds ready.
    """
    left, right = _Numbered(first, built), _Numbered(second, built)
    for a, b in zip(left.items, right.items, strict=False):
        what = _items_apart(a, b, left, right)
        if what is not None:
            return _error(b.place, what)
    if len(left.items) != len(right.items):
        longer = max(left, right, key=lambda side: len(side.items))
        item = longer.items[min(len(left.items), len(right.items))]
        return _error(item.place, f"{len(left.items)} / {len(right.items)} calls")
    for a_guard, b_guard in zip(left.guards, right.guards, strict=False):
        if a_guard.expected != b_guard.expected:
            return _error(b_guard.place, f"{a_guard.expected} / {b_guard.expected}")
    if list(map(left.of, first.outputs)) != list(map(right.of, second.outputs)):
        return _error(right.items[-1].place if right.items else None, "other outputs")
    return None


class _Numbered:
    """A collapsed tape whose values are named by the item that makes them."""

    def __init__(self, tape: Tape, built: bool) -> None:
        self._collapsed: Collapsed = collapse(tape)
        self._records = tape.records
        self._built: set[int] = set()
        self.items: list[Item] = [item for item in self._collapsed.items if not (built and self._builds(item))]
        self.guards: list[Record] = self._collapsed.guards
        self._names: dict[int, tuple[Any, ...]] = {}
        for position, item in enumerate(self.items):
            for path, value in item.outputs:
                self._names[id(value)] = (position, path)
            for number, (_, value) in enumerate(item.writes):
                self._names[id(value)] = (position, "written", number)
            for _, name, value in item.attributes:
                self._names[id(value)] = (position, "attribute", name)

    def _builds(self, item: Item) -> bool:
        """Whether all that goes in and comes out is constant."""
        if item.is_module or item.random or item.parameters or not all(map(self._is_constant, item.inputs)):
            return False
        made = (*(value for _, value in item.outputs), *(after for _, after in item.writes))
        self._built |= set(map(id, made))
        return bool(made) or item.attribute_write

    def _is_constant(self, value: Value) -> bool:
        value = self._collapsed.resolve(value)
        return id(value) in self._built or (value.kind is ValueKind.CONSTANT and value.before is None)

    def constant(self, value: Value) -> torch.Tensor | None:
        """Return the numbers of a constant, also of one that the recording built."""
        value = self._collapsed.resolve(value)
        if not self._is_constant(value) or value.kind is ValueKind.CONSTANT:
            return value.tensor if value.before is None and value.kind is ValueKind.CONSTANT else None
        try:
            return slice_of(self._records, (value,)).run(())[0]
        except LookupError:
            return None

    def of(self, value: Value) -> tuple[Any, ...]:
        """Return a name that is equal in equal recordings."""
        value = self._collapsed.resolve(value)
        if id(value) in self._names:
            return self._names[id(value)]
        start = origin(value)
        if start.kind is ValueKind.CONSTANT:
            return (start.kind, start.tensor is None)  # None: what an earlier recording left on the model
        return (start.kind, start.name, start.index)


def _error(place: Place | None, what: str) -> RecordingError:
    return RecordingError(
        Diagnostic(
            "unstable-recording",
            f"Two recordings of the same micro-batch differ here: {what}.",
            labels_of(place),
            "a Python counter, random or numpy decides what runs between modules; move it into a module of one stage",
        )
    )


def _items_apart(a: Item, b: Item, left: _Numbered, right: _Numbered) -> str | None:
    if not _same_callable(a.target, b.target):
        return f"{a.name} / {b.name}"
    if a.stage != b.stage:
        return f"stage {a.stage} / stage {b.stage}"
    if not _same_place(a.place, b.place):
        return f"{_where(a.place)} / {_where(b.place)}"
    if a.ambient != b.ambient:
        return "grad or autocast mode"
    if not same_shape_of(a.template, b.template):
        return _atoms_apart(a.template, b.template) or f"arguments of {a.name}"
    for one, other in zip(a.inputs, b.inputs, strict=True):
        mine, others = left.constant(one), right.constant(other)
        if mine is not None and others is not None:
            if not _same_constant(mine, others):
                return f"a constant tensor of {a.name}"
            one.fresh = other.fresh = mine is not others
        elif left.of(one) != right.of(other):
            return f"what goes into {a.name}"
    results = [[(path, value.meta) for path, value in item.outputs] for item in (a, b)]
    return None if results[0] == results[1] else f"the result of {a.name}"


def _same_constant(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if meta_of(a) != meta_of(b):
        return False
    try:
        return bool(torch.equal(a, b)) or bool(
            torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    except (RuntimeError, TypeError):
        return True


def _same_callable(left: Any, right: Any) -> bool:
    if left is right or left == right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, types.FunctionType):
        return left.__code__ is right.__code__
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same_callable, left, right))
    if isinstance(left, torch.nn.Module):
        return _same_settings(left, right)
    inner = getattr(left, "function", None)
    return inner is not None and _same_callable(inner, getattr(right, "function", None))


def _same_settings(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Whether two modules that forward made anew (`nn.CrossEntropyLoss()(x, y)`) do the same."""
    mine, others = list(left.modules()), list(right.modules())
    if [type(module) for module in mine] != [type(module) for module in others]:
        return False
    pairs = [(unpack(vars(a)), unpack(vars(b))) for a, b in zip(mine, others, strict=True)]
    return all(same_shape_of(a.template, b.template) and all(map(operator.is_, a.tensors, b.tensors)) for a, b in pairs)


def _same_place(left: Place | None, right: Place | None) -> bool:
    if left is None or right is None or left == right:
        return left is right or left == right
    # Python 3.11 makes one call with two instructions, and with the first alone once the code has run a few times.
    return left.span == right.span


def _where(place: Place | None) -> str:
    return place.span.short if place is not None else "an unknown place"


def _brief(value: Any) -> str:
    """The value itself; of functions and objects, whose text holds an address, the name."""
    if isinstance(value, types.FunctionType):
        return f"function {value.__name__}"
    kind: Any = type(value)
    return repr(value) if kind.__repr__ is not object.__repr__ else f"a {kind.__name__}"


def _atoms_apart(left: Template, right: Template) -> str | None:
    """Return the first pair of constants that differ."""
    if isinstance(left, Atom) and isinstance(right, Atom):
        return None if same_shape_of(left, right) else f"{_brief(left.value)} / {_brief(right.value)}"
    if isinstance(left, Branch) and isinstance(right, Branch) and len(left.children) == len(right.children):
        for a, b in zip(left.children, right.children, strict=True):
            apart = _atoms_apart(a, b)
            if apart is not None:
                return apart
    return None
