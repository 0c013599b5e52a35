"""State of modules between visits: what is written in one may not be used in another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ppdsl.annotate import Key
from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording.findings import labels_of
from ppdsl.recording.items import Item
from ppdsl.recording.tape import Value, memory_of, origin

__all__ = ["Visit", "changed_state", "check_state", "state_key", "state_peers", "written_attributes"]


@dataclass(slots=True, eq=False)
class Visit:
    """One node of the stage graph while it is being built.

    Attributes:
        key: The stage's key.
        number: Which visit of the key, from 0.
        items: In recorded order once all are placed.
    """

    key: Key
    number: int
    position: int
    items: list[Item] = field(default_factory=list)


def state_peers(items: Iterable[Item]) -> dict[int, list[Item]]:
    """Return for each item, by id, those before it that write state which it uses, or use state which it writes.

    Writes outside every mark (`self.ema.mul_(0.9)`) are in this way drawn to the stage whose module uses the state.
    """
    users: dict[tuple[int, str], list[Item]] = {}
    writers: dict[tuple[int, str], list[Item]] = {}
    peers: dict[int, list[Item]] = {}
    for item in items:
        writes = {state_key(start) for start in _written_state(item)}
        if item.attribute_write:
            writes.add((id(item.target[0]), item.target[1]))
        reads = {state_key(start) for start in _read_state(item)}
        found = [peer for key in writes for peer in users.get(key, ())]
        found += [peer for key in reads - writes for peer in writers.get(key, ())]
        if found:
            peers[id(item)] = found
        for key in reads | writes:
            users.setdefault(key, []).append(item)
        for key in writes:
            writers.setdefault(key, []).append(item)
    return peers


def _read_state(item: Item) -> list[Value]:
    """State of modules that an item reads: parameters, buffers, tensor attributes."""
    starts = map(origin, (*item.buffers_read, *item.parameters, *item.inputs))
    return [start for start in starts if start.holder is not None]


def _written_state(item: Item) -> list[Value]:
    starts = map(origin, (*item.buffers_written, *(before for before, _ in item.writes)))
    return [start for start in starts if start.holder is not None]


def changed_state(item: Item) -> list[tuple[int, str]]:
    """Return the places on modules that an item writes or replaces."""
    keys = [state_key(start) for start in _written_state(item)]
    keys += [(id(module), name) for module, name in item.assigned]
    return [*keys, (id(item.target[0]), item.target[1])] if item.attribute_write else keys


def written_attributes(items: Iterable[Item]) -> tuple[tuple[Any, str], ...]:
    """Return (module, attribute) of each buffer and tensor attribute that some item changes, each once."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for item in items:
        holders = [start.holder for start in _written_state(item) if start.holder is not None]
        if item.attribute_write:
            holders.append((item.target[0], item.target[1]))
        for module, name in (*holders, *item.assigned):
            found[id(module), name] = (module, name)
    return tuple(found.values())


def check_state(visits: list[Visit]) -> None:
    """Refuse buffers and attributes that one visit writes and another uses.

    Raises:
        RecordingError: There is one.
    """
    readers: dict[tuple[int, str], list[tuple[Visit, Item]]] = {}
    writers: dict[tuple[int, str], list[tuple[Visit, Item]]] = {}
    for visit in visits:
        for item in visit.items:
            for start in _read_state(item):
                readers.setdefault(state_key(start), []).append((visit, item))
            for start in _written_state(item):
                writers.setdefault(state_key(start), []).append((visit, item))
            if item.attribute_write:
                module, name = item.target
                writers.setdefault((id(module), name), []).append((visit, item))
    _add_writes_after_assignment(visits, writers)
    _add_assignments_inside(visits, writers, readers)
    for key, written in writers.items():
        everyone = written + readers.get(key, [])
        if len({id(visit) for visit, _ in everyone}) > 1:
            raise _shared_state(key, written, readers.get(key, []))


def _add_writes_after_assignment(visits: list[Visit], writers: dict[tuple[int, str], list[tuple[Visit, Item]]]) -> None:
    """A tensor assigned to an attribute is that attribute's state: who writes it afterwards writes the state."""
    kept: dict[int, tuple[tuple[int, str], tuple[Visit, Item]]] = {}
    everything = sorted(((item, visit) for visit in visits for item in visit.items), key=lambda entry: entry[0].order)
    for item, visit in everything:
        for before, _ in item.writes:
            found = kept.get(id(memory_of(before)))
            if found is not None:
                key, assigned = found
                writers.setdefault(key, []).extend((assigned, (visit, item)))
        assignments = [(*item.target, value) for value in item.inputs] if item.attribute_write else item.attributes
        for module, name, value in assignments:
            kept[id(memory_of(value))] = ((id(module), name), (visit, item))


def _add_assignments_inside(
    visits: list[Visit],
    writers: dict[tuple[int, str], list[tuple[Visit, Item]]],
    readers: dict[tuple[int, str], list[tuple[Visit, Item]]],
) -> None:
    """A visit may leave something of its own in an attribute, if nobody elsewhere reads what was there before."""
    for visit in visits:
        for item in visit.items:
            for module, name in item.assigned:
                key = (id(module), name)
                if any(reader is not visit for reader, _ in readers.get(key, [])):
                    writers.setdefault(key, []).append((visit, item))


def state_key(value: Value) -> tuple[int, str]:
    """Return what tells the place on a module where a value is kept from all others."""
    module, name = value.holder if value.holder is not None else (None, value.name)
    return id(module), name


def _shared_state(
    key: tuple[int, str], written: list[tuple[Visit, Item]], read: list[tuple[Visit, Item]]
) -> RecordingError:
    name = key[1]
    for _, item in written:
        for value in (*item.buffers_written, *(before for before, _ in item.writes)):
            start = origin(value)
            if start.holder is not None and state_key(start) == key:
                name = start.name
    labels = [f"{visit.key}" + "'" * visit.number for visit, _ in written]
    readers = [f"{visit.key}" + "'" * visit.number for visit, _ in read]
    return RecordingError(
        Diagnostic(
            "shared-state",
            f"`{name}` is written in stage {', '.join(dict.fromkeys(labels))} and used in stage "
            f"{', '.join(dict.fromkeys([*labels, *readers]))}: micro-batches would see each other's values.",
            labels_of(written[0][1].place, *(item.place for visit, item in read if visit is not written[0][0])),
            "keep all that uses it in one stage, without leaving it in between",
        )
    )
