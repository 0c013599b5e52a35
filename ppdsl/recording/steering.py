"""Python values taken from tensors while recording: constants are known, inputs become guards, the rest is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ppdsl.recording import compat
from ppdsl.recording.findings import data_dependence, error_at
from ppdsl.recording.probe import probe_call
from ppdsl.recording.replay import slice_of
from ppdsl.recording.structure import Unpacked, fill
from ppdsl.recording.tape import Record, RecordKind, Value

__all__ = [
    "ShapesOf",
    "python_of_constant",
    "python_of_input",
    "python_value",
    "shape_of_input",
    "unpack_like",
    "without_fake_kernel",
]

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def python_value(
    recorder: Any,
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    parts: Unpacked,
    values: tuple[Value, ...],
    *,
    fake: bool,
) -> Any:
    """Return what a call that turns tensors into a Python value gives.

    Raises:
        DataDependence: It needs numbers that are not there.
    """
    if name == "__format__" and fake:
        return object.__format__(args[0], "") if not args[1:] or not args[1] else "?"
    if not fake:
        return python_of_constant(recorder, func, name, args, kwargs, values)
    if all(value.known for value in values):
        return python_of_input(recorder, func, name, parts, values)
    raise data_dependence(name, recorder.place_now(), recorder.frames.current, any(value.random for value in values))


def without_fake_kernel(
    recorder: Any,
    func: Any,
    name: str,
    parts: Unpacked,
    values: tuple[Value, ...],
    tensors: list[torch.Tensor],
    error: Exception,
) -> Any:
    """Return fakes for the result of a call that cannot run on fakes."""
    if all(value.known for value in values) and isinstance(error, compat.DATA_ERRORS):
        return shape_of_input(recorder, func, parts, values)
    return probe_call(recorder, func, name, parts, values, tensors, error)


def python_of_constant(recorder: Any, func: Any, name: str, args: Any, kwargs: Any, values: tuple[Value, ...]) -> Any:
    """Return the real result; a random number may steer the program only if it could not have steered it otherwise."""
    result = func(*args, **kwargs)
    if not any(value.random for value in values):
        return result
    parts = unpack_like(args, kwargs)
    for extreme in (0.0, _LARGEST_BELOW_ONE):
        try:
            tensors = slice_of(recorder.records, values).run(recorder.examples, partial(_extreme, extreme=extreme))
            other_args, other_kwargs = fill(parts.template, tensors)
            other = func(*other_args, **other_kwargs)
        except (_NotUniform, LookupError):
            raise data_dependence(name, recorder.place_now(), recorder.frames.current, True) from None
        if other != result:
            raise data_dependence(name, recorder.place_now(), recorder.frames.current, True)
    return result


def python_of_input(recorder: Any, func: Any, name: str, parts: Unpacked, values: tuple[Value, ...]) -> Any:
    """Return the result for the example inputs, and guard it: another micro-batch must give the same."""
    place = recorder.place_now()
    try:
        tensors = slice_of(recorder.records, values).run(recorder.examples)
    except LookupError as error:
        raise error_at(
            "no-example-values",
            f"The value of argument `{error.args[0]}` steers this code, but the example has no values.",
            place,
            "record with real example inputs, not with fake or meta tensors",
        ) from None
    args, kwargs = fill(parts.template, tensors)
    with compat.without_dispatch_modes():
        result = func(*args, **kwargs)
    if any(value.random for value in values) or not _guardable(result):
        raise data_dependence(name, place, recorder.frames.current, any(value.random for value in values))
    record = recorder.append(RecordKind.GUARD, func, parts.template, values)
    record.expected = result
    record.effect = True
    return result


def shape_of_input(recorder: Any, func: Any, parts: Unpacked, values: tuple[Value, ...]) -> Any:
    """Return fakes for a result whose shape depends on the numbers in the inputs; the shape is guarded."""
    if any(value.random for value in values):
        raise data_dependence(getattr(func, "__name__", "a call"), recorder.place_now(), recorder.frames.current, True)
    try:
        tensors = slice_of(recorder.records, values).run(recorder.examples)
    except LookupError:
        raise data_dependence(
            getattr(func, "__name__", "a call"), recorder.place_now(), recorder.frames.current
        ) from None
    args, kwargs = fill(parts.template, tensors)
    with compat.without_dispatch_modes():
        result = func(*args, **kwargs)
    outs = unpack_like(result)
    record = recorder.append(RecordKind.GUARD, ShapesOf(func), parts.template, values)
    record.expected = [tuple(tensor.shape) for tensor in outs.tensors]
    record.effect = True
    return fill(outs.template, [recorder.fakes.fake_of(tensor) for tensor in outs.tensors])


class ShapesOf:
    """Calls a function and returns the shapes of the tensors in its result."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = f"shape of {getattr(function, '__name__', 'result')}"

    def __call__(self, *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
        """Return the shapes for these arguments."""
        return [tuple(tensor.shape) for tensor in unpack_like(self.function(*args, **kwargs)).tensors]


def unpack_like(*value: Any) -> Unpacked:
    """Take one value, or several as a tuple, apart."""
    from ppdsl.recording.structure import unpack

    return unpack(value[0] if len(value) == 1 else value)


class _NotUniform(Exception):
    pass


def _extreme(record: Record, drawn: Any, extreme: float) -> Any:
    if getattr(record.target, "__name__", "") not in ("rand", "rand_like"):
        raise _NotUniform
    return torch.full_like(drawn, extreme)


def _guardable(result: Any) -> bool:
    if isinstance(result, list):
        return all(map(_guardable, result))
    return isinstance(result, (bool, int, str))
