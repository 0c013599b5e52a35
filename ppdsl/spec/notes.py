"""Gives each comment of a text to the item or member it belongs to.

A comment on an item's last line is trailing; one behind the brace that opens a block belongs to the brace; all others
lead what follows them, and those that nothing follows close the block. A comment in the middle of an item leads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ppdsl.source import Span
from ppdsl.spec.nodes import Item, Member, Notes, PipelineNode, SpecFile, StageNode
from ppdsl.spec.scan import Comment, Scan

__all__ = ["attach"]

_Noted = TypeVar("_Noted", bound="Item | Member")


def attach(tree: SpecFile, looked: Scan, version: Span | None) -> SpecFile:
    """Return the tree with the comments and blank lines of its text."""
    reader = _Reader(looked)
    top = Notes()
    if version is not None:
        leading = reader.before(version.line, version.column)
        top = replace(top, leading=_texts(leading), trailing=reader.behind(version))
    items, closing = reader.items(tree.items, None, version.end_line if version else 0)
    return replace(tree, items=items, notes=replace(top, closing=closing))


class _Reader:
    def __init__(self, looked: Scan) -> None:
        self.comments = looked.comments
        self.next = 0
        self.busy = _used_lines(looked)

    def before(self, line: int, column: int) -> tuple[Comment, ...]:
        """Take the comments that stand before a place."""
        first = self.next
        while self.next < len(self.comments):
            comment = self.comments[self.next]
            if (comment.line, comment.column) >= (line, column):
                break
            self.next += 1
        return self.comments[first : self.next]

    def behind(self, span: Span) -> str:
        """Take the comment behind a place, on its last line."""
        if self.next < len(self.comments):
            comment = self.comments[self.next]
            if comment.line == span.end_line and not comment.alone:
                self.next += 1
                return comment.text
        return ""

    def items(self, items: Sequence[Item], end: Span | None, line: int) -> tuple[tuple[Item, ...], tuple[str, ...]]:
        """Return items with their comments, and the comments behind the last; `line` is where what is before ends."""
        noted: list[Item] = []
        for position, item in enumerate(items):
            following = items[position + 1].span if position + 1 < len(items) else end
            noted.append(self.item(item, line, following))
            line = item.span.end_line
        rest = self.before(end.line, end.column) if end else self.before(1 << 60, 0)
        return tuple(noted), _texts(rest)

    def item(self, item: Item, line: int, following: Span | None) -> Item:
        leading = self.before(item.span.line, item.span.column)
        begins = leading[0].line if leading else item.span.line
        notes = Notes(leading=_texts(leading), blank=line > 0 and begins > line + 1 and self.blank(begins))
        match item:
            case PipelineNode():
                opening = self.behind(item.head)
                end = Span(item.span.file, item.span.end_line, item.span.end_column - 1, 0, 0)
                inner, closing = self.items(item.items, end, 0)
                item = replace(item, items=inner)
                notes = replace(notes, opening=opening, closing=closing)
            case StageNode() if item.members and self._inside(item):
                item, notes = self.stage(item, notes)
        within = self.before(item.span.end_line, item.span.end_column)
        notes = replace(notes, leading=notes.leading + _texts(within))
        if following is None or following.line > item.span.end_line:
            notes = replace(notes, trailing=self.behind(item.span))
        return replace(item, notes=notes)

    def stage(self, item: StageNode, notes: Notes) -> tuple[StageNode, Notes]:
        first, last = item.members[0], item.members[-1]
        if first.span.line > item.head.end_line:
            notes = replace(notes, opening=self.behind(item.head))
        members = []
        for position, member in enumerate(item.members):
            leading = _texts(self.before(member.span.line, member.span.column))
            within = _texts(self.before(member.span.end_line, member.span.end_column))
            alone = position + 1 == len(item.members) or item.members[position + 1].span.line > member.span.end_line
            alone = alone and (member is not last or item.span.end_line > member.span.end_line)
            trailing = self.behind(member.span) if alone else ""
            members.append(replace(member, notes=Notes(leading + within, trailing)))
        closing = _texts(self.before(item.span.end_line, item.span.end_column))
        return replace(item, members=tuple(members)), replace(notes, closing=closing)

    def _inside(self, item: StageNode) -> bool:
        if self.next >= len(self.comments):
            return False
        comment = self.comments[self.next]
        return (comment.line, comment.column) < (item.span.end_line, item.span.end_column)

    def blank(self, line: int) -> bool:
        """Return whether the line before is empty."""
        return line - 1 not in self.busy


def _texts(comments: Sequence[Comment]) -> tuple[str, ...]:
    return tuple(comment.text for comment in comments)


def _used_lines(looked: Scan) -> frozenset[int]:
    lines = looked.text.split("\n")
    return frozenset(number for number, line in enumerate(lines, 1) if line.strip())
