"""Python objects among arguments and results: whether a call changed them, whether they may be built again."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["container_ids", "fingerprint", "rebuildable"]

_ATOMIC = (
    torch.Tensor,
    torch.nn.Module,
    str,
    bytes,
    int,
    float,
    type(None),
    type,
    types.FunctionType,
    torch.dtype,
    torch.device,
)


def fingerprint(value: Any, depth: int = 8, seen: set[int] | None = None) -> Any:
    """Identity of what an object holds; equal before and after a call that changed nothing.

    As deep as arguments are taken apart: a cache of caches holds its tensors seven levels down.
    """
    seen = set() if seen is None else seen
    if depth == 0 or isinstance(value, _ATOMIC) or id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        own = 0 if isinstance(value, tuple) else id(value)
        return (own, *(fingerprint(item, depth - 1, seen) for item in value))
    if isinstance(value, dict):
        return (0, *((id(key), fingerprint(item, depth - 1, seen)) for key, item in value.items()))
    attributes = getattr(value, "__dict__", None)
    if not attributes:
        return id(value)
    return (id(value), *((name, fingerprint(item, depth - 1, seen)) for name, item in attributes.items()))


def container_ids(value: Any, depth: int = 0) -> set[int]:
    """Ids of the lists and dicts among the arguments `value`, which the caller may hold as well."""
    found: set[int] = set()
    if isinstance(value, (list, dict)) and depth > 1:
        found.add(id(value))
    if depth < 4 and isinstance(value, (tuple, list)):
        for item in value:
            found |= container_ids(item, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for item in value.values():
            found |= container_ids(item, depth + 1)
    return found


def rebuildable(result: Any, path: Any, shared: set[int]) -> bool:
    """Whether the containers on the way to a leaf are this call's own, so that they may be built again."""
    for kind, key in path:
        if kind == "node" or id(result) in shared:
            return False
        if kind == "attr" and not hasattr(type(result), "__dataclass_fields__"):
            return False
        result = result[key] if kind == "item" else getattr(result, key)
    return True
