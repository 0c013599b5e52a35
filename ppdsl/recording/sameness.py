"""Whether two Python values that hold no tensor mean the same, and what one of them says at the moment."""

from __future__ import annotations

import types
from enum import Enum
from typing import Any

import torch

__all__ = ["OPAQUE", "PRIMITIVE", "same_value", "state_of"]

PRIMITIVE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
OPAQUE = (torch.Tensor, torch.nn.Module, torch.Generator, type, types.ModuleType, types.BuiltinFunctionType)


def same_value(left: Any, right: Any, depth: int = 4) -> bool:
    """Whether two values are equal as far as a recording goes.

    Functions and plain objects are usually made anew in each forward pass: they are compared by what they hold.

    >>> same_value(lambda: 1, lambda: 1)
    False
    >>> same_value(float("nan"), float("nan"))
    True
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, types.MethodType):
        return left.__func__ is right.__func__ and left.__self__ is right.__self__
    if isinstance(left, tuple):
        return len(left) == len(right) and all(same_value(a, b, depth) for a, b in zip(left, right, strict=True))
    if isinstance(left, PRIMITIVE):
        # repr tells nan from nan and 0.0 from -0.0, where == does not.
        return bool(left == right) or repr(left) == repr(right)
    if isinstance(left, torch.Generator):
        return False
    if depth == 0 or isinstance(left, OPAQUE):
        return True
    if isinstance(left, types.FunctionType):
        return left.__code__ is right.__code__ and _same_items(_holdings(left), _holdings(right), depth)
    if isinstance(left, (list, dict, set, frozenset, range, slice)):
        try:
            return bool(left == right)
        except (RuntimeError, ValueError):
            return False
    return _same_items(_holdings(left), _holdings(right), depth)


def state_of(value: Any, depth: int = 4) -> Any:
    """Return a comparable picture of what a function's closure or an object's attributes hold at the moment."""
    if isinstance(value, PRIMITIVE):
        return (type(value).__name__, repr(value))
    if depth == 0 or isinstance(value, OPAQUE):
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value).__name__, *(state_of(item, depth - 1) for item in value))
    if isinstance(value, dict):
        return ("dict", *((id(key), state_of(item, depth - 1)) for key, item in value.items()))
    return (id(value), *((name, state_of(item, depth - 1)) for name, item in _holdings(value).items()))


def _holdings(value: Any) -> dict[str, Any]:
    """What a function keeps in its closure and defaults, or an object in its attributes."""
    if not isinstance(value, types.FunctionType):
        return dict(getattr(value, "__dict__", {}))
    found: dict[str, Any] = {f"default {i}": default for i, default in enumerate(value.__defaults__ or ())}
    found.update(value.__kwdefaults__ or {})
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            found[f"closure {name}"] = cell.cell_contents
        except ValueError:
            continue  # an empty cell: a function that refers to itself
    return found


def _same_items(left: dict[str, Any], right: dict[str, Any], depth: int) -> bool:
    return left.keys() == right.keys() and all(same_value(left[name], right[name], depth - 1) for name in left)
