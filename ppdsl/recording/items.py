"""From calls to items: each module call that can stay whole becomes one item, everything else is taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ppdsl.annotate import Key
from ppdsl.recording.collectives import forced_call
from ppdsl.recording.side import is_side
from ppdsl.recording.structure import Path, Template, fill
from ppdsl.recording.tape import Ambient, Frame, Record, RecordKind, Tape, Value, ValueKind, memory_of, origin
from ppdsl.source import Place

__all__ = ["Collapsed", "Item", "collapse"]

_NEVER = -1
_ALWAYS = 1 << 60


@dataclass(slots=True, eq=False)
class Item:
    """One step of a stage program: a module's call, or a torch call between modules.

    Attributes:
        order: Position in the recording.
        target: What to call: a module, a function, or (module, attribute name) for an attribute write.
        module_name: The module's dotted name, when `target` is a module of the model.
        template: (args, kwargs) with holes.
        inputs: For each hole its value.
        outputs: (path in the result, value).
        attributes: (module, name, value) of tensors it leaves in attributes that others read.
        assigned: (module, name) of each attribute that it sets by itself to a tensor.
        writes: (before, after) of tensors it writes in place.
        parameters: Parameters it uses by itself.
        buffers_read, buffers_written: Buffers and tensor attributes it touches by itself.
        stage: The stage mark, or None when it floats.
        attribute_write: It sets an attribute of a module.
        effect: It must run even if nobody uses its result.
        random: It draws random numbers.
        is_module: It is a call of a module (or of `checkpoint`) that stays whole.
        volatile: Numbers decide which way it takes inside, so that another micro-batch may use other parameters.
        flops: Floating-point operations.
        record: The record it stands for, when it is no whole call.
        replicated: A spec asks that it runs in each stage that needs it.
        records: Indices of the records that it stands for.
    """

    order: int
    target: Any
    template: Template
    inputs: tuple[Value, ...]
    outputs: list[tuple[Path, Value]]
    stage: Key | None
    ambient: Ambient
    place: Place | None
    name: str
    module_name: str | None = None
    attributes: list[tuple[Any, str, Value]] = field(default_factory=list)
    writes: list[tuple[Value, Value]] = field(default_factory=list)
    parameters: tuple[Value, ...] = ()
    buffers_read: tuple[Value, ...] = ()
    buffers_written: tuple[Value, ...] = ()
    assigned: tuple[tuple[Any, str], ...] = ()
    attribute_write: bool = False
    effect: bool = False
    random: bool = False
    is_module: bool = False
    volatile: bool = False
    flops: int = 0
    record: Record | None = None
    replicated: bool = False
    records: range = range(0)

    @property
    def repeatable(self) -> bool:
        """Whether it may run once in each stage that needs it: cheap, pure, from inputs and constants alone."""
        return (
            not (self.is_module or self.effect or self.random or self.writes or self.parameters or self.attribute_write)
            and (self.flops == 0 or self.replicated)
            and not any(value.meta.requires_grad for _, value in self.outputs)
        )


@dataclass(slots=True)
class Collapsed:
    """The items of a recording.

    Attributes:
        items: In recorded order.
        guards: Guards outside every whole call.
        replaced: Values that are another value passed on unchanged.
        open_frames: Calls that were taken apart, with the reason.
        tainted: Ids of modules on which code that was taken apart changes something.
        divided: A spec gave the stages, not marks.
    """

    items: list[Item]
    guards: list[Record]
    replaced: dict[int, Value]
    open_frames: list[Frame]
    tainted: frozenset[int] = frozenset()
    divided: bool = False

    def resolve(self, value: Value) -> Value:
        """Follow values that were passed on unchanged."""
        while id(value) in self.replaced:
            value = self.replaced[id(value)]
        return value


def collapse(tape: Tape) -> Collapsed:
    """Keep each module call whole that lies in one stage and touches the rest only through its arguments and results.

    A call is taken apart, and its inner calls tried in turn, when it holds a stage border; when it uses a tensor that
    it was not given; when a tensor made inside is used outside without being returned; when it changes an object among
    its arguments.
    """
    uses = _last_uses(tape)
    result = _collapse(tape, uses, tape.tainted)
    while True:
        # A call that was taken apart may itself change what others read: until nothing new is found.
        changed = {key for frame in (tape.root, *result.open_frames) for key, _ in frame.changed}
        if changed <= result.tainted:
            return result
        result = _collapse(tape, uses, result.tainted | changed)


def _collapse(tape: Tape, uses: dict[int, int], tainted: frozenset[int]) -> Collapsed:
    result = Collapsed([], [], {}, [], tainted, tape.divided)

    def walk(frame: Frame) -> None:
        for part in frame.parts:
            if isinstance(part, Record):
                _take_record(part, result, replicated=part.index in tape.repeated)
                continue
            reason = _why_open(part, tape, uses) or _why_tainted(part, tainted) or _why_replicated(part, tape)
            if reason is None:
                result.items.append(_whole(part, tape, uses))
            elif part.forced:
                raise forced_call(part, reason)
            else:
                part.keep_open = reason
                result.open_frames.append(part)
                walk(part)

    walk(tape.root)
    return result


def _take_record(record: Record, result: Collapsed, *, replicated: bool) -> None:
    if record.kind in (RecordKind.GUARD, RecordKind.INPUTS):
        result.guards.append(record)
        return
    if record.kind is RecordKind.IDENTITY:
        ((_, value),) = record.outputs
        result.replaced[id(value)] = record.inputs[0]
        return
    attribute = record.kind is RecordKind.ATTRIBUTE
    item = Item(
        record.index, record.target, record.template, record.inputs, record.outputs, record.stage, record.ambient,
        record.place, _name_of(record), writes=record.writes, attribute_write=attribute, effect=record.effect,
        random=record.random, flops=record.flops, record=record, replicated=replicated,
        records=range(record.index, record.index + 1),
    )  # fmt: skip
    item.parameters = tuple(v for v in record.parameters if origin(v).kind is ValueKind.PARAMETER)
    item.buffers_read = tuple(v for v in record.parameters if origin(v).kind is ValueKind.BUFFER)
    made = not is_side(record) or any(value.record >= 0 for value in record.inputs)
    if record.effect and not attribute and not record.writes and made:
        item.stage = None  # a hook on a tensor, or a loss, belongs to the stage that made the tensor
    result.items.append(item)


def _name_of(record: Record) -> str:
    if record.kind is RecordKind.ATTRIBUTE:
        return str(record.target[1])
    if record.target is getattr:
        (_, attribute), _ = fill(record.template, [None])
        return str(attribute)
    return getattr(record.target, "__name__", type(record.target).__name__)


def _last_uses(tape: Tape) -> dict[int, int]:
    """For each value the index of the last record that uses it."""
    uses: dict[int, int] = {}
    for record in tape.records:
        for value in record.inputs:
            uses[id(value)] = record.index
    pending = list(tape.root.parts)
    while pending:
        part = pending.pop()
        if isinstance(part, Frame):
            pending.extend(part.parts)
            for value in part.inputs:  # given to a module inside an object, though the module may not look at it
                uses[id(value)] = max(part.start, uses.get(id(value), _NEVER))
    for value in (*tape.outputs, *((tape.loss,) if tape.loss is not None else ())):
        uses[id(value)] = _ALWAYS
    return uses


def _records(frame: Frame, tape: Tape) -> list[Record]:
    return tape.records[frame.start : frame.end]


def _why_open(frame: Frame, tape: Tape, uses: dict[int, int]) -> str | None:
    """Return why this call cannot stay whole, or None."""
    if frame.result is None:
        return "it did not return"
    if frame.keep_open:
        return frame.keep_open
    records = _records(frame, tape)
    stages = {record.stage for record in records if record.stage is not None}
    if len(stages) > 1:
        return "it crosses stages"
    given = set(map(id, frame.inputs))
    for record in records:
        if record.kind is RecordKind.INPUTS:
            continue
        for value in record.inputs:
            if value.record >= frame.start or _by_itself(value):
                continue
            if id(value) not in given:
                return "it uses a tensor that is not among its arguments"
            if id(value) in frame.held:
                return "it may reach an argument by a way of its own"
    return _why_leaks(frame, records, given, uses)


def _why_tainted(frame: Frame, tainted: frozenset[int]) -> str | None:
    if tainted and frame.module is not None and any(id(module) in tainted for module in frame.module.modules()):
        return "code between modules changes what it keeps"
    return None


def _why_replicated(frame: Frame, tape: Tape) -> str | None:
    """A replicated call is taken apart: often it is given an activation only to see its dtype."""
    inside = range(frame.start, frame.end)
    return "it is replicated" if inside and tape.repeated.issuperset(inside) else None


def _by_itself(value: Value) -> bool:
    """Whether a module's own code finds this value without being given it."""
    return origin(value).kind in (ValueKind.PARAMETER, ValueKind.BUFFER, ValueKind.CONSTANT)


def _why_leaks(frame: Frame, records: list[Record], given: set[int], uses: dict[int, int]) -> str | None:
    visible = set(map(id, frame.outputs)) | {id(value) for _, _, value in _attributes(frame)}
    for record in records:
        for _, value in record.outputs:
            if uses.get(id(value), _NEVER) >= frame.end and id(value) not in visible:
                return "a tensor made inside is used outside without being returned"
        for before, after in record.writes:
            start = _before_frame(before, frame)
            if start is None:
                if uses.get(id(after), _NEVER) >= frame.end and id(after) not in visible:
                    return "a tensor written inside is used outside without being returned"
            elif id(start) not in given and not _by_itself(start) and not _shares_given(start, frame):
                return "it writes a tensor that is not among its arguments"
    return None


def _before_frame(value: Value, frame: Frame) -> Value | None:
    """Return the value this tensor had when the call began, or None when the call made the tensor."""
    while value.record >= frame.start and value.before is not None:
        value = value.before
    return None if value.record >= frame.start else value


def _shares_given(value: Value, frame: Frame) -> bool:
    """Whether the value shares memory with an argument (a view of it, or what it is a view of)."""
    roots = {id(memory_of(given)) for given in frame.inputs}
    return id(memory_of(value)) in roots


def _whole(frame: Frame, tape: Tape, uses: dict[int, int]) -> Item:
    records = _records(frame, tape)
    stages: set[Key | None] = {record.stage for record in records if record.stage is not None} or {frame.stage}
    target = frame.module if frame.module is not None else frame.function
    item = Item(
        frame.start, target, frame.arguments.template, frame.inputs, [], stages.pop(), frame.ambient, frame.place,
        frame.name, effect=True, is_module=True, random=any(r.random for r in records),
        flops=sum(r.flops for r in records), records=range(frame.start, frame.end),
    )  # fmt: skip
    item.module_name = frame.name if frame.module is not None and frame.registered else None
    if frame.result is not None:
        item.outputs = _outputs(frame.result.paths, frame.outputs)
    returned = {id(value) for _, value in item.outputs}
    item.attributes = [
        entry
        for entry in _attributes(frame)
        if uses.get(id(entry[2]), _NEVER) >= frame.end and id(entry[2]) not in returned
    ]
    item.assigned = tuple((module, name) for module, name, _ in _attributes(frame))
    item.writes = list(_outer_writes(records, frame))
    touched = [v for record in records for v in (*record.inputs, *record.parameters)]
    item.parameters = _distinct(v for v in touched if origin(v).kind is ValueKind.PARAMETER)
    item.volatile = any(r.kind in (RecordKind.GUARD, RecordKind.MODULE) for r in records) or _drew(frame)
    item.buffers_read = _distinct(v for v in touched if _is_state(v))
    item.buffers_written = _distinct(before for record in records for before, _ in record.writes if _is_state(before))
    return item


def _drew(frame: Frame) -> bool:
    return frame.drew or any(_drew(part) for part in frame.parts if isinstance(part, Frame))


def _outputs(paths: tuple[Path, ...], values: tuple[Value, ...]) -> list[tuple[Path, Value]]:
    """One path for each value: the same tensor returned twice is one result."""
    seen: dict[int, tuple[Path, Value]] = {}
    for path, value in zip(paths, values, strict=True):
        seen.setdefault(id(value), (path, value))
    return list(seen.values())


def _outer_writes(records: list[Record], frame: Frame) -> Iterator[tuple[Value, Value]]:
    """For each tensor from outside that was written: its value at the call and its value at the end."""
    last: dict[int, tuple[Value, Value]] = {}
    for record in records:
        for before, after in record.writes:
            start = _before_frame(before, frame)
            if start is not None:
                last[id(start)] = (start, after)
    return iter(last.values())


def _is_state(value: Value) -> bool:
    start = origin(value)
    return start.kind is ValueKind.BUFFER or (start.kind is ValueKind.CONSTANT and start.holder is not None)


def _distinct(values: Iterator[Value]) -> tuple[Value, ...]:
    return tuple({id(origin(value)): origin(value) for value in values}.values())


def _attributes(frame: Frame) -> list[tuple[Any, str, Value]]:
    """Tensor attributes set inside, the last value of each."""
    found = {(id(module), name): (module, name, value) for module, name, value in frame.attributes}
    for part in frame.parts:
        if isinstance(part, Frame):
            found.update({(id(module), name): (module, name, value) for module, name, value in _attributes(part)})
    return list(found.values())
