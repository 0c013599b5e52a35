"""Where gradients flow: from the losses back through the autograd graph of the recorded fakes.

A tensor that requires a gradient need not get one: it may be used only detached, or for an output that no loss looks
at. Which uses of a value give it a gradient is found from the end, call by call::

    loss <- mse <- head <- h        h gets a gradient from `head`
                   head <- k.detach()           and k none from `detach`

A call whose inside is unknown (a module tried on real tensors, a branch) is taken to give every input its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ppdsl.recording.ledger import Ledger
from ppdsl.recording.side import is_loss, is_side
from ppdsl.recording.tape import Frame, Record, RecordKind, Tape, Value

__all__ = ["flow_of_gradients", "sides_of"]


def sides_of(tape: Tape) -> dict[int, bool]:
    """Return the records that say auxiliary losses or metrics, and whether one of them has a gradient."""
    sides = {
        record.index: is_loss(record) and record.inputs[0].meta.requires_grad
        for record in tape.records
        if is_side(record)
    }
    pending = [tape.root]
    while pending:
        frame = pending.pop()
        pending += [part for part in frame.parts if isinstance(part, Frame)]
        if frame.said and tape.records:
            # Said by code that is not recorded call by call, which the frame's last record stands for.
            last = max(0, (frame.end if frame.end >= 0 else len(tape.records)) - 1)
            sides[last] = sides.get(last, False) or any(frame.said)
    return sides


def flow_of_gradients(tape: Tape, ledger: Ledger) -> frozenset[tuple[int, int]]:
    """Return the pairs (id of a value, index of a record) where using the value in that record gives it a gradient.

    Args:
        tape: The recording.
        ledger: Its books, while the fakes are alive.
    """
    return _Walk(tape, ledger).run()


class _Walk:
    """Goes through the records from the last to the first."""

    def __init__(self, tape: Tape, ledger: Ledger) -> None:
        self._tape = tape
        self._nodes = ledger.nodes
        self._tensors = {id(tensor) for tensor in ledger.alive if isinstance(tensor, torch.Tensor)}
        self._tensors.update(ledger.current)
        self._tensors.update(map(id, ledger.stand_ins.values()))
        self._values: dict[tuple[int, int], list[Value]] = {}
        self._live: set[int] = set()
        self._flow: set[tuple[int, int]] = set()
        for value in _values_of(tape):
            node = self._nodes.get(id(value))
            if node is not None:
                self._values.setdefault((id(node[0]), node[1]), []).append(value)

    def run(self) -> frozenset[tuple[int, int]]:
        # Without a loss yet, every output may be what it looks at.
        ends = self._tape.outputs if self._tape.loss is None else (self._tape.loss,)
        self._live.update(id(value) for value in ends if value.meta.requires_grad)
        said = sides_of(self._tape)
        for record in reversed(self._tape.records):
            if is_side(record):
                if said[record.index]:
                    self._give(record.inputs, record)
                continue
            made = [value for _, value in (*record.outputs, *record.writes) if id(value) in self._live]
            if said.get(record.index):
                self._give(_taken(record), record)
            elif made:
                self._through(record, made)
        return frozenset(self._flow)

    def _give(self, values: Iterable[Value], record: Record) -> None:
        for value in values:
            if value.meta.requires_grad:
                self._live.add(id(value))
                self._flow.add((id(value), record.index))

    def _through(self, record: Record, made: list[Value]) -> None:
        """Follow gradients of what a record made to what it took."""
        starts = [self._nodes.get(id(value)) for value in made]
        if record.kind is RecordKind.MODULE or record.target is torch.cond or None in starts:
            self._give(_taken(record), record)
            return
        # What has no node of its own, a leaf, is not met on the way.
        self._give((value for value in _taken(record) if id(value) not in self._nodes), record)
        taken = set(map(id, _taken(record)))
        # A view that is written leads autograd to what it is a view of; a stage may have received the view alone.
        written = [before for before, _ in record.writes]
        memory = set(map(id, written))
        pending: list[tuple[Any, int]] = [start for start in starts if start is not None]
        # With the nodes themselves: what torch gives for a node is made anew when nobody holds it, perhaps with the id
        # of another one.
        seen: dict[tuple[int, int], Any] = {}
        while pending:
            node, number = pending.pop()
            if (id(node), number) in seen:
                continue
            seen[id(node), number] = node
            earlier = [v for v in self._values.get((id(node), number), ()) if v.record < record.index]
            if any(id(value) in taken for value in earlier):
                self._give(earlier, record)
                if any(id(value) in memory for value in earlier):
                    self._give(written, record)
                continue
            variable = getattr(node, "variable", None)
            if earlier or (isinstance(variable, torch.Tensor) and id(variable) not in self._tensors):
                # A way that was not seen, or a leaf made out of sight, where the graph was cut.
                self._give((*earlier, *_taken(record)), record)
                return
            pending += [(after, position) for after, position in node.next_functions if after is not None]


def _taken(record: Record) -> list[Value]:
    return [*record.inputs, *(before for before, _ in record.writes)]


def _values_of(tape: Tape) -> Iterator[Value]:
    """Each value of the recording once."""
    seen: set[int] = set()
    for value in tape.inputs:
        seen.add(id(value))
        yield value
    for record in tape.records:
        made = (*(v for _, v in record.outputs), *(v for pair in record.writes for v in pair))
        for value in (*record.inputs, *made):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
