"""What code asks of a tensor beside torch calls: properties, strides, copies of itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ppdsl.recording.naming import PLAIN_METHODS, PLAIN_PROPERTIES
from ppdsl.recording.structure import unpack
from ppdsl.recording.tape import Record, RecordKind, ValueKind, origin

__all__ = ["answer", "is_question"]

_LAYOUT = ("stride", "is_contiguous", "storage_offset")
_NAMES = frozenset({"__get__", "__set__", "__deepcopy__"}) | PLAIN_METHODS


def is_question(name: str) -> bool:
    """Whether `answer` deals with the function of this name."""
    return name in _NAMES


def answer(recorder: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what `func` returns, and note what a stage program must know of it.

    Args:
        recorder: The recorder.
        func: A property's getter or setter, or a method.
        name: The function's name.
        args: Its arguments, the tensor first.
        kwargs: More of them.
    """
    if name == "__get__":
        return _property(recorder, func, args)
    if name == "__set__":
        return recorder.call(setattr, name, (args[0], func.__self__.__name__, args[1]), {})
    if name == "__deepcopy__":
        memo = args[1]  # the caller's own, which differs each time
        if id(args[0]) not in memo:
            memo[id(args[0])] = recorder.call(copy.deepcopy, name, (args[0],), {})
        return memo[id(args[0])]
    if name in _LAYOUT:
        _guard_inputs(recorder, _STRIDES)
    return func(*args, **kwargs)


def _property(recorder: Any, func: Any, args: Any) -> Any:
    name = func.__self__.__name__
    tensor = recorder.ledger.stand_in(args[0])
    if name in PLAIN_PROPERTIES:
        if name == "requires_grad":
            _guard_inputs(recorder, _GRADIENTS)
        return func(tensor)
    result = recorder.call(getattr, "__get__", (args[0], name), {})
    if name == "grad" and result is None and origin(recorder.ledger.value_of(tensor)).kind is ValueKind.PARAMETER:
        recorder.frames.current.read_grad = recorder.place_now()
    return result


def _guard_inputs(recorder: Any, told: _Told) -> None:
    """Guard what `told` tells of all inputs: it decides what is told of every other tensor."""
    parts = recorder.frames.current.parts
    if recorder.inputs and not any(isinstance(part, Record) and part.target is told for part in parts):
        record = recorder.append(RecordKind.INPUTS, told, unpack((recorder.examples, {})).template, recorder.inputs)
        record.expected = told(*recorder.examples)
        record.effect = True


class _Told:
    """Tells something of each of several tensors.

    Attributes:
        about: A sentence for people: that it steers the model.
    """

    def __init__(self, about: str, tell: Callable[[torch.Tensor], Any]) -> None:
        self.about = about
        self._tell = tell

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        """Return what is told, in the order of the tensors."""
        return list(map(self._tell, tensors))


_STRIDES = _Told("The strides of the inputs steer the model", lambda t: t.stride() if t.layout == torch.strided else ())
_GRADIENTS = _Told("Which inputs require a gradient steers the model", lambda t: t.requires_grad)
