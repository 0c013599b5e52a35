"""Claims of stages on modules, and which of several claims on one module wins.

A claim covers the module and everything in it. The most specific claim wins: on a module deeper in the model before one
around it; on the same module one call before a name, index or slice, these before a pattern, and any of them before
`rest`. Names of one module object are names of one module.

`rest` is what no claim touches: the outermost such modules, and the parameters right in modules around claimed ones. In
a stage it leaves modules without parameters (dropouts, activations, rotary tables) to the data flow, unless there are
only such; in a `split` they are elements like others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.modules import ModuleTree, above, spell
from ppdsl.spec.partition import Difference, Partition, Rest, Selection
from ppdsl.spec.select import Kind, Picked, Selector, selection_text
from ppdsl.units import counted

__all__ = ["REPLICATED", "Claim", "Claims", "Owner", "SplitOf", "collect_claims", "owner_text"]


@dataclass(frozen=True, slots=True)
class SplitOf:
    """Stands for the stages of one `split` until it is divided; its number among the spec's splits."""

    number: int


@dataclass(frozen=True, slots=True)
class _Replicated:
    """Stands for every stage that needs a replicated module."""


REPLICATED = _Replicated()
"""The owner of what `replicate` names."""

Owner = int | str | SplitOf | _Replicated
"""Who claims: a stage by its key, a split as a whole, or every stage that needs it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One selection of one stage on one module, parameter or call.

    Attributes:
        owner: Who claims.
        target: First name of the module (of the parameter, for a claim on a parameter).
        kind: How exactly the selection names it.
        holes: Modules and calls that a difference takes away again.
        selection: Where it says so.
    """

    owner: Owner
    target: str
    kind: Kind
    holes: frozenset[str | tuple[str, int]]
    selection: Selection

    @property
    def span(self) -> Span:
        """The place of the selection."""
        return self.selection.span


@dataclass
class Claims:
    """All claims on a model.

    Attributes:
        tree: The model's modules.
        modules: By first name of the module.
        calls: By module and number of the call.
        parameters: By first name of the parameter.
        picked: For each owner what its selections stand for, in the order written.
    """

    tree: ModuleTree
    modules: dict[str, list[Claim]] = field(default_factory=dict)
    calls: dict[tuple[str, int], list[Claim]] = field(default_factory=dict)
    parameters: dict[str, list[Claim]] = field(default_factory=dict)
    picked: dict[Owner, list[Picked]] = field(default_factory=dict)

    def add(self, owner: Owner, picked: Picked) -> None:
        """Note what a selection of `owner` stands for."""
        self.picked.setdefault(owner, []).append(picked)
        selection, kind, holes = picked.selection, picked.kind, picked.holes
        for name in picked.modules:
            self.modules.setdefault(name, []).append(Claim(owner, name, kind, holes, selection))
        for name in picked.parameters:
            self.parameters.setdefault(name, []).append(Claim(owner, name, kind, holes, selection))
        for call in picked.calls:
            self.calls.setdefault(call, []).append(Claim(owner, call[0], Kind.CALL, holes, selection))

    def own(self, name: str) -> Claim | None:
        """Return the winning claim on exactly this module."""
        return _best(self.modules.get(name, ()))

    def around(self, name: str) -> Claim | None:
        """Return the winning claim on a module around this one.

        None also when the module lies in modules of different owners (under several names) and none is nearer: it
        then follows its caller.
        """
        found: dict[Owner, Claim] = {}
        for own_name in self.tree.names.get(name, (name,)):
            claim = self._up(own_name)
            if claim is not None:
                found.setdefault(claim.owner, claim)
        return next(iter(found.values())) if len(found) == 1 else None

    def reaches(self, claim: Claim, name: str) -> bool:
        """Return whether a claim's target is around a module, or is it, with no hole between."""
        return any(self._reaches_by(claim, own_name) for own_name in self.tree.names.get(name, (name,)))

    def winner(self, name: str) -> Claim | None:
        """Return the claim that decides for a module when nothing is known of its callers."""
        own = self.own(name)
        return own if own is not None else self.around(name)

    def _up(self, name: str) -> Claim | None:
        passed: set[str | tuple[str, int]] = set()
        for up in above(name):
            first = self.tree.first.get(up, up)
            if up != name:
                claim = _best(c for c in self.modules.get(first, ()) if not c.holes & passed)
                if claim is not None:
                    return claim
            passed.add(first)
        return None

    def _reaches_by(self, claim: Claim, name: str) -> bool:
        for up in above(name):
            first = self.tree.first.get(up, up)
            if first in claim.holes:
                return False
            if first == claim.target:
                return True
        return False


def collect_claims(partition: Partition, selector: Selector) -> Claims:
    """Return the claims of all stages, splits and replicas; findings go to the selector."""
    claims = Claims(selector.tree)
    waiting: list[tuple[Owner, Selection]] = []
    for owner, selection in _selections(partition):
        if _has_rest(selection):
            waiting.append((owner, selection))
        else:
            claims.add(owner, selector.pick(selection))
    if waiting:
        modules, parameters = _rest(claims)
        # A dropout or an activation that is left over is no reason to visit a stage again: the data flow places it.
        held = tuple(name for name in modules if selector.tree.parameters_of(name))
        for owner, selection in waiting:
            whole = isinstance(owner, SplitOf) or not (held or parameters)
            left = (modules if whole else held, parameters)
            selector.rest = lambda left=left: left
            claims.add(owner, selector.pick(selection))
    selector.findings += _conflicts(claims)
    return claims


def owner_text(owner: Owner, partition: Partition) -> str:
    """Return an owner in words: `stage `embed``."""
    match owner:
        case SplitOf(number):
            keys = partition.splits[number].keys
            return f"the split into `{keys[0]}` to `{keys[-1]}`" if len(keys) > 1 else f"the split into `{keys[0]}`"
        case _Replicated():
            return "`replicate`"
        case _:
            return f"stage `{owner}`"


def _selections(partition: Partition) -> Iterator[tuple[Owner, Selection]]:
    for stage in partition.stages:
        for member in stage.members:
            yield stage.key, member
    for number, split in enumerate(partition.splits):
        for selection in split.selections:
            yield SplitOf(number), selection
    for replica in partition.replicas:
        yield REPLICATED, replica.selection


def _has_rest(selection: Selection) -> bool:
    if isinstance(selection, Difference):
        return _has_rest(selection.left) or _has_rest(selection.right)
    return isinstance(selection, Rest)


def _rest(claims: Claims) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the outermost modules that no claim touches, and the parameters right in modules around claimed ones."""
    tree = claims.tree
    claimed = set(claims.modules) | {module for module, _ in claims.calls}
    holes = {h for c in _all(claims) for h in c.holes if isinstance(h, str)}
    modules: list[str] = []
    parameters: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        first = tree.first[name]
        if first in seen or first in claimed:
            # What a difference took away from a claimed module is left, too.
            for hole in holes if first in claimed else ():
                if first != hole and any(tree.first.get(up, up) == first for up in above(hole)) and hole not in seen:
                    seen.add(hole)
                    if hole not in claimed and claims.around(hole) is None:
                        modules.append(hole)
            return
        seen.add(first)
        touched = any(inner in claimed for inner in tree.inside(first)) or any(
            up in tree.names[first]
            for p in claims.parameters
            for name_of in tree.parameters[p].names
            for up in above(name_of)
        )
        if name and not touched:
            modules.append(first)
            return
        own = tree.own_parameters.get(first, ())
        parameters.extend(p for p in own if p not in claims.parameters)
        for child in tree.children.get(name, ()):
            visit(child)

    visit("")
    return tuple(modules), tuple(dict.fromkeys(parameters))


def _all(claims: Claims) -> Iterator[Claim]:
    for table in (claims.modules, claims.calls, claims.parameters):
        for group in table.values():
            yield from group


def _best(claims: Iterable[Claim]) -> Claim | None:
    return max(claims, key=lambda claim: claim.kind, default=None)


def _conflicts(claims: Claims) -> Iterator[Diagnostic]:
    """Yield one finding for each pair of selections that claim the same things equally."""
    seen: dict[tuple[Span, Span], tuple[Claim, Claim, list[str]]] = {}
    groups: list[tuple[str, list[Claim]]] = [(spell(name), group) for name, group in claims.modules.items()]
    groups += [(name, group) for name, group in claims.parameters.items()]
    groups += [(f"call({spell(name)}, {n})", group) for (name, n), group in claims.calls.items()]
    for name, group in groups:
        top = max(claim.kind for claim in group)
        best = {claim.owner: claim for claim in reversed(group) if claim.kind is top}
        if len(best) > 1:
            first, second = sorted(best.values(), key=lambda claim: _position(claim.span))[:2]
            seen.setdefault((first.span, second.span), (first, second, []))[2].append(name)
    for first, second, names in seen.values():
        yield _claimed_twice(first, second, names)


def _claimed_twice(first: Claim, second: Claim, names: list[str]) -> Diagnostic:
    listed = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` and {counted(len(names) - 1, 'other module')}"
    verb = "is" if len(names) == 1 else "are"
    one, other = (_short(claim) for claim in (first, second))
    message = f"{listed} {verb} claimed twice: by {one} and by {other}."
    labels = (
        Label(second.span, f"`{selection_text(second.selection)}` claims it again"),
        Label(first.span, f"first claimed here by `{selection_text(first.selection)}`"),
    )
    help_text = "claim it in one stage only"
    if len(names) == 1 and selection_text(second.selection) != names[0] and second.kind is not Kind.CALL:
        help_text += f", or take it away: `{selection_text(second.selection)} - {names[0]}`"
    return Diagnostic("claimed-twice", message, labels, help_text)


def _short(claim: Claim) -> str:
    match claim.owner:
        case SplitOf():
            return "a split"
        case _Replicated():
            return "`replicate`"
        case _:
            return f"stage `{claim.owner}`"


def _position(span: Span) -> tuple[str, int, int]:
    return span.file, span.line, span.column
