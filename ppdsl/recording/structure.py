"""Nested arguments and results: a template with numbered holes, and the tensors that go into them.

Any Python value that holds tensors is described by a small tree. Containers are rebuilt afresh for each micro-batch, so
that a module which changes a list it was given changes its own copy.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from ppdsl.recording import compat

__all__ = [
    "Hole",
    "Path",
    "Template",
    "Unpacked",
    "fill",
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
_ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, torch.Generator, range, type, type(Ellipsis), Enum, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.nn.Module,
)  # fmt: skip


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
    if isinstance(value, _ATOMS) or depth > 3:
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
    if isinstance(template, Atom) and not isinstance(template.value, _SIMPLE) and _refers_to_fake(template.value, 3):
        return template.value
    return None


def same_shape_of(left: Template, right: Template) -> bool:
    """Whether two templates describe the same structure with equal constants."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Hole) and isinstance(right, Hole):
        return left.index == right.index
    if isinstance(left, Atom) and isinstance(right, Atom):
        return _same_atom(left.value, right.value)
    if isinstance(left, Branch) and isinstance(right, Branch):
        return (
            left.kind == right.kind
            and left.type is right.type
            and _same_atom(left.keys, right.keys)
            and len(left.children) == len(right.children)
            and all(map(same_shape_of, left.children, right.children))
        )
    return False


def _same_atom(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, types.FunctionType):
        return left.__code__ is right.__code__
    if isinstance(left, types.MethodType):
        return left.__func__ is right.__func__ and left.__self__ is right.__self__
    if isinstance(left, (bool, int, float, complex, str, bytes, tuple, torch.dtype, torch.device, Enum)):
        # repr tells nan from nan and 0.0 from -0.0, where == does not.
        return bool(left == right) or repr(left) == repr(right)
    if isinstance(left, (list, dict, set, frozenset, range, slice)):
        try:
            return bool(left == right)
        except (RuntimeError, ValueError):
            return False
    # Objects without tensors, made anew in each call: nothing is known of their meaning but their type.
    return True


_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, torch.nn.Module)


def _refers_to_fake(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return compat.is_fake(value)
    if depth == 0 or isinstance(value, (*_SIMPLE, types.ModuleType)):
        return False
    if isinstance(value, types.FunctionType):
        return any(_refers_to_fake(cell.cell_contents, depth - 1) for cell in value.__closure__ or ())
    return any(_refers_to_fake(item, depth - 1) for item in gc.get_referents(value))


def _unpack(value: Any, path: Path, tensors: list[torch.Tensor], paths: list[Path], depth: int) -> Template:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        paths.append(path)
        return Hole(len(tensors) - 1)
    if isinstance(value, _ATOMS) or depth > _MAX_DEPTH:
        return Atom(value)
    taken = _children(value)
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


_Taken: TypeAlias = tuple[str, tuple[Any, ...], list[Any], list[tuple[str, Any]], Callable[[list[Any]], Any]]


def _children(value: Any) -> _Taken | None:
    kind = type(value)
    if kind is tuple or kind is list:
        return "sequence", (), list(value), [("item", i) for i in range(len(value))], kind
    if kind is dict or kind is OrderedDict:
        keys = tuple(value)
        return (
            "mapping",
            keys,
            list(value.values()),
            [("item", k) for k in keys],
            lambda new: kind(zip(keys, new, strict=True)),
        )
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return _tuple_like(value)
    if isinstance(value, tuple):
        return _tuple_like(value)
    if isinstance(value, defaultdict):
        keys, factory = tuple(value), value.default_factory
        return (
            "mapping", keys, list(value.values()), [("item", k) for k in keys],
            lambda new: defaultdict(factory, zip(keys, new, strict=True)),
        )  # fmt: skip
    if kind is slice:
        parts = ("start", "stop", "step")
        return "slice", (), [value.start, value.stop, value.step], [("attr", p) for p in parts], lambda new: slice(*new)
    if isinstance(value, functools.partial):
        return _partial(value)
    if isinstance(value, OrderedDict) and dataclasses.is_dataclass(value):
        return _model_output(value)
    if isinstance(value, (list, dict, set, frozenset)):
        return _odd_container(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value)
    return _object(value)


def _tuple_like(value: Any) -> _Taken:
    kind = type(value)
    # A named tuple's own __new__ may check or convert; tuple.__new__ puts the values in as they are.
    return (
        "tuple", (), list(value), [("item", i) for i in range(len(value))], lambda new: tuple.__new__(kind, new)
    )  # fmt: skip


def _partial(value: Any) -> _Taken:
    count, names = len(value.args), tuple(value.keywords)
    function = value.func
    steps = [("attr", "args")] * count + [("attr", "keywords")] * len(names)
    return (
        "partial", (function, *names), [*value.args, *value.keywords.values()], steps,
        lambda new: functools.partial(function, *new[:count], **dict(zip(names, new[count:], strict=True))),
    )  # fmt: skip


def _model_output(value: Any) -> _Taken:
    """An ordered dict that is a dataclass too, as Hugging Face returns: fields that are None are no items."""
    kind, keys = type(value), tuple(value)
    return (
        "output", keys, list(value.values()), [("item", k) for k in keys],
        lambda new: kind(**dict(zip(keys, new, strict=True))),
    )  # fmt: skip


def _odd_container(value: Any) -> _Taken | None:
    """Subclasses of list and dict, with the attributes that they keep beside their items."""
    kind = type(value)
    if isinstance(value, list):
        return "sequence", (), list(value), [("item", i) for i in range(len(value))], kind
    if not isinstance(value, dict):
        return None
    keys, everything = tuple(value), getattr(value, "__dict__", {})
    # Some classes show their items as attributes too: those follow the items instead of being leaves of their own.
    mirrors = {name: key for name, item in everything.items() for key in keys if item is value[key]}
    attributes = tuple(name for name in everything if name not in mirrors)

    def build(new: list[Any]) -> Any:
        copy = kind.__new__(kind)
        for name, key in mirrors.items():
            copy.__dict__[name] = new[keys.index(key)]
        for name, item in zip(attributes, new[len(keys) :], strict=True):
            copy.__dict__[name] = item
        # The plain dict's way in: the class's own may check, convert or set attributes.
        put = OrderedDict.__setitem__ if isinstance(copy, OrderedDict) else dict.__setitem__
        for key, item in zip(keys, new, strict=False):
            put(copy, key, item)
        return copy

    steps = [("item", key) for key in keys] + [("attr", name) for name in attributes]
    return "mapping", keys, [*value.values(), *(value.__dict__[name] for name in attributes)], steps, build


def _dataclass(value: Any) -> _Taken:
    kind = type(value)
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))

    def build(new: list[Any]) -> Any:
        copy = object.__new__(kind)
        for name, item in zip(names, new, strict=True):
            object.__setattr__(copy, name, item)
        return copy

    return "dataclass", names, [getattr(value, n) for n in names], [("attr", n) for n in names], build


def _object(value: Any) -> _Taken | None:
    """Any other object: registered pytree nodes by their own rules, plain objects by their attributes."""
    kind = type(value)
    registered = compat.registered_pytree(kind)
    if registered is not None:
        children, context = registered[0](value)
        children = list(children)
        return (
            "node", (), children, [("node", i) for i in range(len(children))], lambda new: registered[1](new, context)
        )  # fmt: skip
    attributes = getattr(value, "__dict__", None)
    if attributes is None or not _is_plain(kind) or not _holds_tensor(value, 0, set()):
        return None
    names = tuple(attributes)

    def build(new: list[Any]) -> Any:
        copy = object.__new__(kind)
        copy.__dict__.update(zip(names, new, strict=True))
        return copy

    return "object", names, list(attributes.values()), [("attr", n) for n in names], build


def _is_plain(kind: type) -> bool:
    """Whether objects of this class are made by object.__new__ and hold all they have in __dict__."""
    made_plainly = kind.__new__ is object.__new__  # type: ignore[comparison-overlap]
    return made_plainly and not hasattr(kind, "__next__") and kind.__module__ != "builtins"


def _holds_tensor(value: Any, depth: int, seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, _ATOMS) or depth > 4 or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        return any(_holds_tensor(item, depth + 1, seen) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_tensor(item, depth + 1, seen) for item in value)
    return any(_holds_tensor(item, depth + 1, seen) for item in getattr(value, "__dict__", {}).values())
