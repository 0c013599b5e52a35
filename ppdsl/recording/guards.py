"""What a plan assumes of its inputs, checked for each micro-batch before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording import compat
from ppdsl.recording.findings import error_at, labels_of
from ppdsl.recording.replay import Slice, slice_of
from ppdsl.recording.structure import Template, fill, unpack
from ppdsl.recording.tape import Record, Tape, origin
from ppdsl.source import Span

__all__ = ["Guard", "guard_of", "sharing_guards"]


@dataclass(frozen=True)
class Guard:
    """A Python value that the model took from its inputs, and that decided what was recorded.

    Attributes:
        expected: The value for the example inputs.
        span: The user's line.
        about: What steers the model, as a sentence.
    """

    expected: Any
    span: Span | None
    about: str
    _function: Any
    _template: Template
    _slice: Slice

    def value(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Return what these inputs give, one micro-batch's tensors in the order of `StageGraph.inputs`."""
        args, kwargs = fill(self._template, self._slice.run(leaves))
        with compat.without_dispatch_modes(), torch.no_grad():
            return self._function(*args, **kwargs)

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Compare with the recording.

        Raises:
            CallError: These inputs would have taken another way through the model.
        """
        value = self.value(leaves)
        if value == self.expected:
            return
        raise CallError(
            Diagnostic(
                "input-guard",
                f"{self.about}: it was recorded for {_short(self.expected)}, this micro-batch gives {_short(value)}.",
                labels_of(self.span),
                "record with such a micro-batch, or write the choice with torch.where",
            )
        )


def guard_of(record: Record, tape: Tape) -> Guard:
    """Return the guard that a record of the tape stands for."""
    return Guard(
        record.expected,
        record.place.span if record.place is not None else None,
        getattr(record.target, "about", "The numbers in this input steer the model"),
        record.target,
        record.template,
        slice_of(tape.records, record.inputs),
    )


def sharing_guards(tape: Tape, examples: Sequence[torch.Tensor]) -> tuple[Guard, ...]:
    """Return what must hold of inputs that are the same tensor, or of which one is written while they share memory.

    Raises:
        RecordingError: One input is written, and another shares its memory without being the same tensor.
    """
    same = _same_tensors(*examples)
    written = {origin(before).index for record in tape.records for before, _ in record.writes} - {-1}
    memory = _same_memory(*examples)
    for index in written:
        for other, name in enumerate(value.name for value in tape.inputs):
            if memory[other] == memory[index] and same[other] != same[index]:
                raise error_at(
                    "shared-inputs",
                    f"Argument `{tape.inputs[index].name}` is written in place, and `{name}` shares its memory.",
                    None,
                    "pass a copy, x.clone()",
                )
    guards = []
    if same != list(range(len(same))):
        guards.append(_sharing_guard(_same_tensors, same, tape, examples))
    if written:
        guards.append(_sharing_guard(_same_memory, memory, tape, examples))
    return tuple(guards)


def _sharing_guard(function: Any, expected: Any, tape: Tape, examples: Sequence[torch.Tensor]) -> Guard:
    template = unpack((tuple(examples), {})).template
    return Guard(
        expected, None, "Inputs that share memory steer the model", function, template, slice_of((), tape.inputs)
    )


def _same_tensors(*tensors: torch.Tensor) -> list[int]:
    """For each tensor the position of the first one with the very same memory and strides."""
    return _first_with([(_memory_of(t), t.storage_offset(), t.size(), t.stride()) for t in tensors])


def _same_memory(*tensors: torch.Tensor) -> list[int]:
    return _first_with([_memory_of(tensor) for tensor in tensors])


def _memory_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _first_with(keys: list[Any]) -> list[int]:
    return [keys.index(key) for key in keys]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
