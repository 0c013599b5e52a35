"""From what the grammar recognizes to the small parts of the tree: a method for each rule that makes one.

A rule's children are the words and nodes it is made of, in order, all of them; a missing optional part is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec import terms
from ppdsl.spec.terms import Expression, LiteralKind, PathPartKind, SelectionNode

__all__ = ["EXPRESSION", "SELECTION", "Block", "Children", "TermBuilder", "Token", "kept"]

MAX_DEPTH = 60
MAX_DIGITS = 18
MAX_REMOVED = 64


class Token(Protocol):
    """A word as lark gives it."""

    type: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        """Return the text."""
        ...


# What lark hands over has no static type: a token, a node or None.
Children: TypeAlias = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """Pairs between braces, and where they stand."""

    pairs: tuple[terms.Pair, ...]
    span: Span


def kept(children: Children, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Return the children of some types."""
    return tuple(child for child in children if isinstance(child, kind))


EXPRESSION = (terms.Number, terms.Name, terms.Negative, terms.Binary)
SELECTION = (
    terms.PathNode, terms.RegexNode, terms.TypeNode, terms.RestNode, terms.CallNode, terms.CutpointNode,
    terms.DifferenceNode,
)  # fmt: skip


class TermBuilder:
    """Rules of arithmetic, selections and values."""

    def __init__(self) -> None:
        self._file = "<spec>"
        self._line = self._column = 0
        self.findings: list[Diagnostic] = []

    def begin(self, file: str, line: int = 0, column: int = 0) -> None:
        """Begin a text whose first word stands `line` lines down, and `column` to the right in its first line."""
        self._file, self._line, self._column, self.findings = file, line, column, []

    def span(self, children: Children) -> Span:
        """Return where a rule's children stand, from the first to the last."""
        present = [child for child in children if child is not None]
        first, last = self.spot(present[0]), self.spot(present[-1])
        return Span(self._file, first.line, first.column, last.end_line, last.end_column)

    def spot(self, child: Any) -> Span:
        """Return where one child stands."""
        if isinstance(child, tuple):
            return self.span(child)
        if not hasattr(child, "end_line"):
            return cast(Span, child.span)
        right, end_right = (self._column if line == 1 else 0 for line in (child.line, child.end_line))
        return Span(
            self._file,
            child.line + self._line,
            child.column + right,
            child.end_line + self._line,
            child.end_column + end_right,
        )

    def number(self, children: Children) -> terms.Number:
        """INT."""
        return terms.Number(self.integer(children[0]), self.span(children))

    def integer(self, token: Token) -> int:
        """Return the value of digits."""
        digits = str(token).lstrip("0")
        if len(digits) <= MAX_DIGITS:
            return int(digits or "0")
        message = f"The number has {len(digits)} digits, but at most {MAX_DIGITS} are allowed."
        self.findings.append(Diagnostic("number-too-large", message, (Label(self.spot(token)),)))
        return 0

    def name(self, children: Children) -> terms.Name:
        """NAME."""
        return terms.Name(str(children[0]), self.span(children))

    def group(self, children: Children) -> Expression:
        """( expr )."""
        return cast(Expression, children[1])

    def negative(self, children: Children) -> Expression:
        """- factor."""
        depth = self._deeper(children)
        return (
            terms.Negative(children[1], self.span(children), depth) if depth else terms.Number(0, self.span(children))
        )

    def binary(self, children: Children) -> Expression:
        """Left operator right."""
        left, operator, right = children
        depth = self._deeper(children)
        span = self.span(children)
        return terms.Binary(str(operator), left, right, span, depth) if depth else terms.Number(0, span)

    def _deeper(self, children: Children) -> int:
        depth = 1 + max(getattr(child, "depth", 0) for child in children)
        if depth <= MAX_DEPTH:
            return depth
        message = f"The expression has more than {MAX_DEPTH} operators in a row."
        self.findings.append(Diagnostic("nested-too-deep", message, (Label(self.span(children)),), help="use a `let`"))
        return 0

    def range(self, children: Children) -> terms.Range:
        """Expr .. expr."""
        return terms.Range(children[0], children[2], self.span(children))

    def word(self, children: Children) -> terms.PathPart:
        """NAME, INT, * or **."""
        token = children[0]
        kind: str = token.type
        match kind:
            case "STAR":
                return replace(terms.PathPart(PathPartKind.STAR), span=self.span(children))
            case "DOUBLE_STAR":
                return replace(terms.PathPart(PathPartKind.DEEP), span=self.span(children))
            case "INT":
                return replace(
                    terms.PathPart(PathPartKind.INDEX, index=self.number(children)), span=self.span(children)
                )
            case _:
                pass
        return replace(terms.PathPart(PathPartKind.NAME, str(token)), span=self.span(children))

    def index(self, children: Children) -> terms.PathPart:
        """[expr]."""
        return replace(terms.PathPart(PathPartKind.INDEX, index=children[1]), span=self.span(children))

    def all(self, children: Children) -> terms.PathPart:
        """[*]."""
        return replace(terms.PathPart(PathPartKind.ALL), span=self.span(children))

    def slice(self, children: Children) -> terms.PathPart:
        """[expr:expr]."""
        return replace(
            terms.PathPart(PathPartKind.SLICE, start=children[1], stop=children[3]), span=self.span(children)
        )

    def path(self, children: Children) -> terms.PathNode:
        """Names, indices and stars with dots between them."""
        return terms.PathNode(kept(children, terms.PathPart), self.span(children))

    def regex(self, children: Children) -> terms.RegexNode:
        """REGEX."""
        return terms.RegexNode(str(children[0])[1:-1].replace("\\/", "/"), self.span(children))

    def type_of(self, children: Children) -> terms.TypeNode:
        """type(NAME)."""
        return terms.TypeNode(str(children[2]), self.span(children))

    def rest(self, children: Children) -> terms.RestNode:
        """Rest."""
        return terms.RestNode(self.span(children))

    def call_of(self, children: Children) -> terms.CallNode:
        """call(path, expr)."""
        return terms.CallNode(children[2], children[4], self.span(children))

    def cutpoint_name(self, children: Children) -> terms.CutpointNode:
        """NAME or STRING."""
        return terms.CutpointNode(str(children[0]).strip('"'), self.span(children))

    def cut_of(self, children: Children) -> terms.CutpointNode:
        """cut(name)."""
        return terms.CutpointNode(children[2].name, self.span(children))

    def selection(self, children: Children) -> SelectionNode:
        """Primary - primary."""
        first, *removed = kept(children, SELECTION)
        if len(removed) > MAX_REMOVED:
            message = f"A selection takes {len(removed)} others away, but at most {MAX_REMOVED} are allowed."
            self.findings.append(Diagnostic("nested-too-deep", message, (Label(self.span(children)),)))
            removed = []
        if not removed:
            return cast(SelectionNode, first)
        return terms.DifferenceNode(first, tuple(removed), self.span(children))

    def selections(self, children: Children) -> tuple[SelectionNode, ...]:
        """Selections between commas."""
        return kept(children, SELECTION)

    def literal(self, children: Children) -> terms.Literal:
        """QUANTITY, DECIMAL or PERCENT."""
        token = children[0]
        text = str(token).replace(" ", "").replace("\t", "")
        return terms.Literal(LiteralKind(token.type.lower()), text, self.span(children))

    def string(self, children: Children) -> terms.Literal:
        """STRING."""
        return terms.Literal(LiteralKind.STRING, str(children[0])[1:-1], self.span(children))

    def argument(self, children: Children) -> terms.Argument:
        """NAME = value, or value."""
        name, _, value = children
        if not isinstance(value, EXPRESSION):
            value = self.string([value])
        return terms.Argument(None if name is None else str(name), value, self.span(children))

    def arguments(self, children: Children) -> tuple[terms.Argument, ...]:
        """Arguments between commas."""
        return kept(children, terms.Argument)

    def call(self, children: Children) -> terms.CallValue:
        """Name(arguments)."""
        return terms.CallValue(str(children[0]), children[2] or (), self.span(children))

    def list(self, children: Children) -> terms.ListValue:
        """[selections]."""
        return terms.ListValue(children[1], self.span(children))

    def pair(self, children: Children) -> terms.Pair:
        """NAME = value."""
        return terms.Pair(str(children[0]), children[2], self.span(children))

    def pairs(self, children: Children) -> tuple[terms.Pair, ...]:
        """Pairs between commas."""
        return kept(children, terms.Pair)

    def written_action(self, children: Children) -> terms.WrittenAction:
        """0F3."""
        return terms.WrittenAction(str(children[0]), self.span(children))

    def action(self, children: Children) -> terms.ActionNode:
        """0F[m], or [s]F[m]."""
        if len(children) == 4:
            digits = str(children[0])[:-1]
            stage: Expression = terms.Number(int(digits[:MAX_DIGITS]), self.span(children[:1]))
            return terms.ActionNode(stage, str(children[0])[-1], children[2], self.span(children))
        return terms.ActionNode(children[1], str(children[3]), children[5], self.span(children))

    def repeat(self, children: Children) -> terms.RepeatNode:
        """(actions for NAME in range)."""
        actions = kept(children, (terms.WrittenAction, terms.ActionNode, terms.RepeatNode))
        return terms.RepeatNode(actions, str(children[-4]), children[-2], self.span(children))

    def row(self, children: Children) -> terms.RowNode:
        """Rank expr: actions."""
        actions = kept(children, (terms.WrittenAction, terms.ActionNode, terms.RepeatNode))
        span = self.span(children)
        if isinstance(children[1], EXPRESSION):
            return terms.RowNode(children[1], "", None, actions, span)
        return terms.RowNode(None, str(children[1]), children[3], actions, span)

    def order(self, children: Children) -> terms.OrderValue:
        """Order { rows }."""
        return terms.OrderValue(kept(children, terms.RowNode), self.span(children))
