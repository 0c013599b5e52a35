"""Two recordings of one micro-batch must be the same: whatever Python counted, drew or built in between shows here."""

from __future__ import annotations

import types
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording.findings import labels_of
from ppdsl.recording.structure import Atom, Branch, Template, same_shape_of
from ppdsl.recording.tape import Record, Tape, Value, ValueKind

__all__ = ["difference"]


def difference(first: Tape, second: Tape) -> RecordingError | None:
    """Return the error that describes where two recordings part, or None when they agree."""
    for left, right in zip(first.records, second.records, strict=False):
        what = _differs(left, right)
        if what is not None:
            return _error(right, what)
    if len(first.records) != len(second.records):
        longer = max(first, second, key=lambda tape: len(tape.records))
        record = longer.records[min(len(first.records), len(second.records))]
        return _error(record, f"{len(first.records)} / {len(second.records)} calls")
    outputs = [tuple(map(_descriptor, tape.outputs)) for tape in (first, second)]
    if outputs[0] != outputs[1] and second.records:
        return _error(second.records[-1], "other outputs")
    return None


def _error(record: Record, what: str) -> RecordingError:
    return RecordingError(
        Diagnostic(
            "unstable-recording",
            f"Two recordings of the same micro-batch differ here: {what}.",
            labels_of(record.place),
            "a Python counter, random or numpy decides what runs between modules; move it into a module of one stage",
        )
    )


def _differs(left: Record, right: Record) -> str | None:
    if not _same_callable(left.target, right.target):
        return f"{_name(left)} / {_name(right)}"
    if left.kind is not right.kind or left.stage != right.stage:
        return f"stage {left.stage} / stage {right.stage}"
    if (left.place is None) != (right.place is None) or (
        left.place is not None and right.place is not None and left.place != right.place
    ):
        return f"{_where(left)} / {_where(right)}"
    if left.ambient != right.ambient:
        return "grad or autocast mode"
    if not same_shape_of(left.template, right.template):
        return _atoms_apart(left.template, right.template) or f"arguments of {_name(left)}"
    if left.expected != right.expected:
        return f"{left.expected} / {right.expected}"
    for a, b in zip(left.inputs, right.inputs, strict=True):
        if a.kind is ValueKind.CONSTANT and b.kind is ValueKind.CONSTANT:
            if not _same_constant(a, b):
                return f"a constant tensor of {_name(left)}"
        elif _descriptor(a) != _descriptor(b):
            return f"what goes into {_name(left)}"
    shapes = [[(path, value.meta) for path, value in record.outputs] for record in (left, right)]
    return None if shapes[0] == shapes[1] else f"the result of {_name(left)}"


def _descriptor(value: Value) -> tuple[Any, ...]:
    return (value.kind, value.index, value.record, value.path if value.before is None else ("written", value.name))


def _same_constant(left: Value, right: Value) -> bool:
    a, b = left.tensor, right.tensor
    if a is b or a is None or b is None:
        return a is b
    if left.meta != right.meta:
        return False
    try:
        return bool(torch.equal(a, b)) or bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))
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
    inner = getattr(left, "function", None)
    return inner is not None and _same_callable(inner, getattr(right, "function", None))


def _name(record: Record) -> str:
    if isinstance(record.target, tuple):
        return f"setting `{record.target[1]}`"
    return str(getattr(record.target, "__name__", type(record.target).__name__))


def _where(record: Record) -> str:
    return record.place.span.short if record.place is not None else "an unknown place"


def _atoms_apart(left: Template, right: Template) -> str | None:
    """Return the first pair of constants that differ."""
    if isinstance(left, Atom) and isinstance(right, Atom):
        return None if same_shape_of(left, right) else f"{left.value!r} / {right.value!r}"
    if isinstance(left, Branch) and isinstance(right, Branch) and len(left.children) == len(right.children):
        for a, b in zip(left.children, right.children, strict=True):
            apart = _atoms_apart(a, b)
            if apart is not None:
                return apart
    return None
