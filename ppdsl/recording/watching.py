"""Looking again at what modules and objects hold, quickly: nothing changed where all is the very same object as before.

A picture of a module is compared hundreds of times in one recording and changes hardly ever. What it was made of is
kept beside it. As long as every container in it holds the same objects, in the same order, a new picture would be equal
to the old one; only where one does not, a new one is made and compared.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from enum import Enum
from operator import is_
from typing import Any

import torch

from ppdsl.recording.sameness import OPAQUE, PRIMITIVE, state_of

__all__ = ["Kept", "Watch"]

_DEPTH = 3
_FIXED = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))


class Kept:
    """What containers hold: keys and values of mappings, items of the rest."""

    __slots__ = ("_bare", "_empty", "_items", "_mappings", "_owners")

    def __init__(self) -> None:
        self._empty: list[Any] = []
        self._items: list[tuple[Any, tuple[Any, ...]]] = []
        self._mappings: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._owners: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._bare: list[Any] = []

    def add_items(self, container: Any) -> None:
        """Watch a list or a set."""
        if container:
            self._items.append((container, tuple(container)))
        else:
            self._empty.append(container)

    def add_mapping(self, container: Any) -> None:
        """Watch a dictionary."""
        if container:
            self._mappings.append((container, tuple(container), tuple(container.values())))
        else:
            self._empty.append(container)

    def add_attributes(self, owner: Any) -> None:
        """Watch the attributes of an object that has some."""
        attributes = owner.__dict__
        self._owners.append((owner, tuple(attributes), tuple(attributes.values())))

    def add_bare(self, owner: Any) -> None:
        """Watch an object that has no attributes as yet."""
        self._bare.append(owner)

    def unchanged(self) -> bool:
        """Whether everything holds what it held, as far as the objects themselves go."""
        if any(self._empty):
            return False
        for container, items in self._items:
            if len(container) != len(items) or not all(map(is_, container, items)):
                return False
        for mapping, keys, values in self._mappings:
            if not _same(mapping, keys, values):
                return False
        for owner, keys, values in self._owners:
            if not _same(owner.__dict__, keys, values):
                return False
        return not any(owner.__dict__ for owner in self._bare)


class Watch:
    """The state of one object, which several modules may share.

    Args:
        value: What to watch.

    Attributes:
        state: What `state_of` said of it.
    """

    __slots__ = ("_kept", "_value", "state")

    def __init__(self, value: Any) -> None:
        kept = Kept()
        self._value = value  # its id must not be given to another object
        self.state = state_of(value, _DEPTH)
        self._kept = kept if _all_kept((value,), _DEPTH, kept) else None

    def unchanged(self) -> bool:
        """Whether a new look would give the same state for certain."""
        return self._kept is not None and self._kept.unchanged()


def _same(mapping: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    return len(mapping) == len(keys) and all(map(is_, mapping, keys)) and all(map(is_, mapping.values(), values))


def _all_kept(values: Iterable[Any], depth: int, kept: Kept) -> bool:
    """Take note of all that `state_of` looks into; False when something in it may change unseen."""
    return all(type(value) in _FIXED or _is_kept(value, depth, kept) for value in values)


def _is_kept(value: Any, depth: int, kept: Kept) -> bool:
    if isinstance(value, PRIMITIVE):
        # A class of the user's may say something else each time.
        return isinstance(value, Enum) and type(value.value) in _FIXED and type(value).__repr__ is Enum.__repr__
    if depth == 0 or isinstance(value, OPAQUE):
        return True
    if isinstance(value, (list, set)):
        kept.add_items(value)
        return _all_kept(value, depth - 1, kept)
    if isinstance(value, (tuple, frozenset)):
        return _all_kept(value, depth - 1, kept)
    if isinstance(value, dict):
        kept.add_mapping(value)
        return _all_kept(value.values(), depth - 1, kept)
    if isinstance(value, types.FunctionType):
        return False
    if not hasattr(value, "__dict__"):
        return True
    if not value.__dict__:
        kept.add_bare(value)
        return True
    kept.add_attributes(value)
    return _all_kept(value.__dict__.values(), depth - 1, kept)
