"""Which item runs in which visit of which stage.

A stage that is left and entered again becomes a list of visits: an item joins the present visit of its stage unless
that would close a cycle. Items outside every mark follow what they use, or go to who uses them; what is cheap, pure and
made of inputs and constants alone runs once in each visit that needs it, so that no constant is sent around.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from ppdsl.annotate import Key
from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording.findings import labels_of
from ppdsl.recording.items import Collapsed, Item
from ppdsl.recording.tape import Value, ValueKind, memory_of, origin

__all__ = ["Visit", "assign_visits"]


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


class _Reach:
    """Which visit can be reached from which, as bit sets."""

    def __init__(self) -> None:
        self.after: list[int] = []  # after[i]: bits of the visits that run after visit i

    def add(self) -> None:
        self.after.append(0)

    def path(self, first: int, second: int) -> bool:
        return first == second or bool(self.after[first] >> second & 1)

    def connect(self, first: int, second: int) -> None:
        gained = self.after[second] | (1 << second)
        for visit, reached in enumerate(self.after):
            if visit == first or reached >> first & 1:
                self.after[visit] = reached | gained


class _Builder:
    def __init__(self, collapsed: Collapsed, outputs: Iterable[Value]) -> None:
        self.collapsed = collapsed
        self.outputs = [collapsed.resolve(value) for value in outputs]
        self.visits: list[Visit] = []
        self.latest: dict[Key, Visit] = {}
        self.reach = _Reach()
        self.maker: dict[int, Item] = {}
        self.place: dict[int, Visit] = {}
        self.waiting: dict[int, Item] = {}
        self.repeating: set[int] = set()
        self.peers = _state_peers(collapsed.items)
        self.written = {id(before) for item in collapsed.items for before, _ in item.writes}
        for item in collapsed.items:
            for _, value in item.outputs:
                self.maker[id(value)] = item
            for _, value in item.writes:
                self.maker[id(value)] = item
            for _, _, value in item.attributes:
                self.maker[id(value)] = item

    def build(self) -> list[Visit]:
        for item in self.collapsed.items:
            if self._repeats(item):
                continue
            makers = self._makers(item)
            placed = [self.place[id(maker)] for maker in makers if id(maker) in self.place]
            if item.stage is None:
                if not placed:
                    self.waiting[id(item)] = item
                    continue
                visit = max(
                    placed, key=lambda v: (sum(self.reach.path(o.position, v.position) for o in placed), v.position)
                )
            else:
                visit = self._visit_for(item.stage, placed)
            self._put(item, visit)
        self._place_rest()
        for visit in self.visits:
            visit.items.sort(key=lambda item: item.order)
        return self._in_order()

    def _repeats(self, item: Item) -> bool:
        """Whether the item is repeatable and so is everything it uses."""
        if not item.repeatable:
            return False
        for value in map(self.collapsed.resolve, item.inputs):
            if origin(value) is not value:
                return False  # written in place: there is an order to keep
            if value.kind in (ValueKind.PARAMETER, ValueKind.BUFFER) or value.holder is not None:
                return False
            maker = self.maker.get(id(value))
            if maker is not None and id(maker) not in self.repeating:
                return False
        if any(id(value) in self.written for _, value in item.outputs):
            return False
        self.repeating.add(id(item))
        return True

    def _makers(self, item: Item) -> list[Item]:
        found: dict[int, Item] = {}
        for value in map(self.collapsed.resolve, item.inputs):
            maker = self.maker.get(id(value))
            if maker is not None and maker is not item and id(maker) not in self.repeating:
                found[id(maker)] = maker
        found.update((id(peer), peer) for peer in self.peers.get(id(item), ()))
        return list(found.values())

    def _visit_for(self, key: Key, before: list[Visit]) -> Visit:
        visit = self.latest.get(key)
        if visit is not None and not any(
            other is not visit and self.reach.path(visit.position, other.position) for other in before
        ):
            return visit
        visit = Visit(key, 0 if visit is None else visit.number + 1, len(self.visits))
        self.visits.append(visit)
        self.reach.add()
        self.latest[key] = visit
        return visit

    def _put(self, item: Item, visit: Visit) -> None:
        pending = [item]
        while pending:
            item = pending.pop()
            if id(item) in self.place:
                continue
            self.waiting.pop(id(item), None)
            self.place[id(item)] = visit
            visit.items.append(item)
            for maker in self._makers(item):
                if id(maker) in self.waiting:
                    pending.append(maker)
                elif id(maker) in self.place and self.place[id(maker)] is not visit:
                    self.reach.connect(self.place[id(maker)].position, visit.position)

    def _place_rest(self) -> None:
        """Items that follow from nothing in any stage and that no stage uses: in the last one, which ends the step."""
        if not self.visits:
            self._visit_for(0, [])
        last = self._in_order()[-1]
        for item in list(self.waiting.values()):
            if id(item) in self.waiting:
                self._put(item, last)

    def _in_order(self) -> list[Visit]:
        """Topological order; among those ready, the one that was recorded first."""
        incoming = [
            sum(self.reach.after[other.position] >> visit.position & 1 for other in self.visits)
            for visit in self.visits
        ]
        ready = [(self._first(visit), visit.position) for visit in self.visits if incoming[visit.position] == 0]
        heapq.heapify(ready)
        order: list[Visit] = []
        while ready:
            _, position = heapq.heappop(ready)
            visit = self.visits[position]
            order.append(visit)
            for other in self.visits:
                if self.reach.after[position] >> other.position & 1:
                    incoming[other.position] -= 1
                    if incoming[other.position] == 0:
                        heapq.heappush(ready, (self._first(other), other.position))
        return order

    def _first(self, visit: Visit) -> int:
        return min((item.order for item in visit.items), default=0)


def _state_peers(items: Iterable[Item]) -> dict[int, list[Item]]:
    """For each item, by id: those before it that write state which it uses, or use state which it writes.

    Writes outside every mark (`self.ema.mul_(0.9)`) are in this way drawn to the stage whose module uses the state.
    """
    users: dict[tuple[int, str], list[Item]] = {}
    writers: dict[tuple[int, str], list[Item]] = {}
    peers: dict[int, list[Item]] = {}
    for item in items:
        writes = {_state_key(start) for start in _written_state(item)}
        if item.attribute_write:
            writes.add((id(item.target[0]), item.target[1]))
        reads = {_state_key(start) for start in _read_state(item)}
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


def assign_visits(collapsed: Collapsed, outputs: Iterable[Value]) -> tuple[list[Visit], set[int]]:
    """Return the visits in topological order, and the ids of the items that run wherever they are needed.

    Raises:
        RecordingError: State is written in one stage and used in another.
    """
    builder = _Builder(collapsed, outputs)
    visits = builder.build()
    _check_state(visits)
    return visits, builder.repeating


def _check_state(visits: list[Visit]) -> None:
    """Buffers and attributes are state of one visit, unless nobody writes them."""
    readers: dict[tuple[int, str], list[tuple[Visit, Item]]] = {}
    writers: dict[tuple[int, str], list[tuple[Visit, Item]]] = {}
    for visit in visits:
        for item in visit.items:
            for start in _read_state(item):
                readers.setdefault(_state_key(start), []).append((visit, item))
            for start in _written_state(item):
                writers.setdefault(_state_key(start), []).append((visit, item))
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


def _state_key(value: Value) -> tuple[int, str]:
    module, name = value.holder if value.holder is not None else (None, value.name)
    return id(module), name


def _shared_state(
    key: tuple[int, str], written: list[tuple[Visit, Item]], read: list[tuple[Visit, Item]]
) -> RecordingError:
    name = key[1]
    for _, item in written:
        for value in (*item.buffers_written, *(before for before, _ in item.writes)):
            start = origin(value)
            if start.holder is not None and _state_key(start) == key:
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
