"""What a plan assumes of its inputs, checked for each micro-batch before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording import compat
from ppdsl.recording.findings import labels_of
from ppdsl.recording.replay import Slice, slice_of
from ppdsl.recording.structure import Template, fill
from ppdsl.recording.tape import Record, Tape
from ppdsl.source import Span

__all__ = ["Guard", "guard_of"]


@dataclass(frozen=True)
class Guard:
    """A Python value that the model took from its inputs, and that decided what was recorded.

    Attributes:
        expected: The value for the example inputs.
        span: The user's line.
    """

    expected: Any
    span: Span | None
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
                f"The numbers in this input steer the model: it was recorded for {_short(self.expected)}, this "
                f"micro-batch gives {_short(value)}.",
                labels_of(self.span),
                "record with such a micro-batch, or write the choice with torch.where",
            )
        )


def guard_of(record: Record, tape: Tape) -> Guard:
    """Return the guard that a record of the tape stands for."""
    return Guard(
        record.expected,
        record.place.span if record.place is not None else None,
        record.target,
        record.template,
        slice_of(tape.records, record.inputs),
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
