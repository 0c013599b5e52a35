"""The small parts of the syntax tree: arithmetic, selections, values of settings and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from ppdsl.source import Span

__all__ = [
    "NO_SPAN",
    "ActionNode",
    "Argument",
    "Binary",
    "CallNode",
    "CallValue",
    "CutpointNode",
    "DifferenceNode",
    "Expression",
    "ListValue",
    "Literal",
    "LiteralKind",
    "Name",
    "Negative",
    "Number",
    "OrderAction",
    "OrderValue",
    "Pair",
    "PathNode",
    "PathPart",
    "PathPartKind",
    "Range",
    "RegexNode",
    "RepeatNode",
    "RestNode",
    "RowNode",
    "SelectionNode",
    "TypeNode",
    "Value",
    "WrittenAction",
]  # fmt: skip

NO_SPAN = Span("<none>", 1, 1, 1, 1)
"""The place of a node that was made by a program."""


# ---------------------------------------------------------------- integer arithmetic


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number."""

    value: int
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter, a `let`, or the index of a family."""

    name: str
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Negative:
    """`-operand`."""

    operand: Expression
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """`left operator right`; the operator is one of `+ - * // % **`."""

    operator: str
    left: Expression
    right: Expression
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


Expression: TypeAlias = Number | Name | Negative | Binary


@dataclass(frozen=True, slots=True)
class Range:
    """`start..<stop`, half-open; `start..stop` means the same."""

    start: Expression
    stop: Expression
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


# ---------------------------------------------------------------- selections


class PathPartKind(StrEnum):
    """One piece of a dotted path."""

    NAME = "name"
    INDEX = "index"
    SLICE = "slice"
    ALL = "all"
    STAR = "star"
    DEEP = "deep"


@dataclass(frozen=True, slots=True)
class PathPart:
    """`name`, `[index]`, `[start:stop]`, `[*]`, `*` or `**`."""

    kind: PathPartKind
    name: str = ""
    index: Expression | None = None
    start: Expression | None = None
    stop: Expression | None = None
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PathNode:
    """Modules by their dotted names."""

    parts: tuple[PathPart, ...]
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RegexNode:
    """`/pattern/`; in the pattern a slash is written with a backslash before it."""

    pattern: str
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TypeNode:
    """`type(Name)`."""

    name: str
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RestNode:
    """`rest`."""

    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CallNode:
    """`call(path, number)`."""

    path: PathNode
    number: Expression
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CutpointNode:
    """`cut(name)`."""

    name: str
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DifferenceNode:
    """`first - removed - removed`."""

    first: SelectionNode
    removed: tuple[SelectionNode, ...]
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


SelectionNode: TypeAlias = PathNode | RegexNode | TypeNode | RestNode | CallNode | CutpointNode | DifferenceNode


# ---------------------------------------------------------------- values of settings and options


class LiteralKind(StrEnum):
    """What a literal looks like; what it means depends on where it stands."""

    QUANTITY = "quantity"  # 80GiB, 200M, 1f1b
    DECIMAL = "decimal"  # 1.10
    PERCENT = "percent"  # 12%
    STRING = "string"  # text between quotes, without them


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal as it was written."""

    kind: LiteralKind
    text: str
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Argument:
    """`name = value` or `value` between parentheses."""

    name: str | None
    value: Expression | Literal
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CallValue:
    """`name(arguments)`: a schedule with arguments, or `csv("order.csv")`."""

    name: str
    arguments: tuple[Argument, ...]
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ListValue:
    """`[selection, selection]`."""

    selections: tuple[SelectionNode, ...]
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class WrittenAction:
    """An action in full: `0F3`."""

    text: str
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ActionNode:
    """`0F[m]` or `[s]F[m]`."""

    stage: Expression
    kind: str
    microbatch: Expression
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RepeatNode:
    """`(actions for name in range)`."""

    actions: tuple[OrderAction, ...]
    name: str
    range: Range
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


OrderAction: TypeAlias = WrittenAction | ActionNode | RepeatNode


@dataclass(frozen=True, slots=True)
class RowNode:
    """`rank RANK: actions`, or `rank r in 0..<4: actions` for several ranks."""

    rank: Expression | None
    index: str
    range: Range | None
    actions: tuple[OrderAction, ...]
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class OrderValue:
    """`order { rows }`."""

    rows: tuple[RowNode, ...]
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


Value: TypeAlias = Expression | Literal | CallValue | ListValue | OrderValue


@dataclass(frozen=True, slots=True)
class Pair:
    """`name = value` in a block of options or of a mesh."""

    name: str
    value: Value
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
