"""Ties that a spec asserts, and stages that its contracts speak of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.graph.outline import Assignment
from ppdsl.spec.cuts import Key
from ppdsl.spec.modules import ModuleTree
from ppdsl.spec.partition import Partition, TieDecl, TiePolicy
from ppdsl.spec.placing import stage_ranks
from ppdsl.spec.suggest import did_you_mean

__all__ = ["check_expectations", "check_ties", "colocated", "tie_policies", "users_of"]


def check_ties(partition: Partition, tree: ModuleTree, assignment: Assignment) -> Iterator[Diagnostic]:
    """Yield ties of names that are no parameters, of different parameters, and of stages that cannot be together."""
    users = users_of(tree, assignment)
    ranks = stage_ranks(partition)
    for tie in partition.ties:
        unknown = [name for name in tie.names if name not in tree.parameters]
        for name in unknown:
            text = f"No parameter is named `{name}`."
            yield Diagnostic("no-match", text, (Label(tie.span),), did_you_mean(name, tree.parameters))
        if unknown:
            continue
        first = tree.parameters[tie.names[0]]
        others = [name for name in tie.names if tree.parameters[name] is not first]
        if others:
            text = f"`{tie.names[0]}` and `{others[0]}` are two parameters, not one."
            help_text = "tie them in the model, or drop this line"
            yield Diagnostic("not-tied", text, (Label(tie.span, "the model does not tie them"),), help_text)
            continue
        if tie.policy is TiePolicy.COLOCATE:
            yield from _apart(tie, users.get(first.names[0], ()), ranks)


def check_expectations(partition: Partition, keys: Sequence[Key]) -> Iterator[Diagnostic]:
    """Yield contracts on stages that there are not."""
    for expectation in partition.expectations:
        named = [] if expectation.stage is None else [expectation.stage]
        named += [key for edge in expectation.edges for key in edge]
        for key in dict.fromkeys(named):
            if key not in keys:
                text = f"`{expectation.text}` speaks of stage `{key}`, which there is not."
                help_text = did_you_mean(str(key), map(str, keys)) or f"one of: {', '.join(map(str, keys))}"
                yield Diagnostic("unknown-stage", text, (Label(expectation.span),), help_text)


def colocated(
    partition: Partition, tree: ModuleTree, assignment: Assignment, ranks: Mapping[Key, tuple[int, ...]]
) -> dict[Key, tuple[int, ...]]:
    """Return ranks for the stages that `colocate` ties to a stage with a rank and that have none themselves."""
    users = users_of(tree, assignment)
    found: dict[Key, tuple[int, ...]] = {}
    for tie in partition.ties:
        if tie.policy is TiePolicy.COLOCATE:
            keys = users.get(tree.parameters[tie.names[0]].names[0], ())
            home = next((ranks[key] for key in keys if key in ranks), None)
            found |= {key: home for key in keys if key not in ranks and home is not None}
    return found


def tie_policies(partition: Partition, tree: ModuleTree) -> dict[str, TiePolicy]:
    """Return for each tied parameter with a policy, by first name, that policy."""
    return {tree.parameters[tie.names[0]].names[0]: tie.policy for tie in partition.ties if tie.policy is not None}


def users_of(tree: ModuleTree, assignment: Assignment) -> dict[str, tuple[Key, ...]]:
    """Return for each parameter, by first name, the stages that use it, in recorded order."""
    found: dict[str, dict[Key, None]] = {}
    for step, key in zip(tree.outline.steps, assignment.steps, strict=True):
        if key is not None:
            for name in step.parameters:
                found.setdefault(name, {}).setdefault(key)
    return {name: tuple(keys) for name, keys in found.items()}


def _apart(tie: TieDecl, keys: Sequence[Key], ranks: dict[Key, tuple[int, ...]]) -> Iterator[Diagnostic]:
    placed = [(key, ranks[key]) for key in keys if key in ranks]
    if len({own for _, own in placed}) < 2:
        return
    first, second = placed[0], next(other for other in placed if other[1] != placed[0][1])
    text = (
        f"`{tie.names[0]}` is to stay on one rank, but its stages `{first[0]}` and `{second[0]}` "
        f"are on ranks {_listed(first[1])} and {_listed(second[1])}."
    )
    help_text = "place them on one rank, or use `sync`"
    yield Diagnostic("tie-apart", text, (Label(tie.span),), help_text)


def _listed(ranks: Sequence[int]) -> str:
    return "/".join(map(str, ranks))
