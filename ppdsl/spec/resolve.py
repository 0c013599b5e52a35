"""A checked spec held against a model: which stage every module, call and step belongs to.

Selections and claims (`select`, `claims`): a claim covers the module and all in it; the most specific claim wins; two
equally specific claims of different stages are an error. `rest` is what no other claim touches: the outermost such
modules, and the parameters right in modules around claimed ones. Parameters can be selected by name like modules: a
claim on one covers the steps that use it outside of modules that are claimed more closely.

Calls (`owners`): a claimed module runs in its stage each time it is called, which may visit a stage again. A module
that is called from several stages follows its callers unless it is claimed itself (by name, index, slice, glob, regular
expression or class; `rest` is no such claim). `call(block, 1)` claims one call.

Steps: the innermost claimed call around a step decides. A step in no claimed call is left to the data flow, as code
outside every mark is; with cuts it belongs to the stretch it lies in (`cuts`).

Splits (`split`, `elements`, `branches`, `balance`): contiguous parts of the recorded order with the smallest possible
largest part, branches kept apart, memory a hard limit (`fitting`).

Then everything is checked at once (`coverage`, `order`): all findings are raised together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ppdsl.diagnostics import Diagnostic, Label, Severity, SpecError
from ppdsl.graph.outline import Assignment, ModelOutline
from ppdsl.spec.accounting import StageAccount, account
from ppdsl.spec.assigning import Owned, assign
from ppdsl.spec.claims import Claims, SplitOf, collect_claims
from ppdsl.spec.coverage import check_coverage, stage_of_parameters
from ppdsl.spec.cuts import Key, find_borders
from ppdsl.spec.elements import elements_of
from ppdsl.spec.fitting import Limits
from ppdsl.spec.memory import check_memory
from ppdsl.spec.modules import ModuleTree
from ppdsl.spec.order import check_order
from ppdsl.spec.owners import owners_of_calls, owners_of_steps
from ppdsl.spec.partition import Options, Partition, TiePolicy
from ppdsl.spec.placing import check_ranks, known_ranks, stage_options, stage_ranks
from ppdsl.spec.select import Selector, selection_text
from ppdsl.spec.split import Division, PartReason, Pricing, divide_split
from ppdsl.spec.tying import check_expectations, check_ties, colocated, tie_policies
from ppdsl.units import Bytes

__all__ = ["Resolution", "resolve"]


@dataclass(frozen=True)
class Resolution:
    """A spec that fits a model.

    Attributes:
        partition: The spec.
        assignment: The stage of every call and step.
        placement: For each key its rank, of a stage on several ranks the first one; a key that is not in it is placed
            by the schedule's rule.
        stage_ranks: For each key all its ranks; only keys that the spec places, or ties to one that it places.
        ranks: Number of ranks, as the settings say; else one more than the highest that is named; None: not known.
        options: For each key its options.
        memory: For each key its own limit; only keys with one.
        rank_memory: The limit of every rank, or None.
        freeze: Keys whose parameters are not trained.
        ties: For each tied parameter that the spec names, by first name, how it is kept equal.
        accounts: One row for each key, in the spec's order.
        reasons: Why each part of a split is as it is.
        warnings: What is not wrong but should be known.
    """

    partition: Partition
    assignment: Assignment
    placement: Mapping[Key, int]
    stage_ranks: Mapping[Key, tuple[int, ...]]
    ranks: int | None
    options: Mapping[Key, Options]
    memory: Mapping[Key, Bytes]
    rank_memory: Bytes | None
    freeze: frozenset[Key]
    ties: Mapping[str, TiePolicy]
    accounts: tuple[StageAccount, ...]
    reasons: tuple[PartReason, ...] = ()
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False)


def resolve(partition: Partition, outline: ModelOutline, costs: Mapping[str, float] | None = None) -> Resolution:
    """Return what a spec means for a model.

    Args:
        partition: A checked spec.
        outline: The model's recording.
        costs: Seconds by name of module, for `by time` and `by file`.

    Raises:
        SpecError: The spec does not fit the model; with all findings.
    """
    tree = ModuleTree.of(outline)
    selector = Selector(tree)
    claims = collect_claims(partition, selector)
    borders = find_borders(partition, selector, claims)
    calls = owners_of_calls(claims)
    owned = Owned(claims, calls, owners_of_steps(claims, calls))
    divisions = _divide(partition, selector, owned, costs)
    assignment = assign(partition, owned, divisions, borders)
    errors = {finding.code for finding in selector.findings if finding.severity is Severity.ERROR}
    found, sound = not errors - {"claimed-twice"}, not errors
    findings = [*selector.findings]
    findings += check_coverage(partition, owned, assignment, divisions, found=found, sound=sound)
    if sound:
        findings += check_order(assignment, outline)
        findings += check_memory(partition, tree, stage_of_parameters(owned, assignment, divisions))
    findings += check_ranks(partition, assignment.keys)
    findings += check_ties(partition, tree, assignment)
    findings += check_expectations(partition, assignment.keys)
    findings = [*dict.fromkeys(findings)]
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise SpecError(*findings)
    placed = stage_ranks(partition)
    placed |= colocated(partition, tree, assignment, placed)
    options = stage_options(partition)
    return Resolution(
        partition=partition,
        assignment=assignment,
        placement={key: ranks[0] for key, ranks in placed.items()},
        stage_ranks=placed,
        ranks=known_ranks(partition),
        options=options,
        memory={key: some.memory for key, some in options.items() if some.memory is not None},
        rank_memory=partition.settings.memory,
        freeze=frozenset(key for key, some in options.items() if some.freeze),
        ties=tie_policies(partition, tree),
        accounts=account(owned, assignment, divisions, placed),
        reasons=tuple(reason for division in divisions.values() for reason in division.reasons),
        warnings=tuple(findings),
    )


def _divide(
    partition: Partition, selector: Selector, owned: Owned, costs: Mapping[str, float] | None
) -> dict[int, Division]:
    """Return how each split is divided; one whose members are not found is left out."""
    tree = selector.tree
    weights = {name: w.factor for w in partition.weights for name in selector.pick(w.selection).modules}
    closed = frozenset(name for selection in partition.nosplit for name in selector.pick(selection).modules)
    pricing = Pricing(tree, weights, costs)
    held = _pinned(partition, owned)
    found: dict[int, Division] = {}
    for number, split in enumerate(partition.splits):
        picked = owned.claims.picked.get(SplitOf(number), [])
        single = next((p for p in picked if p.calls or p.step is not None), None)
        if single is not None:
            text = f"A split divides modules, and `{selection_text(single.selection)}` is none."
            selector.findings.append(Diagnostic("not-divisible", text, (Label(single.selection.span),)))
            continue
        elements = elements_of(number, owned.claims, closed, owned.calls, owned.steps)
        limits = Limits(tree.parameters, partition.settings.memory, {rank: frozenset(p) for rank, p in held.items()})
        division = divide_split(split, elements, pricing, limits, selector.findings)
        if division is None:
            continue
        found[number] = division
        ranks = dict(zip(split.keys, split.ranks, strict=False))
        for element, key in zip(division.elements, division.keys, strict=True):
            rank = ranks.get(key)
            if rank is not None:
                held.setdefault(rank, set()).update(element.parameters)
    return found


def _pinned(partition: Partition, owned: Owned) -> dict[int, set[str]]:
    """Return for each rank the parameters that stages named one by one hold there."""
    placed = {stage.key: stage.ranks for stage in partition.stages if stage.ranks}
    held: dict[int, set[str]] = {}
    for key, names in _stage_parameters(owned.claims, owned).items():
        for rank in placed.get(key, ()):
            held.setdefault(rank, set()).update(names)
    return held


def _stage_parameters(claims: Claims, owned: Owned) -> dict[Key, set[str]]:
    found: dict[Key, set[str]] = {}
    for step, claim in zip(claims.tree.outline.steps, owned.steps, strict=True):
        if claim is not None and isinstance(claim.owner, int | str):
            found.setdefault(claim.owner, set()).update(step.parameters)
    return found
