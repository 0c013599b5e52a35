"""Selections held against a model: which modules, parameters or calls a selection names.

A pattern (a slice of all, a glob, a regular expression, a class) that matches a module and modules in it stands for the
outer one: a claim on it covers the others anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.modules import ModuleTree, above
from ppdsl.spec.partition import (
    AtCutpoint,
    CallOf,
    Difference,
    OfType,
    Part,
    PartKind,
    Path,
    Regex,
    Rest,
    Selection,
)
from ppdsl.spec.paths import path_text, walk
from ppdsl.spec.regex import compile_regex
from ppdsl.spec.suggest import did_you_mean
from ppdsl.units import counted

__all__ = ["Kind", "Picked", "Selector", "selection_text"]


class Kind(IntEnum):
    """How exactly a selection names what it selects; the higher wins on one module."""

    REST = 0  # all that is left
    PATTERN = 1  # [*], *, **, a regular expression, a class
    EXPLICIT = 2  # a name, an index, a slice with bounds
    CALL = 3  # one call of a module


@dataclass(frozen=True, slots=True)
class Picked:
    """What a selection stands for in one model.

    Attributes:
        selection: The selection.
        kind: How exactly it names them.
        modules: First names of modules, in the model's order; none of them inside another, but for named ones.
        parameters: First names of parameters that are named themselves.
        calls: Single calls, as (module, number).
        holes: Modules and calls (as (module, number)) taken away again by a difference.
        step: First step of what runs from a named cutpoint on; None for all else.
    """

    selection: Selection
    kind: Kind
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    calls: tuple[tuple[str, int], ...] = ()
    holes: frozenset[str | tuple[str, int]] = frozenset()
    step: int | None = None

    @property
    def empty(self) -> bool:
        """Whether it stands for nothing."""
        return not (self.modules or self.parameters or self.calls) and self.step is None


def selection_text(selection: Selection) -> str:
    """Return a selection as a spec writes it.

    >>> from ppdsl.source import Span
    >>> here = Span("net.ppspec", 1, 1, 1, 2)
    >>> path = Path((Part(PartKind.NAME, "h"), Part(PartKind.SLICE, start=0, stop=6)), here)
    >>> selection_text(Difference(path, OfType("Norm", here), here))
    'h[0:6] - type(Norm)'
    """
    match selection:
        case Path(parts):
            return path_text(parts)
        case Regex(pattern):
            return f"/{pattern}/"
        case OfType(name):
            return f"type({name})"
        case Rest():
            return "rest"
        case CallOf(path, number):
            return f"call({path_text(path.parts)}, {number})"
        case AtCutpoint(name):
            return f"cut({name})"
        case Difference(left, right):
            after = selection_text(right)
            return f"{selection_text(left)} - {f'({after})' if isinstance(right, Difference) else after}"


@dataclass
class Selector:
    """Looks selections up in one model and collects what it cannot find.

    Attributes:
        tree: The model's modules.
        rest: What `rest` stands for, as modules and parameters, worked out when everything else is known.
        findings: What was not found, warnings among them.
    """

    tree: ModuleTree
    rest: Callable[[], tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    findings: list[Diagnostic] = field(default_factory=list)

    def pick(self, selection: Selection) -> Picked:
        """Return what `selection` stands for; empty, with a finding noted, when that is nothing."""
        match selection:
            case Path(parts):
                return self._path(selection, parts)
            case Regex(pattern):
                wanted = compile_regex(pattern)  # matches in linear time
                found = (name for name in self.tree.first if name and wanted.fullmatch(name))
                inside = any(wanted.search(name) for name in self.tree.first)
                help_text = f"the whole name has to match: `/.*{pattern}.*/`" if inside else None
                return self._pattern(selection, found, help_text)
            case OfType(wanted_type):
                found = (module.name for module in self.tree.outline.modules if wanted_type in module.types)
                known = (name for module in self.tree.outline.modules for name in module.types)
                return self._pattern(selection, found, did_you_mean(wanted_type, known))
            case Rest():
                modules, parameters = self.rest() if self.rest else ((), ())
                return Picked(selection, Kind.REST, modules, parameters)
            case CallOf(path, number):
                return self._call(selection, path, number)
            case AtCutpoint(name):
                return self._cutpoint(selection, name)
            case Difference(left, right):
                return self._difference(selection, left, right)

    def _path(self, selection: Path, parts: tuple[Part, ...]) -> Picked:
        found, finding = walk(parts, self.tree, selection.span)
        if finding is not None:
            self.findings.append(finding)
        explicit = all(part.kind in {PartKind.NAME, PartKind.INDEX, PartKind.SLICE} for part in parts)
        modules = [name for name in found if name in self.tree]
        parameters = [self.tree.parameters[name].names[0] for name in found if name not in self.tree]
        firsts = self._outermost(modules)
        return Picked(selection, Kind.EXPLICIT if explicit else Kind.PATTERN, firsts, tuple(parameters))

    def _pattern(self, selection: Regex | OfType, found: Iterable[str], help_text: str | None) -> Picked:
        modules = self._outermost(list(found))
        if not modules:
            what = "has the class" if isinstance(selection, OfType) else "has a name like"
            text = selection.name if isinstance(selection, OfType) else f"/{selection.pattern}/"
            self._missing(selection.span, f"No module {what} `{text}`.", "matches nothing", help_text)
        return Picked(selection, Kind.PATTERN, modules)

    def _call(self, selection: CallOf, path: Path, number: int) -> Picked:
        modules = self._path(path, path.parts).modules
        calls = []
        for module in modules:
            count = len(self.tree.calls.get(module, ()))
            if 0 <= number < count:
                calls.append((module, number))
                continue
            message = f"`{path_text(path.parts)}` is called {counted(count, 'time')}, so it has no call {number}."
            if count == 0:
                message = f"`{path_text(path.parts)}` is never called, so it has no call {number}."
            last = f"calls count from 0: the last one is call {count - 1}" if count else None
            self.findings.append(Diagnostic("no-such-call", message, (Label(selection.span),), last))
        return Picked(selection, Kind.CALL, calls=tuple(calls))

    def _cutpoint(self, selection: AtCutpoint, name: str) -> Picked:
        passed = self.tree.outline.cutpoints
        step = next((cutpoint.step for cutpoint in passed if cutpoint.name == name), None)
        if step is None:
            known = [cutpoint.name for cutpoint in passed if cutpoint.name is not None]
            label = "the model passes no cutpoint with a name" if not known else f"one of: {', '.join(known)}"
            self._missing(selection.span, f"No cutpoint is named `{name}`.", label, did_you_mean(name, known))
        return Picked(selection, Kind.EXPLICIT, step=step)

    def _difference(self, selection: Difference, left: Selection, right: Selection) -> Picked:
        whole, away = self.pick(left), self.pick(right)
        if whole.empty or away.empty:
            return whole
        removed = set(self._solid(away.modules, {hole for hole in away.holes if isinstance(hole, str)}))
        modules = tuple(name for name in whole.modules if not self._is_inside(name, removed))
        parameters = tuple(name for name in whole.parameters if name not in away.parameters)
        calls = tuple(call for call in whole.calls if call not in away.calls and call[0] not in removed)
        below = {name for name in removed if self._is_inside(name, set(modules))}
        single = {call for call in away.calls if self._is_inside(call[0], set(modules))}
        gone = len(whole.modules) + len(whole.parameters) + len(whole.calls)
        if gone == len(modules) + len(parameters) + len(calls) and not (below or single):
            text = f"`{selection_text(right)}` takes nothing away from `{selection_text(left)}`."
            self.findings.append(Diagnostic("removes-nothing", text, (Label(selection.span),)))
        picked = Picked(
            selection, whole.kind, modules, parameters, calls, whole.holes | below | single, step=whole.step
        )
        if picked.empty:
            text = f"`{selection_text(selection)}` selects nothing: all that it names is taken away again."
            self.findings.append(Diagnostic("empty-selection", text, (Label(selection.span),)))
        return picked

    def _outermost(self, names: list[str]) -> tuple[str, ...]:
        """Return the first names of the modules that lie in no other of them, in the model's order."""
        wanted = set(names)
        outer = (name for name in names if not any(up in wanted for up in list(above(name))[1:]))
        return tuple(dict.fromkeys(self.tree.first[name] for name in outer))

    def _is_inside(self, name: str, modules: set[str]) -> bool:
        """Return whether a module is one of `modules` or lies in one, under any of its names."""
        return any(self.tree.first.get(up, up) in modules for own in self.tree.names[name] for up in above(own))

    def _solid(self, modules: Iterable[str], holes: set[str]) -> Iterable[str]:
        """Yield the outermost modules without a hole in them: `a - (b - c)` keeps `c`."""
        for name in modules:
            if name in holes:
                continue
            if any(inner in holes for inner in self.tree.inside(name)):
                yield from self._solid((self.tree.first[child] for child in self.tree.children.get(name, ())), holes)
            else:
                yield name

    def _missing(self, span: Span, message: str, label: str, help_text: str | None) -> None:
        self.findings.append(Diagnostic("no-match", message, (Label(span, label),), help_text))
