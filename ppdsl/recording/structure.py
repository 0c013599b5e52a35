"""Nested arguments and results: a template with numbered holes, and the tensors that go into them.

Any Python value that holds tensors is described by a small tree. Containers are rebuilt afresh for each micro-batch, so
that a module which changes a list it was given changes its own copy.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ppdsl.recording import compat
from ppdsl.recording.containers import ATOMS, children_of
from ppdsl.recording.sameness import same_value

__all__ = [
    "Atom",
    "Branch",
    "Hole",
    "Path",
    "Template",
    "Unpacked",
    "fill",
    "held_tensors",
    "hides_tensor",
    "holds_iterator",
    "pick",
    "same_shape_of",
    "unpack",
]

# How to reach a leaf from the root: ("item", key) for x[key], ("attr", name) for x.name, ("node", i) for the children
# of a pytree.
Path: TypeAlias = tuple[tuple[str, Any], ...]

_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Hole:
    """The place of the tensor with this number."""

    index: int


@dataclass(frozen=True, slots=True)
class Atom:
    """A value without tensors, kept as it is."""

    value: Any


@dataclass(frozen=True, slots=True)
class Branch:
    """A container: how to build it again from its children."""

    kind: str
    type: Any
    keys: tuple[Any, ...]
    children: tuple[Template, ...]
    build: Callable[[list[Any]], Any]


Template: TypeAlias = Hole | Atom | Branch


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A value taken apart.

    Attributes:
        template: The value with holes for its tensors.
        tensors: The tensors, in the order of the holes; one that occurs twice has two holes.
        paths: For each tensor how to reach it.
    """

    template: Template
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[Path, ...]


def unpack(value: Any) -> Unpacked:
    """Take `value` apart into a template and its tensors."""
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []
    template = _unpack(value, (), tensors, paths, 0)
    return Unpacked(template, tuple(tensors), tuple(paths))


def fill(template: Template, tensors: Sequence[Any]) -> Any:
    """Build the value again, with `tensors` in its holes.

    >>> import torch
    >>> parts = unpack({"a": [torch.zeros(1), 2]})
    >>> fill(parts.template, ["hole 0"])
    {'a': ['hole 0', 2]}
    """
    if isinstance(template, Hole):
        return tensors[template.index]
    if isinstance(template, Atom):
        return template.value
    return template.build([fill(child, tensors) for child in template.children])


def pick(value: Any, path: Path) -> Any:
    """Return the leaf of `value` that `path` leads to."""
    for kind, key in path:
        if kind == "item":
            value = value[key]
        elif kind == "attr":
            value = getattr(value, key)
        else:
            registered = compat.registered_pytree(type(value))
            value = value if registered is None else registered[0](value)[0][key]
    return value


def holds_iterator(value: Any, depth: int = 0) -> bool:
    """Whether `value` is or contains an iterator, which can be read only once."""
    if isinstance(value, ATOMS) or depth > 3:
        return False
    if isinstance(value, (list, tuple)):
        return any(holds_iterator(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return any(holds_iterator(item, depth + 1) for item in value.values())
    return hasattr(value, "__next__")


def hides_tensor(template: Template) -> Any | None:
    """Return an object of the template that keeps a tensor without data where it cannot be replaced, or None."""
    if isinstance(template, Branch):
        return next((found for child in template.children if (found := hides_tensor(child)) is not None), None)
    if isinstance(template, Atom) and not isinstance(template.value, _SIMPLE):
        return template.value if any(True for _ in _fakes_behind(template.value, 3)) else None
    return None


def held_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors without data that a module can reach by itself: through its attributes and its hooks."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules") and not isinstance(value, _SIMPLE):
            yield from _fakes_behind(value, 3)


def same_shape_of(left: Template, right: Template) -> bool:
    """Whether two templates describe the same structure with equal constants."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Hole) and isinstance(right, Hole):
        return left.index == right.index
    if isinstance(left, Atom) and isinstance(right, Atom):
        return same_value(left.value, right.value)
    if isinstance(left, Branch) and isinstance(right, Branch):
        return (
            left.kind == right.kind
            and left.type is right.type
            and same_value(left.keys, right.keys)
            and len(left.children) == len(right.children)
            and all(map(same_shape_of, left.children, right.children))
        )
    return False


_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, torch.nn.Module)


def _fakes_behind(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if compat.is_fake(value):
            yield value
        return
    if depth == 0 or isinstance(value, (*_SIMPLE, types.ModuleType)):
        return
    # A function refers to its globals, which are everybody's; its own are in its closure.
    items = value.__closure__ or () if isinstance(value, types.FunctionType) else gc.get_referents(value)
    for item in items:
        yield from _fakes_behind(item, depth if isinstance(item, types.CellType) else depth - 1)


_COMMON = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
_HOLES = tuple(map(Hole, range(64)))


def _hole(index: int) -> Hole:
    return _HOLES[index] if index < len(_HOLES) else Hole(index)


def _unpack(value: Any, path: Path, tensors: list[torch.Tensor], paths: list[Path], depth: int) -> Template:
    kind_of = type(value)
    if kind_of in _COMMON:
        return Atom(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        paths.append(path)
        return _hole(len(tensors) - 1)
    if depth > _MAX_DEPTH:
        return Atom(value)
    if kind_of is tuple or kind_of is list:
        items_of = enumerate(value)
        found = tuple(_unpack(item, (*path, ("item", i)), tensors, paths, depth + 1) for i, item in items_of)
        return Branch("sequence", kind_of, (), found, kind_of)
    if isinstance(value, ATOMS):
        return Atom(value)
    taken = children_of(value)
    if taken is None:
        return Atom(value)
    kind, keys, items, steps, build = taken
    start = len(tensors)
    children = tuple(
        _unpack(item, (*path, step), tensors, paths, depth + 1) for item, step in zip(items, steps, strict=True)
    )
    if len(tensors) == start and kind in ("object", "node", "dataclass", "frozen"):
        return Atom(value)  # an object without tensors keeps its identity
    return Branch(kind, type(value), keys, children, build)
