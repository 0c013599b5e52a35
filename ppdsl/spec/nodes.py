"""The syntax tree of a `.ppspec` file: what was written, nothing evaluated yet.

Two trees are equal when they say the same in the same order, wherever it stands: spans are not compared, comments are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ppdsl.source import Span
from ppdsl.spec.terms import NO_SPAN, Expression, Literal, Pair, PathNode, Range, SelectionNode, Value

__all__ = [
    "NO_NOTES",
    "CutNode",
    "EdgesNode",
    "ExpectNode",
    "Family",
    "IncludeNode",
    "Item",
    "LetNode",
    "Member",
    "NosplitNode",
    "Notes",
    "ParamNode",
    "PipelineNode",
    "Placement",
    "ReplicateNode",
    "SettingNode",
    "SpecFile",
    "SplitNode",
    "StageNode",
    "StageReference",
    "TieNode",
    "WeightNode",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Notes:
    """Comments around an item, each with its `#`, and whether a blank line stands before it.

    Attributes:
        leading: Lines of their own before the item.
        trailing: On the item's last line.
        opening: Behind the `{` of a block.
        closing: Lines of their own before the `}` of a block, or before the end of the file.
        blank: Whether a blank line sets the item apart from the one before.
    """

    leading: tuple[str, ...] = ()
    trailing: str = ""
    opening: str = ""
    closing: tuple[str, ...] = ()
    blank: bool = False


NO_NOTES = Notes()


@dataclass(frozen=True, slots=True)
class Member:
    """A selection between the braces of a stage, with its comments."""

    selection: SelectionNode
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Family:
    """`[name in range]` behind a stage's name."""

    name: str
    range: Range
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """`@ rank` or `@ [rank, rank]`."""

    ranks: tuple[Expression, ...]
    several: bool = False
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class StageReference:
    """A stage by name: `head`, `3`, `block[2]`."""

    name: str | int
    index: Expression | None = None
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ParamNode:
    """`param name = default`."""

    name: str
    default: Expression
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LetNode:
    """`let name = value`."""

    name: str
    value: Expression
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class IncludeNode:
    """`include "path"`."""

    path: str
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SettingNode:
    """`name = value`, or `name { pairs }` with the pairs as value."""

    name: str
    value: Value | tuple[Pair, ...]
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class StageNode:
    """`stage NAME[FAMILY] @ PLACEMENT { MEMBERS } with { OPTIONS }`; `head` is the part before the brace."""

    name: str | int
    family: Family | None
    placement: Placement | None
    members: tuple[Member, ...]
    options: tuple[Pair, ...] = ()
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
    head: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SplitNode:
    """`split SELECTIONS into PARTS by BALANCE as NAME[INDEX] @ PLACEMENT with { OPTIONS }`."""

    selections: tuple[SelectionNode, ...]
    parts: Expression
    balance: str
    file: str | None
    name: str | int
    index: str
    placement: Placement | None = None
    options: tuple[Pair, ...] = ()
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
    balance_span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CutNode:
    """`cut before|after SELECTION as NAME @ RANK`, or `cut at NAME as NAME @ RANK`."""

    where: str
    selection: SelectionNode
    name: str | int | None = None
    placement: Placement | None = None
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class WeightNode:
    """`weight SELECTION = FACTOR`."""

    selection: SelectionNode
    factor: Expression | Literal
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class NosplitNode:
    """`nosplit SELECTION`."""

    selection: SelectionNode
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ReplicateNode:
    """`replicate SELECTION`."""

    selection: SelectionNode
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TieNode:
    """`tie PATH = PATH [sync|colocate]`."""

    paths: tuple[PathNode, ...]
    policy: str | None = None
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ExpectNode:
    """`expect MEASURE(STAGE) COMPARISON BOUND`."""

    measure: str
    stage: StageReference | None
    comparison: str
    bound: Expression | Literal
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
    measure_span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class EdgesNode:
    """`expect edges a -> {b, c} -> d`: chains of links, each link one stage or several."""

    chains: tuple[tuple[tuple[StageReference, ...], ...], ...]
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PipelineNode:
    """`pipeline NAME { ITEMS }`."""

    name: str
    items: tuple[Item, ...]
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
    head: Span = field(default=NO_SPAN, compare=False, repr=False)


Item: TypeAlias = (
    ParamNode | LetNode | IncludeNode | SettingNode | StageNode | SplitNode | CutNode | WeightNode | NosplitNode
    | ReplicateNode | TieNode | ExpectNode | EdgesNode | PipelineNode
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpecFile:
    """One file.

    Attributes:
        version: Of the language, if the file says it.
        items: In the order written.
        notes: Comments at the file's end (`closing`), and behind the version line (`trailing`, `leading`).
        span: The whole file.
    """

    version: int | None
    items: tuple[Item, ...]
    notes: Notes = NO_NOTES
    span: Span = field(default=NO_SPAN, compare=False, repr=False)
