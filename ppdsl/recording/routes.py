"""Where each value is made, and which values cross from one visit to another."""

from __future__ import annotations

from collections.abc import Iterable

from ppdsl.recording.findings import error_at
from ppdsl.recording.items import Collapsed, Item
from ppdsl.recording.tape import Value, ValueKind
from ppdsl.recording.visits import Visit

__all__ = ["Routes"]


class Routes:
    """Answers, for a value and a visit: is it made here, does it come from elsewhere, whose memory is it?

    Attributes:
        crossing: For each value that crosses, by id: (value, visit that makes it, visits that use it in order).
    """

    def __init__(
        self, collapsed: Collapsed, visits: list[Visit], repeating: set[int], outputs: Iterable[Value]
    ) -> None:
        self._collapsed = collapsed
        self._home: dict[int, Visit] = {}
        self._repeat: dict[int, Item] = {}
        self.crossing: dict[int, tuple[Value, Visit, list[Visit]]] = {}
        self.exports: dict[int, dict[int, Value]] = {id(visit): {} for visit in visits}
        # What a whole call returns after writing it in place inside has versions before it that no program ever holds.
        self._first = {
            id(value)
            for item in collapsed.items
            for value in (*(v for _, v in item.outputs), *(v for _, _, v in item.attributes))
        } - {id(after) for item in collapsed.items for _, after in item.writes}
        for item in collapsed.items:
            if id(item) in repeating:
                for _, value in item.outputs:
                    self._repeat[id(value)] = item
        for visit in visits:
            for item in visit.items:
                for value in _made(item):
                    self._home[id(value)] = visit
        for visit in visits:
            for item in self.items_of(visit):
                for value in item.inputs:
                    self._use(self.resolve(value), visit)
        for value in map(self.resolve, outputs):
            home = self.home(value) or visits[-1]
            self._check_view(value, home)
            self.exports[id(home)][id(value)] = value

    def resolve(self, value: Value) -> Value:
        """Follow values that a module passed on unchanged."""
        return self._collapsed.resolve(value)

    def home(self, value: Value) -> Visit | None:
        """Return the visit that makes the value; None when any can have it (inputs, parameters, repeated items)."""
        return self._home.get(id(value))

    def items_of(self, visit: Visit) -> list[Item]:
        """The visit's own items and the repeated ones that it needs, in recorded order."""
        needed: dict[int, Item] = {}
        pending = [self.resolve(value) for item in visit.items for value in item.inputs]
        pending += self.exports[id(visit)].values()
        while pending:
            item = self._repeat.get(id(pending.pop()))
            if item is not None and id(item) not in needed:
                needed[id(item)] = item
                pending.extend(self.resolve(value) for value in item.inputs)
        return sorted([*visit.items, *needed.values()], key=lambda item: item.order)

    def arrives(self, value: Value, visit: Visit) -> bool:
        """Whether the value reaches the visit from outside: from another visit, or from the caller."""
        home = self.home(value)
        return home is not visit if home is not None else value.kind is ValueKind.INPUT and value.before is None

    def memory(self, value: Value, visit: Visit) -> int:
        """Return a number for the memory that holds this value in this visit."""
        value = self.resolve(value)
        while not self.arrives(value, visit):
            if value.before is not None:
                value = self.resolve(value.before)
            elif value.base is not None and value.kind is ValueKind.RESULT:
                value = self.resolve(value.base)
            else:
                break
        return id(value)

    def same_tensor(self, value: Value, visit: Visit) -> Value:
        """Return the value under which the visit's program holds this tensor (before all writes in the visit)."""
        while not self.arrives(value, visit) and value.before is not None and id(value) not in self._first:
            value = self.resolve(value.before)
        return value

    def _use(self, value: Value, visit: Visit) -> None:
        home = self.home(value)
        if home is None:
            return
        self._check_view(value, home)
        if home is visit:
            return
        entry = self.crossing.setdefault(id(value), (value, home, []))
        if not any(other is visit for other in entry[2]):
            entry[2].append(visit)
        self.exports[id(home)][id(value)] = value

    def _check_view(self, value: Value, home: Visit) -> None:
        """A tensor that changed because another was written must share that one's memory in the writer's program."""
        if value.before is None:
            return
        writer = next((item for item in home.items if any(after is value for _, after in item.writes)), None)
        if writer is None:
            return
        given = set(map(id, map(self.resolve, writer.inputs)))
        reached = [
            before for before, _ in writer.writes if id(self.resolve(before)) in given or before.holder is not None
        ]
        if all(self.memory(before, home) != self.memory(value, home) for before in reached):
            raise error_at(
                "view-after-write",
                "A view is read after the tensor it shares memory with was written in place in another stage.",
                writer.place,
                "write out of place (x = x + y), or make the view in the stage that writes",
                "written here",
            )


def _made(item: Item) -> list[Value]:
    return (
        [value for _, value in item.outputs]
        + [value for _, value in item.writes]
        + [value for _, _, value in item.attributes]
    )
