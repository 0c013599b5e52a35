"""Canonical text of a spec: comments kept, `parse(format(tree)) == tree`, and formatting twice changes nothing.

Items are indented by four spaces and fit on one line where that is at most 100 columns; a stage whose members carry
comments, or that is longer, has one member on each line. Settings in a row are aligned at their `=`, expectations at
their comparison. One blank line between items is kept, more become one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.diagnostics import SpecError
from ppdsl.spec.nodes import ExpectNode, Item, Member, Notes, PipelineNode, SettingNode, SpecFile, StageNode
from ppdsl.spec.parse import limited, parse
from ppdsl.spec.terms import OrderValue
from ppdsl.spec.writing import action_text, item_text, row_head, selection_text, stage_head, with_text

__all__ = ["WIDTH", "format_spec"]

WIDTH = 100
_STEP = "    "


def format_spec(spec: str | bytes | SpecFile, file: str = "<spec>") -> str:
    """Return the canonical text of a spec.

    Args:
        spec: Its text, or its tree.
        file: Name of the text, for findings.

    Raises:
        SpecError: The text cannot be parsed.

    >>> print(format_spec("pipeline net { ranks=2 memory=1GiB stage a@0 {x,y,} }"), end="")
    pipeline net {
        ranks  = 2
        memory = 1GiB
        stage a @ 0 { x, y }
    }
    """
    if isinstance(spec, SpecFile):
        return _file(spec)
    parsed = parse(spec, file)
    if parsed.diagnostics:
        raise SpecError(*limited(parsed.diagnostics))
    return _file(parsed.tree)


def _file(tree: SpecFile) -> str:
    lines: list[str] = []
    if tree.version is not None:
        lines += tree.notes.leading
        lines.append(_commented(f"ppspec {tree.version}", tree.notes.trailing))
    lines += _items(tree.items, "", first=not lines)
    lines += tree.notes.closing
    return "".join(f"{line}\n" for line in lines)


def _items(items: Sequence[Item], indent: str, *, first: bool) -> list[str]:
    lines: list[str] = []
    widths = _aligned(items)
    for position, item in enumerate(items):
        if item.notes.blank and not (first and position == 0):
            lines.append("")
        lines += [f"{indent}{comment}" for comment in item.notes.leading]
        lines += _item(item, indent, widths[position])
    return lines


def _aligned(items: Sequence[Item]) -> list[int]:
    """Return for each item the width of what stands before its sign: that of the widest in its row of items alike."""
    widths = [0] * len(items)
    start = 0
    while start < len(items):
        end = start + 1
        kind = _kind(items[start])
        while kind and end < len(items) and _kind(items[end]) == kind and not items[end].notes.blank:
            if items[end].notes.leading:
                break
            end += 1
        widest = max(len(_left(item)) for item in items[start:end]) if kind else 0
        widths[start:end] = [widest] * (end - start)
        start = end
    return widths


def _kind(item: Item) -> str:
    if isinstance(item, SettingNode) and not isinstance(item.value, tuple | OrderValue):
        return "setting"
    return "expect" if isinstance(item, ExpectNode) else ""


def _left(item: Item) -> str:
    text = item_text(item)
    if isinstance(item, ExpectNode):
        return text[: text.index(f" {item.comparison} ")]
    return text[: text.index(" = ")] if _kind(item) else ""


def _item(item: Item, indent: str, width: int) -> list[str]:
    match item:
        case PipelineNode(notes=notes):
            inner = _items(item.items, indent + _STEP, first=True)
            inner += [f"{indent}{_STEP}{comment}" for comment in notes.closing]
            head = _commented(f"{indent}{item_text(item)}", notes.opening)
            return [head, *inner, _commented(f"{indent}}}", notes.trailing)]
        case StageNode() if _long(item, indent):
            return _stage(item, indent)
        case SettingNode(value=OrderValue() as order):
            rows = [" ".join([row_head(row), *map(action_text, row.actions)]) for row in order.rows]
            lines = [f"{indent}{item.name} = order {{", *(f"{indent}{_STEP}{row}" for row in rows)]
            return [*lines, _commented(f"{indent}}}", item.notes.trailing)]
        case _:
            pass
    text = item_text(item)
    left = _left(item)
    text = left.ljust(width) + text[len(left) :] if width else text
    return [_commented(f"{indent}{text}", item.notes.trailing)]


def _long(item: StageNode, indent: str) -> bool:
    noted = any(member.notes != Notes() for member in item.members) or item.notes.opening or item.notes.closing
    return bool(item.members) and (bool(noted) or len(indent) + len(item_text(item)) > WIDTH)


def _stage(item: StageNode, indent: str) -> list[str]:
    lines = [_commented(f"{indent}{stage_head(item)} {{", item.notes.opening)]
    for member in item.members:
        lines += _member(member, indent + _STEP)
    lines += [f"{indent}{_STEP}{comment}" for comment in item.notes.closing]
    return [*lines, _commented(f"{indent}}}{with_text(item.options)}", item.notes.trailing)]


def _member(member: Member, indent: str) -> list[str]:
    lines = [f"{indent}{comment}" for comment in member.notes.leading]
    return [*lines, _commented(f"{indent}{selection_text(member.selection)},", member.notes.trailing)]


def _commented(text: str, comment: str) -> str:
    return f"{text}  {comment}" if comment else text
