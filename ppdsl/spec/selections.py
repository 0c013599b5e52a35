"""Selections with their numbers worked out."""

from __future__ import annotations

from collections.abc import Mapping

from ppdsl.diagnostics import Label
from ppdsl.source import Span
from ppdsl.spec.context import Context
from ppdsl.spec.partition import AtCutpoint, CallOf, Difference, OfType, Part, PartKind, Path, Regex, Rest, Selection
from ppdsl.spec.regex import RegexError, compile_regex
from ppdsl.spec.terms import (
    CallNode,
    CutpointNode,
    DifferenceNode,
    PathNode,
    PathPart,
    PathPartKind,
    RegexNode,
    RestNode,
    SelectionNode,
    TypeNode,
)

__all__ = ["selection_of"]

_MAX_REGEXES = 1000


def selection_of(node: SelectionNode, context: Context, local: Mapping[str, int]) -> Selection | None:
    """Return a selection with all of its numbers, or None after a finding."""
    match node:
        case PathNode():
            return _path(node, context, local)
        case RegexNode(pattern, span):
            return _regex(pattern, span, context)
        case TypeNode(name, span):
            return OfType(name, span)
        case RestNode(span):
            return Rest(span)
        case CutpointNode(name, span):
            return AtCutpoint(name, span)
        case CallNode(path, number, span):
            inner, count = _path(path, context, local), context.value(number, local)
            if inner is None or count is None:
                return None
            if count < 0:
                context.report("negative-call", f"Calls are counted from 0, so there is no call {count}.", span)
                return None
            return CallOf(inner, count, span)
        case DifferenceNode(first, removed, span):
            left = selection_of(first, context, local)
            for one in removed:
                right = selection_of(one, context, local)
                left = None if left is None or right is None else Difference(left, right, span)
            return left


def _path(node: PathNode, context: Context, local: Mapping[str, int]) -> Path | None:
    parts = [_part(part, context, local) for part in node.parts]
    return None if None in parts else Path(tuple(part for part in parts if part is not None), node.span)


def _part(part: PathPart, context: Context, local: Mapping[str, int]) -> Part | None:
    kind = PartKind(part.kind.value)
    if part.kind is PathPartKind.INDEX and part.index is not None:
        index = context.value(part.index, local)
        return None if index is None else Part(kind, index=index)
    if part.kind is not PathPartKind.SLICE:
        return Part(kind, name=part.name)
    start = None if part.start is None else context.value(part.start, local)
    stop = None if part.stop is None else context.value(part.stop, local)
    if (part.start is not None and start is None) or (part.stop is not None and stop is None):
        return None
    if start is not None and stop is not None and start >= stop and (start < 0) == (stop < 0):
        message = f"The slice [{start}:{stop}] holds nothing: it ends before {stop}."
        context.report("empty-slice", message, part.span, help="slices are half-open: [0:6] is 0 to 5")
        return None
    return Part(kind, start=start, stop=stop)


def _regex(pattern: str, span: Span, context: Context) -> Regex | None:
    context.regexes += 1
    if context.regexes > _MAX_REGEXES:
        if context.regexes == _MAX_REGEXES + 1:
            context.report("bad-regex", f"The spec has more than {_MAX_REGEXES} regular expressions.", span)
        return None
    try:
        compile_regex(pattern)
    except RegexError as error:
        context.report("bad-regex", str(error), Label(span, f"at letter {error.offset + 1} of the pattern"))
        return None
    return Regex(pattern, span)
