"""Which item runs in which visit of which stage.

A stage that is left and entered again becomes a list of visits: an item joins the present visit of its stage unless
that would close a cycle. Items outside every mark follow what they use, or go to who uses them; what is cheap, pure and
made of inputs and constants alone runs once in each visit that needs it, so that no constant is sent around.

Where a spec divides the model, an item outside every claim that joins branches which do not know of each other goes to
who uses it: in one of the branches, it would make them a chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ppdsl.annotate import Key
from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording.findings import labels_of
from ppdsl.recording.items import Collapsed, Item
from ppdsl.recording.shared_state import Visit, changed_state, check_state, state_key, state_peers
from ppdsl.recording.tape import Value, ValueKind, origin

__all__ = ["Visit", "assign_visits"]


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
        self.joining: set[int] = set()
        self.peers = state_peers(collapsed.items)
        self.written = {id(before) for item in collapsed.items for before, _ in item.writes}
        self.changing = {key for item in collapsed.items for key in changed_state(item)}
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
            if item.replicated:
                raise _not_replicable(item, [m for m in self._makers(item) if id(m) in self.place])
            makers = self._makers(item)
            placed = [self.place[id(maker)] for maker in makers if id(maker) in self.place]
            if item.stage is None:
                if not placed or self._joins(item, makers, placed):
                    self.waiting[id(item)] = item
                    continue
                visit = max(
                    placed, key=lambda v: (sum(self.reach.path(o.position, v.position) for o in placed), v.position)
                )
            else:
                visit = self._visit_for(item.stage, self._before(makers))
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
            if value.holder is not None and item.replicated and value.kind is not ValueKind.PARAMETER:
                if state_key(value) in self.changing:
                    return False
            elif value.kind in (ValueKind.PARAMETER, ValueKind.BUFFER) or value.holder is not None:
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

    def _joins(self, item: Item, makers: list[Item], placed: list[Visit]) -> bool:
        """Whether the item, in a divided model, joins branches of which none comes after all the others."""
        if not self.collapsed.divided:
            return False
        joins = any(id(maker) in self.joining and id(maker) in self.waiting for maker in makers) or not any(
            all(self.reach.path(other.position, visit.position) for other in placed) for visit in placed
        )
        if joins:
            self.joining.add(id(item))
        return joins

    def _before(self, makers: list[Item]) -> list[Visit]:
        """The visits of what an item uses, through items that wait for it."""
        found: dict[int, Visit] = {}
        pending, seen = list(makers), set(map(id, makers))
        while pending:
            maker = pending.pop()
            if id(maker) in self.place:
                found[id(self.place[id(maker)])] = self.place[id(maker)]
                continue
            further = [other for other in self._makers(maker) if id(other) not in seen]
            seen.update(map(id, further))
            pending += further
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


def assign_visits(collapsed: Collapsed, outputs: Iterable[Value]) -> tuple[list[Visit], set[int]]:
    """Return the visits in topological order, and the ids of the items that run wherever they are needed.

    Raises:
        RecordingError: State is written in one stage and used in another.
    """
    builder = _Builder(collapsed, outputs)
    visits = builder.build()
    check_state(visits)
    return visits, builder.repeating


def _not_replicable(item: Item, makers: list[Item]) -> RecordingError:
    name = item.record.frame.name if item.record is not None else item.name
    if item.parameters or any(origin(value).kind is ValueKind.PARAMETER for value in item.inputs):
        why = "it uses a parameter"
    elif item.random:
        why = "it draws random numbers"
    elif makers:
        why = f"`{item.name}` in it uses a tensor that `{makers[0].module_name or makers[0].name}` makes"
    else:
        why = f"`{item.name}` in it keeps or changes state"
    return RecordingError(
        Diagnostic(
            "not-replicable",
            f"Module `{name}` cannot run in every stage that needs it, because {why}.",
            labels_of(item.place),
            "give it to one stage; what it makes is then sent to the others",
        )
    )
