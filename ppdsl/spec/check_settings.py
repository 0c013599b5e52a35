"""Settings and options: each known, of the right kind, and with an effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ppdsl.diagnostics import Label
from ppdsl.source import Span
from ppdsl.spec.check_order import order_of
from ppdsl.spec.context import Context
from ppdsl.spec.files import file_inside
from ppdsl.spec.keywords import DEVICES, LOSSES, OPTIONS, SCHEDULES, SETTINGS
from ppdsl.spec.nodes import SettingNode
from ppdsl.spec.partition import Mesh, Options, ScheduleDecl, Selection, Settings
from ppdsl.spec.quantities import bytes_of
from ppdsl.spec.selections import selection_of
from ppdsl.spec.terms import (
    Argument,
    Binary,
    CallValue,
    ListValue,
    Literal,
    LiteralKind,
    Name,
    Negative,
    Number,
    OrderValue,
    Pair,
)
from ppdsl.units import Bytes

__all__ = ["Found", "options_of", "settings_of"]

_EXPRESSION = Number | Name | Negative | Binary


@dataclass
class Found:
    """Values of settings, as far as they are known."""

    schedule: ScheduleDecl | None = None
    microbatches: int | None = None
    ranks: int | None = None
    memory: Bytes | None = None
    batch_axis: tuple[tuple[str, int | None], ...] | int | None = None
    loss: str | None = None
    device: str | None = None
    mesh: Mesh | None = None
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def settings(self) -> Settings:
        """Return all but the schedule."""
        return Settings(
            self.microbatches, self.ranks, self.memory, self.batch_axis, self.loss, self.device, self.mesh,
            tuple(self.spans),
        )  # fmt: skip


def settings_of(nodes: Mapping[str, SettingNode], context: Context) -> Found:
    """Return the values of settings, each given once; unknown ones are findings."""
    found = Found()
    for name, node in nodes.items():
        if name not in SETTINGS:
            context.unknown("unknown-setting", "setting", name, SETTINGS, _name_span(node))
            continue
        found.spans.append((name, node.span))
        _read(name, node, found, context)
    pp = dict(found.mesh.axes).get("pp") if found.mesh else None
    if pp is not None and found.ranks is not None and pp != found.ranks and found.mesh is not None:
        message = f"The mesh has {pp} ranks along pp, but `ranks` is {found.ranks}."
        context.report("mesh-and-ranks", message, found.mesh.span, nodes["ranks"].span, help="leave one of the two out")
    if found.ranks is None:
        found.ranks = pp
    return found


def _read(name: str, node: SettingNode, found: Found, context: Context) -> None:
    match name:
        case "schedule":
            found.schedule = _schedule(node, context)
        case "microbatches":
            found.microbatches = _count(node, "micro-batch", "no-microbatches", context)
        case "ranks":
            found.ranks = _count(node, "rank", "no-ranks", context)
        case "memory":
            found.memory = bytes_of(node.value, node.span, context)
        case "batch_axis":
            found.batch_axis = _batch_axis(node, context)
        case "loss":
            found.loss = _word(node.value, "loss", LOSSES, node.span, context)
        case "device":
            found.device = _word(node.value, "device", DEVICES, node.span, context)
        case _:
            found.mesh = _mesh(node, context)


def options_of(pairs: tuple[Pair, ...], context: Context, local: Mapping[str, int]) -> Options:
    """Return the options of a stage."""
    seen: dict[str, Span] = {}
    memory: Bytes | None = None
    flags: dict[str, bool | None] = {"compile": None, "freeze": None}
    recompute: str | tuple[Selection, ...] | None = None
    dtype: str | None = None
    for pair in pairs:
        if pair.name not in OPTIONS:
            context.unknown("unknown-option", "option", pair.name, OPTIONS, pair.span)
            continue
        if pair.name in seen:
            first = Label(seen[pair.name], "first given here")
            context.report("duplicate-option", f"Option `{pair.name}` is given twice.", pair.span, first)
            continue
        seen[pair.name] = pair.span
        if context.unsupported("option", pair.name, pair.span):
            continue
        match pair.name:
            case "memory":
                memory = bytes_of(pair.value, pair.span, context)
            case "recompute":
                recompute = _recompute(pair, context, local)
            case "dtype":
                dtype = _dtype(pair, context)
            case _:
                word = _word(pair.value, pair.name, ("true", "false"), pair.span, context)
                flags[pair.name] = None if word is None else word == "true"
    return Options(memory, recompute, dtype, flags["compile"], flags["freeze"])


def _dtype(pair: Pair, context: Context) -> str | None:
    if isinstance(pair.value, Name):
        return pair.value.name
    _wrong("a type", pair.span, context)
    return None


def _recompute(pair: Pair, context: Context, local: Mapping[str, int]) -> str | tuple[Selection, ...] | None:
    if isinstance(pair.value, ListValue):
        if context.unsupported("recompute", "modules", pair.span):
            return None
        found = [selection_of(selection, context, local) for selection in pair.value.selections]
        return tuple(selection for selection in found if selection is not None)
    return _word(pair.value, "recompute", ("full", "none"), pair.span, context)


# ---------------------------------------------------------------- single values


def _name_span(node: SettingNode) -> Span:
    span = node.span
    return Span(span.file, span.line, span.column, span.line, span.column + len(node.name))


def _wrong(what: str, span: Span, context: Context, help_text: str | None = None) -> None:
    context.report("wrong-value", f"The value must be {what}.", span, help=help_text)
    return


def _count(node: SettingNode, noun: str, code: str, context: Context) -> int | None:
    if not isinstance(node.value, _EXPRESSION):
        _wrong("a whole number", node.span, context)
        return None
    number = context.value(node.value)
    if number is not None and number < 1:
        context.report(code, f"`{node.name}` is {number}, but there is at least 1 {noun}.", node.span)
        return None
    return number


def _word(value: object, what: str, known: tuple[str, ...], span: Span, context: Context) -> str | None:
    if not isinstance(value, Name):
        _wrong(f"one of {', '.join(f'`{word}`' for word in known)}", span, context)
        return None
    if value.name not in known:
        names = ", ".join(f"`{word}`" for word in known)
        message = f"`{what}` cannot be `{value.name}`."
        context.report("unknown-value", message, value.span, help=f"one of: {names}")
        return None
    return None if context.unsupported(what, value.name, value.span) else value.name


def _batch_axis(node: SettingNode, context: Context) -> tuple[tuple[str, int | None], ...] | int | None:
    if isinstance(node.value, _EXPRESSION):
        return _axis(node.value, node.span, context)
    if not isinstance(node.value, tuple):
        _wrong("an axis, or an axis for each argument", node.span, context)
        return None
    axes: dict[str, int | None] = {}
    for pair in node.value:
        if pair.name in axes:
            context.report("duplicate-option", f"The axis of `{pair.name}` is given twice.", pair.span)
        none = isinstance(pair.value, Name) and pair.value.name == "none"
        axes[pair.name] = None if none else _axis(pair.value, pair.span, context)
    return tuple(axes.items())


def _axis(value: object, span: Span, context: Context) -> int | None:
    if not isinstance(value, _EXPRESSION):
        _wrong("a whole number", span, context)
        return None
    number = context.value(value)
    if number is not None and number < 0:
        context.report("wrong-value", f"An axis is a number from 0, not {number}.", span)
        return None
    return number


def _mesh(node: SettingNode, context: Context) -> Mesh | None:
    if not isinstance(node.value, tuple):
        _wrong("sizes between braces", node.span, context, "write `mesh { pp = 4 }`")
        return None
    axes: dict[str, int] = {}
    for pair in node.value:
        if pair.name not in {"dp", "pp"}:
            context.unknown("unknown-axis", "axis of a mesh named", pair.name, ("dp", "pp"), pair.span)
            continue
        if pair.name in axes:
            context.report("duplicate-option", f"Axis `{pair.name}` is given twice.", pair.span)
        if not isinstance(pair.value, _EXPRESSION):
            _wrong("a whole number", pair.span, context)
            continue
        size = context.value(pair.value)
        if size is None:
            continue
        if size < 1:
            context.report("no-ranks", f"The mesh has {size} ranks along {pair.name}, but at least 1.", pair.span)
        else:
            axes[pair.name] = size
    return Mesh(tuple(axes.items()), node.span)


# ---------------------------------------------------------------- schedule


def _schedule(node: SettingNode, context: Context) -> ScheduleDecl | None:
    match node.value:
        case OrderValue():
            order = order_of(node.value, context)
            return None if order is None else ScheduleDecl(node.span, order=order)
        case CallValue("csv", arguments, span):
            return _csv(arguments, span, node.span, context)
        case CallValue(name, arguments, span):
            shown = _named_schedule(
                name, Span(span.file, span.line, span.column, span.line, span.column + len(name)), context
            )
            bound = tuple(_argument(argument, context) for argument in arguments)
            return ScheduleDecl(node.span, family=shown, arguments=bound) if shown else None
        case Name(name, span) | Literal(LiteralKind.QUANTITY, name, span):
            shown = _named_schedule(name, span, context)
            return ScheduleDecl(node.span, family=shown) if shown else None
        case _:
            pass
    _wrong("a schedule's name, `csv(...)` or `order { ... }`", node.span, context)
    return None


def _named_schedule(name: str, span: Span, context: Context) -> str | None:
    if name in SCHEDULES:
        return name
    context.unknown("unknown-schedule", "schedule named", name, SCHEDULES, span)
    return None


def _argument(argument: Argument, context: Context) -> tuple[str, int | str]:
    value = argument.value
    if isinstance(value, Literal):
        return argument.name or "", value.text
    if isinstance(value, Name) and value.name not in context.values:
        return argument.name or "", value.name
    number = context.value(value)
    return argument.name or "", 0 if number is None else number


def _csv(arguments: tuple[Argument, ...], span: Span, whole: Span, context: Context) -> ScheduleDecl | None:
    first = arguments[0].value if len(arguments) == 1 and arguments[0].name is None else None
    if not isinstance(first, Literal):
        context.report("wrong-value", "`csv` takes one path.", span, help='write csv("order.csv")')
        return None
    file = file_inside(first.text, first.span, context)
    return None if file is None else ScheduleDecl(whole, file=file)
