"""Functions that torch does not announce to a TorchFunctionMode as one call, recorded as one call."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ppdsl.diagnostics import RecordingError
from ppdsl.recording import compat
from ppdsl.recording.findings import unseen
from ppdsl.recording.structure import hides_tensor, unpack
from ppdsl.recording.tape import Value, ValueKind, origin

__all__ = ["call_special", "freeze", "opened_closure", "used_elsewhere"]

_CHECKPOINT_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def call_special(recorder: Any, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one call of a special function and return its result on fakes."""
    args = tuple(freeze(arg) for arg in args)
    target = dict(compat.functions_to_intercept())[name]
    if name == "checkpoint":
        return _checkpoint(recorder, target, args, kwargs)
    if name == "apply":
        target, args = args[0].apply, args[1:]
        return _one_call(recorder, name, target, lambda *a, **k: original(target.__self__, *a, **k), args, kwargs)
    if name == "cond":
        return _one_call(recorder, name, target, _first_branch, args, kwargs)
    return _one_call(recorder, name, target, original, args, kwargs)


def freeze(function: Any) -> Any:
    """Return a function whose closure keeps what it holds now: a lambda in a loop would see the last turn's values."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    try:
        cells = tuple(types.CellType(freeze(cell.cell_contents)) for cell in function.__closure__)
    except ValueError:
        return function  # an empty cell: a function that refers to itself
    frozen = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    frozen.__kwdefaults__ = function.__kwdefaults__
    frozen.__dict__.update(function.__dict__)
    return frozen


def opened_closure(function: Any) -> Any:
    """Return a function that gets the tensors of its closure as arguments, so that they are recorded as such."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    try:
        contents = [cell.cell_contents for cell in function.__closure__]
    except ValueError:
        return function
    if not any(isinstance(content, torch.Tensor) for content in contents):
        return function
    return functools.partial(_WithClosure(function), *contents)


class _WithClosure:
    """Calls a function with other contents in its closure: as many as it has, before its own arguments."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, count = self.function, len(self.function.__closure__ or ())
        cells = tuple(map(types.CellType, args[:count]))
        inner = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        inner.__kwdefaults__ = function.__kwdefaults__
        return inner(*args[count:], **kwargs)


def used_elsewhere(recorder: Any, spied: dict[int, Any], values: tuple[Value, ...], name: str) -> tuple[Value, ...]:
    """Return the parameters and buffers among tensors that a call met without being given them.

    Raises:
        RecordingError: It met a tensor of this very forward pass: a closure that cannot be run again.
    """
    given = set(map(id, values))
    found: dict[int, Value] = {}
    for key in spied:
        value = recorder.ledger.current.get(key)
        if value is None or id(value) in given or value.kind is ValueKind.CONSTANT:
            continue
        if origin(value).kind in (ValueKind.PARAMETER, ValueKind.BUFFER):
            found[id(value)] = value
        else:
            raise _closes_over(recorder, name)
    return tuple(found.values())


def _closes_over(recorder: Any, name: str) -> RecordingError:
    return unseen(recorder.place_now(), f"a tensor inside a function given to `{name}` that is not among its arguments")


def _first_branch(predicate: Any, true_function: Any, false_function: Any, operands: Any = ()) -> Any:
    """Stand in for torch.cond on fakes: both branches give tensors of one shape, so either tells it."""
    return true_function(*operands)


def _one_call(
    recorder: Any, name: str, target: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with compat.no_torch_function():
        parts = unpack((args, kwargs))
        tensors = [recorder.ledger.stand_in(tensor) for tensor in parts.tensors]
        values = tuple(recorder.ledger.value_of(tensor) for tensor in tensors)
        versions = [compat.version_of(tensor) for tensor in tensors]
    if hides_tensor(parts.template) is not None:
        raise _closes_over(recorder, name)
    recorder.meter.reset()
    with recorder.quiet() as spied:
        result = function(*args, **kwargs)
    with compat.no_torch_function():
        written = [i for i, tensor in enumerate(tensors) if compat.version_of(tensor) != versions[i]]
        parameters = used_elsewhere(recorder, spied, values, name)
        return recorder.note(target, name, parts, values, tensors, written, result, parameters)


def _checkpoint(recorder: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Treat `checkpoint(function, ...)` like a module's call: kept whole where one stage holds all of it."""
    frame = recorder.frames.open(None, "checkpoint", args, kwargs)
    frame.function = target
    inner = {key: value for key, value in kwargs.items() if key not in _CHECKPOINT_OPTIONS}
    return recorder.frames.inside(frame, lambda function, *rest, **_: function(*rest, **inner), args, kwargs)
