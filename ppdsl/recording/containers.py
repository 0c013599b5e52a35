"""How each kind of Python container is taken apart and built again."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeAlias

import torch

from ppdsl.recording import compat

__all__ = ["ATOMS", "Taken", "children_of"]

ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, torch.Generator, range, type, type(Ellipsis), Enum, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.nn.Module,
)  # fmt: skip

# (kind, keys, children, step to each child, how to build it again from its children)
Taken: TypeAlias = tuple[str, tuple[Any, ...], list[Any], list[tuple[str, Any]], Callable[[list[Any]], Any]]


def children_of(value: Any) -> Taken | None:
    """Return how to take `value` apart, or None for a value that is no container."""
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _array(value)
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


def _array(value: Any) -> Taken:
    """A numpy array, as it is now: code may write it later, and a tensor made of it may share its memory."""
    content = value.copy()
    return "array", (content.dtype.str, content.shape, content.tobytes()), [], [], lambda new: content.copy()


def _tuple_like(value: Any) -> Taken:
    kind = type(value)
    # A named tuple's own __new__ may check or convert; tuple.__new__ puts the values in as they are.
    return (
        "tuple", (), list(value), [("item", i) for i in range(len(value))], lambda new: tuple.__new__(kind, new)
    )  # fmt: skip


def _partial(value: Any) -> Taken:
    count, names = len(value.args), tuple(value.keywords)
    function = value.func
    steps = [("attr", "args")] * count + [("attr", "keywords")] * len(names)
    return (
        "partial", (function, *names), [*value.args, *value.keywords.values()], steps,
        lambda new: functools.partial(function, *new[:count], **dict(zip(names, new[count:], strict=True))),
    )  # fmt: skip


def _model_output(value: Any) -> Taken:
    """An ordered dict that is a dataclass too, as Hugging Face returns: fields that are None are no items."""
    kind, keys = type(value), tuple(value)
    return (
        "output", keys, list(value.values()), [("item", k) for k in keys],
        lambda new: kind(**dict(zip(keys, new, strict=True))),
    )  # fmt: skip


def _odd_container(value: Any) -> Taken | None:
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
        copy: Any = kind.__new__(kind)  # type: ignore[call-overload]
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


def _dataclass(value: Any) -> Taken:
    kind = type(value)
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))

    def build(new: list[Any]) -> Any:
        copy = object.__new__(kind)
        for name, item in zip(names, new, strict=True):
            object.__setattr__(copy, name, item)
        return copy

    return "dataclass", names, [getattr(value, n) for n in names], [("attr", n) for n in names], build


def _object(value: Any) -> Taken | None:
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
    if isinstance(value, ATOMS) or depth > 4 or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        return any(_holds_tensor(item, depth + 1, seen) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_tensor(item, depth + 1, seen) for item in value)
    return any(_holds_tensor(item, depth + 1, seen) for item in getattr(value, "__dict__", {}).values())
