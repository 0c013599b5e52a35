"""Values that follow from inputs and constants alone, worked out on real tensors: for guards and probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ppdsl.recording import compat
from ppdsl.recording.structure import fill, pick
from ppdsl.recording.tape import Record, RecordKind, Value, ValueKind

__all__ = ["Slice", "slice_of"]


class Slice:
    """The records that some known values follow from, ready to run on other inputs.

    Records run in the recorded order and write in place as they did, so that a value is read as it stood when the
    slice was taken.
    """

    def __init__(self, records: tuple[Record, ...], wanted: tuple[Value, ...]) -> None:
        self.records = records
        self.wanted = wanted

    def run(
        self, inputs: Sequence[torch.Tensor], randomness: Callable[[Record, Any], Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the wanted tensors for these inputs.

        Args:
            inputs: The caller's tensors, one micro-batch.
            randomness: Replaces the result of a call that draws random numbers.
        """
        tensors: dict[int, torch.Tensor] = {}
        written = {id(before) for record in self.records for before, _ in record.writes}

        def read(value: Value) -> torch.Tensor:
            while id(value) not in tensors and value.before is not None:
                value = value.before
            if id(value) not in tensors:
                source = inputs[value.index] if value.kind is ValueKind.INPUT else value.tensor
                if source is None:
                    raise LookupError(value.name)
                tensors[id(value)] = source.clone() if id(value) in written else source
            return tensors[id(value)]

        with compat.without_dispatch_modes(), torch.no_grad():
            for record in self.records:
                args, kwargs = fill(record.template, [read(value) for value in record.inputs])
                result = record.target(*args, **kwargs)
                if randomness is not None and record.random:
                    result = randomness(record, result)
                for path, value in record.outputs:
                    if value.before is None:
                        tensors[id(value)] = pick(result, path)
            return tuple(read(value) for value in self.wanted)


def slice_of(records: Sequence[Record], wanted: Sequence[Value]) -> Slice:
    """Return the records that `wanted` follow from, with every write to them, in recorded order."""
    needed: set[int] = set()
    pending = list(wanted)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.before is not None:
            pending.append(value.before)
        if value.base is not None:
            pending.append(value.base)
        if value.record >= 0 and value.record not in needed:
            record = records[value.record]
            if record.kind in (RecordKind.CALL, RecordKind.IDENTITY):
                needed.add(value.record)
                pending.extend(record.inputs)
    return Slice(tuple(records[index] for index in sorted(needed)), tuple(wanted))
