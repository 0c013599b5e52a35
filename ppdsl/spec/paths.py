"""Dotted paths of a spec, walked down a model's modules: names, indices, slices, globs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.modules import ModuleTree, spell
from ppdsl.spec.partition import Part, PartKind
from ppdsl.spec.suggest import did_you_mean
from ppdsl.units import counted

__all__ = ["path_text", "walk"]


def path_text(parts: Iterable[Part]) -> str:
    """Return a path as a spec writes it.

    >>> path_text([Part(PartKind.NAME, "model"), Part(PartKind.NAME, "h"), Part(PartKind.INDEX, index=-1)])
    'model.h[-1]'
    """
    text = ""
    for part in parts:
        match part.kind:
            case PartKind.INDEX:
                text += f"[{part.index}]"
            case PartKind.SLICE:
                text += f"[{'' if part.start is None else part.start}:{'' if part.stop is None else part.stop}]"
            case PartKind.ALL:
                text += "[*]"
            case PartKind.NAME | PartKind.STAR | PartKind.DEEP:
                word = {PartKind.STAR: "*", PartKind.DEEP: "**"}.get(part.kind, part.name)
                text += f".{word}" if text else word
            case _:
                assert_never(part.kind)
    return text


def walk(parts: tuple[Part, ...], tree: ModuleTree, span: Span) -> tuple[list[str], Diagnostic | None]:
    """Return the names a path stands for, in the model's order, or the finding why there are none.

    A path may end in the name of a parameter. After a glob, modules that lack the next piece are passed over; when all
    lack it, that is a finding.
    """
    at, several = [""], False
    for position, part in enumerate(parts):
        found: list[str] = []
        failures: list[_Failure] = []
        for name in at:
            result = _down(name, part, tree, last=position == len(parts) - 1)
            if isinstance(result, _Failure):
                failures.append(result)
            else:
                found += result
        if failures and not (several and found):
            if several:
                return [], _nowhere(at, parts, position, tree, span)
            return [], _finding(failures[0], parts, position, tree, span)
        at = list(dict.fromkeys(found))
        if not at:
            text = path_text(parts[: position + 1])
            message = f"No module is named `{path_text(parts)}`."
            return [], Diagnostic("no-match", message, (Label(span, f"`{text}` matches nothing"),))
        several = several or part.kind in {PartKind.STAR, PartKind.DEEP}
    return at, None


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a piece is not there under one module."""

    parent: str
    label: str
    nearest: str | None = None


def _down(name: str, part: Part, tree: ModuleTree, *, last: bool) -> list[str] | _Failure:
    match part.kind:
        case PartKind.NAME:
            return _named(name, part.name, tree, last=last)
        case PartKind.STAR:
            return list(tree.children.get(name, ()))
        case PartKind.DEEP:
            # The model itself is no match: `**` alone is all that is in it, parameters right in it among them.
            below = list(_all_below(name, tree))
            return [*below, *tree.own_parameters.get("", ())] if not name and last else [name, *below]
        case PartKind.INDEX | PartKind.SLICE | PartKind.ALL:
            return _numbered(name, part, tree)
        case _:
            assert_never(part.kind)


def _all_below(name: str, tree: ModuleTree) -> Iterable[str]:
    for child in tree.children.get(name, ()):
        yield child
        yield from _all_below(child, tree)


def _named(parent: str, wanted: str, tree: ModuleTree, *, last: bool) -> list[str] | _Failure:
    name = f"{parent}.{wanted}" if parent else wanted
    if name in tree or (last and name in tree.parameters):
        return [name]
    if not parent:
        return _Failure(parent, "no module at the top of the model has this name")
    return _Failure(parent, f"`{spell(parent)}` has no module of this name")


def _numbered(name: str, part: Part, tree: ModuleTree) -> list[str] | _Failure:
    elements = tree.elements.get(name, {})
    if not elements:
        return _Failure(name, f"`{spell(name)}` has no numbered elements" if name else "the model has none itself")
    size = max(elements) + 1
    full = len(elements) == size
    what = f"`{spell(name)}` has {counted(len(elements), 'element')}"
    known = f"{what}, 0 to {size - 1}" if full else f"{what}: {', '.join(map(str, elements))}"
    if part.kind is PartKind.ALL:
        return list(elements.values())
    if part.kind is PartKind.INDEX:
        index = part.index + size if part.index < 0 else part.index
        if index in elements:
            return [elements[index]]
        near = min(elements, key=lambda number: abs(number - index))
        return _Failure(name, known, elements[near])
    start, stop = (_bound(part.start, size, 0), _bound(part.stop, size, size))
    if not 0 <= start <= size or not 0 <= stop <= size:
        return _Failure(name, known, f"{name}.{max(0, min(start, size - 1))}:{max(0, min(stop, size))}")
    if start >= stop:
        return _Failure(name, f"from {start} up to {stop} there is nothing")
    inside = [child for number, child in elements.items() if start <= number < stop]
    return inside or _Failure(name, known)


def _bound(bound: int | None, size: int, default: int) -> int:
    if bound is None:
        return default
    return bound + size if bound < 0 else bound


def _finding(failure: _Failure, parts: tuple[Part, ...], position: int, tree: ModuleTree, span: Span) -> Diagnostic:
    """Return the finding for a piece that is nowhere."""
    part = parts[position]
    label = Label(span, failure.label)
    if part.kind is PartKind.SLICE and failure.nearest is None:
        return Diagnostic("empty-slice", f"`{path_text(parts)}` selects nothing.", (label,))
    message = f"No module is named `{path_text(parts)}`."
    if part.kind is PartKind.SLICE:
        message = f"`{path_text(parts[: position + 1])}` goes beyond the elements there are."
        container, _, bounds = str(failure.nearest).rpartition(".")
        return Diagnostic("no-match", message, (label,), f"did you mean `{spell(container)}[{bounds}]`?")
    if part.kind is PartKind.NAME:
        # The longest part of what was written that a module could be named.
        written = ".".join(_plain(parts[: position + 1]))
        whole = ".".join(_plain(parts))
        known = [name for name in tree.first if name]
        help_text = did_you_mean(whole, [*known, *tree.parameters]) or did_you_mean(written, known)
        return Diagnostic("no-match", message, (label,), _spelled(help_text))
    help_text = None if failure.nearest is None else f"did you mean `{spell(failure.nearest)}`?"
    return Diagnostic("no-match", message, (label,), help_text)


def _nowhere(at: list[str], parts: tuple[Part, ...], position: int, tree: ModuleTree, span: Span) -> Diagnostic:
    """Return the finding for a piece that none of the modules matched so far has."""
    before = path_text(parts[:position])
    label = Label(span, f"nothing that `{before}` matches has it")
    known = [child.rpartition(".")[2] for name in at for child in tree.children.get(name, ())]
    help_text = did_you_mean(parts[position].name, known) if parts[position].kind is PartKind.NAME else None
    return Diagnostic("no-match", f"No module is named `{path_text(parts)}`.", (label,), help_text)


def _plain(parts: Iterable[Part]) -> Iterable[str]:
    for part in parts:
        if part.kind is PartKind.NAME:
            yield part.name
        elif part.kind is PartKind.INDEX:
            yield str(part.index)
        else:
            return


def _spelled(help_text: str | None) -> str | None:
    if help_text is None:
        return None
    before, name, after = help_text.split("`")
    return f"{before}`{spell(name)}`{after}"
