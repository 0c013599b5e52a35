"""Whether a resolved spec covers the model: parameters without a stage, stages without work, replicas with state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ppdsl.diagnostics import Diagnostic, Label, Severity
from ppdsl.graph.outline import Assignment
from ppdsl.spec.assigning import Owned, key_spans
from ppdsl.spec.claims import REPLICATED, Claims, SplitOf
from ppdsl.spec.cuts import Key
from ppdsl.spec.modules import ModuleTree, spell
from ppdsl.spec.partition import Partition, Selection
from ppdsl.spec.select import Kind, Picked, selection_text
from ppdsl.spec.split import Division
from ppdsl.units import counted, format_count

__all__ = ["check_coverage", "stage_of_parameters"]

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_", "shuffle")
"""Beginnings, after an optional `_`, of the names of torch calls that draw random numbers."""


def check_coverage(
    partition: Partition,
    owned: Owned,
    assignment: Assignment,
    divisions: Mapping[int, Division],
    *,
    found: bool = True,
    sound: bool = True,
) -> Iterator[Diagnostic]:
    """Yield what the spec leaves out, claims in vain, or cannot repeat.

    Args:
        partition: The spec.
        owned: Claims of calls and steps.
        assignment: What came of them.
        divisions: Of the splits.
        found: Whether all selections stand for something; else what is left over says nothing.
        sound: Whether they contradict each other nowhere; else what is empty says nothing.
    """
    tree = owned.claims.tree
    failed = {key for number, split in enumerate(partition.splits) if number not in divisions for key in split.keys}
    homes = stage_of_parameters(owned, assignment, divisions)
    yield from _never_called(owned.claims)
    if sound:
        yield from _empty_stages(partition, owned.claims, assignment, failed)
    if not failed and found:
        repeated = {name for step in assignment.repeated for name in tree.outline.steps[step].parameters}
        yield from _unclaimed(partition, tree, {name: keys for name, keys in homes.items() if name not in repeated})
    yield from _replicas(owned, tree)


def stage_of_parameters(
    owned: Owned, assignment: Assignment, divisions: Mapping[int, Division]
) -> dict[str, tuple[Key, ...]]:
    """Return for each parameter, by first name, its stages: those that use it, else the one that claims its module.

    A parameter that only repeated steps use, or that no stage has, is in none of them.
    """
    tree = owned.claims.tree
    found: dict[str, dict[Key, None]] = {p.names[0]: {} for p in tree.outline.parameters}
    for step, key in zip(tree.outline.steps, assignment.steps, strict=True):
        if key is not None:
            for name in step.parameters:
                found.setdefault(tree.parameters[name].names[0], {}).setdefault(key)
    parts = {
        name: key
        for division in divisions.values()
        for element, key in zip(division.elements, division.keys, strict=True)
        for name in element.parameters
    }
    used = {name for step in tree.outline.steps for name in step.parameters}
    for name, homes in found.items():
        if homes or name in used:
            continue
        own = owned.claims.parameters.get(name)
        claim = own[0] if own else owned.claims.winner(tree.first.get(name.rpartition(".")[0], ""))
        if claim is None:
            continue
        home = parts.get(name) if isinstance(claim.owner, SplitOf) else claim.owner
        if isinstance(home, int | str):
            homes.setdefault(home)
    return {name: tuple(homes) for name, homes in found.items()}


def _never_called(claims: Claims) -> Iterator[Diagnostic]:
    for picked in _all_picked(claims):
        if picked.kind is not Kind.EXPLICIT:
            continue
        for name in picked.modules:
            if not claims.tree.is_called(name):
                text = f"`{spell(name)}` is claimed, but the model never calls it."
                label = Label(picked.selection.span, "never called")
                yield Diagnostic("never-called", text, (label,), severity=Severity.WARNING)


def _all_picked(claims: Claims) -> Iterable[Picked]:
    return (picked for some in claims.picked.values() for picked in some)


def _empty_stages(
    partition: Partition, claims: Claims, assignment: Assignment, failed: set[Key]
) -> Iterator[Diagnostic]:
    busy = {key for key in (*assignment.steps, *assignment.calls) if key is not None}
    spans = key_spans(partition)
    members = {stage.key: stage.members for stage in partition.stages}
    for key in assignment.keys:
        if key in busy or key in failed or (key in members and not members[key]):
            continue
        picked = claims.picked.get(key, [])
        if any(some.empty and some.kind is not Kind.REST for some in picked):
            continue  # reported where the selection found nothing
        text, label = _why_empty(key, picked, members.get(key, ()), claims)
        yield Diagnostic("empty-stage", text, (Label(spans[key], label),) if key in spans else ())


def _why_empty(key: Key, picked: list[Picked], members: tuple[Selection, ...], claims: Claims) -> tuple[str, str]:
    written = ", ".join(selection_text(member) for member in members)
    modules = [name for some in picked for name in some.modules]
    if not written:
        return f"Stage `{key}` has nothing to run.", "nothing lies between its borders, or other stages claim it"
    if modules and not any(claims.tree.is_called(name) for name in modules):
        return f"Stage `{key}` has nothing to run: the model never calls `{written}`.", "never called"
    if all(some.empty for some in picked):
        return f"Stage `{key}` has nothing to run: nothing is left for `{written}`.", "all is claimed by other stages"
    return f"Stage `{key}` has nothing to run: other stages claim all of `{written}`.", "claimed more closely elsewhere"


def _unclaimed(partition: Partition, tree: ModuleTree, homes: Mapping[str, tuple[Key, ...]]) -> Iterator[Diagnostic]:
    left = [name for name, keys in homes.items() if not keys]
    if not left:
        return
    modules = dict.fromkeys(_outermost(name, set(left), tree) for name in left)
    listed = ", ".join(f"`{spell(name)}`" for name in list(modules)[:8])
    more = f" and {len(modules) - 8} more" if len(modules) > 8 else ""
    size = sum(tree.parameters[name].count for name in left)
    text = f"{counted(len(left), 'parameter')} ({format_count(size)} elements) belong to no stage: {listed}{more}."
    if len(left) == 1:
        text = f"1 parameter ({format_count(size)} elements) belongs to no stage: {listed}."
    spans = list(key_spans(partition).values())
    labels = (Label(spans[-1], "no stage claims the rest"),) if spans else ()
    yield Diagnostic("unclaimed-parameter", text, labels, "add them to a stage, or write `rest` in one")


def _outermost(parameter: str, left: set[str], tree: ModuleTree) -> str:
    """Return the outermost module around a parameter of which no parameter has a stage; else the parameter."""
    best = parameter
    name = parameter
    while name := name.rpartition(".")[0]:
        if name in tree and all(inner in left for inner in tree.parameters_of(name)):
            best = name
    return best


def _replicas(owned: Owned, tree: ModuleTree) -> Iterator[Diagnostic]:
    seen: set[str] = set()
    for step, claim in zip(tree.outline.steps, owned.steps, strict=True):
        if claim is None or claim.owner != REPLICATED or claim.target in seen:
            continue
        why = None
        if step.parameters:
            why = f"it uses the parameter `{step.parameters[0]}`"
        elif step.name.lstrip("_").startswith(_RANDOM):
            why = f"it draws random numbers (`{step.name}`)"
        if why is not None:
            seen.add(claim.target)
            text = f"`{spell(claim.target)}` cannot run once in every stage that needs it: {why}."
            yield Diagnostic("cannot-replicate", text, (Label(claim.span),), "claim it in one stage")
