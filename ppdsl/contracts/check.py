"""Contracts (`expect`) of a spec, held against a plan: each with its measured figure, the broken ones as findings."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from ppdsl.contracts.measuring import Subject, edges_between, measure
from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.outline import ModelOutline
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs
from ppdsl.spec.partition import Expectation, Measure, Partition
from ppdsl.units import format_bytes, format_count, format_flops

__all__ = ["ContractReport", "Measured", "check_contracts", "parameter_counts"]

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPPOSITES = {
    "<=": "more than",
    "<": "not less than",
    ">=": "less than",
    ">": "not more than",
    "==": "not",
    "!=": "just",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One contract and what was found.

    Attributes:
        expectation: The contract.
        value: The measured figure; None for edges, and when it cannot be measured.
        text: The figure as people read it.
        ok: Whether the contract holds.
    """

    expectation: Expectation
    value: float | None
    text: str
    ok: bool


@dataclass(frozen=True, slots=True)
class ContractReport:
    """All contracts of a spec, in the order written.

    Attributes:
        measured: Each contract with its figure.
        findings: One for each that does not hold.
    """

    measured: tuple[Measured, ...]
    findings: tuple[Diagnostic, ...]


def check_contracts(
    partition: Partition,
    graph: StageGraph,
    placement: Sequence[int],
    schedule: Schedule | None = None,
    *,
    counts: Mapping[str, int] | None = None,
    costs: Costs | None = None,
) -> ContractReport:
    """Return what each contract of a spec comes to.

    Args:
        partition: The spec.
        graph: Its stages and edges.
        placement: For each stage its rank.
        schedule: Computations for each rank; without one there is no `bubble` and there are no `messages`.
        counts: Numbers in each parameter by name, for `params`; see `parameter_counts`.
        costs: Seconds to simulate with; None: from the operations.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.source import Span
    >>> here = Span("net.ppspec", 9, 5, 9, 24)
    >>> four = Expectation(Measure.STAGES, None, "==", 4, (), "expect stages == 4", here)
    >>> spec = Partition("net", "net.ppspec", expectations=(four,))
    >>> report = check_contracts(spec, chain_graph(3), (0, 1, 2))
    >>> print(report.findings[0].message)
    `expect stages == 4` is broken: stages is 3, not 4.
    """
    subject = Subject(graph, tuple(placement), schedule, counts, costs)
    measured, findings = [], []
    for expectation in partition.expectations:
        result, finding = _check(expectation, subject)
        measured.append(result)
        if finding is not None:
            findings.append(finding)
    return ContractReport(tuple(measured), tuple(findings))


def parameter_counts(outline: ModelOutline) -> dict[str, int]:
    """Return the number of numbers in each parameter, by every name it has."""
    return {name: parameter.count for parameter in outline.parameters for name in parameter.names}


def _check(expectation: Expectation, subject: Subject) -> tuple[Measured, Diagnostic | None]:
    if expectation.measure is Measure.EDGES:
        return _check_edges(expectation, subject)
    if expectation.stage is not None and not subject.visits(expectation.stage):
        text = f"`{expectation.text}` speaks of stage `{expectation.stage}`, which there is not."
        known = ", ".join(dict.fromkeys(str(stage.key) for stage in subject.graph.stages))
        return _unknown(expectation, Diagnostic("unknown-stage", text, (Label(expectation.span),), f"one of: {known}"))
    value = measure(expectation.measure, expectation.stage, subject)
    if value is None:
        what = "the model" if expectation.measure is Measure.PARAMS else "a schedule"
        text = f"`{expectation.text}` cannot be measured without {what}."
        return _unknown(expectation, Diagnostic("not-measurable", text, (Label(expectation.span),)))
    figure = _figure(value, expectation.measure)
    ok = _COMPARISONS[expectation.comparison](value, expectation.bound)
    result = Measured(expectation, value, figure, ok)
    if ok:
        return result, None
    bound = _figure(expectation.bound, expectation.measure)
    if bound == figure and value != expectation.bound:
        # Rounding must not hide what is wrong.
        figure, bound = f"{figure} ({value:.15g})", f"{bound} ({expectation.bound:.15g})"
    subject_text = str(expectation.measure) + (
        f" of stage `{expectation.stage}`" if expectation.stage is not None else ""
    )
    message = (
        f"`{expectation.text}` is broken: {subject_text} is {figure}, {_OPPOSITES[expectation.comparison]} {bound}."
    )
    label = Label(expectation.span, f"measured: {figure}")
    return result, Diagnostic("broken-contract", message, (label,))


def _check_edges(expectation: Expectation, subject: Subject) -> tuple[Measured, Diagnostic | None]:
    keys = tuple(dict.fromkeys(key for pair in expectation.edges for key in pair))
    found = edges_between(keys, subject.graph)
    missing = [pair for pair in expectation.edges if pair not in found]
    extra = [pair for pair in found if pair not in expectation.edges]
    text = _arrows(found) or "no edges"
    result = Measured(expectation, None, text, not missing and not extra)
    if result.ok:
        return result, None
    parts = [f"there is no edge {_arrows(missing)}"] if missing else []
    parts += [f"there is also {_arrows(extra)}"] if extra else []
    message = f"`{expectation.text}` is broken: {', and '.join(parts)}."
    return result, Diagnostic("broken-contract", message, (Label(expectation.span, f"measured: {text}"),))


def _unknown(expectation: Expectation, finding: Diagnostic) -> tuple[Measured, Diagnostic]:
    return Measured(expectation, None, "not known", ok=False), finding


def _arrows(pairs: Sequence[tuple[int | str, int | str]]) -> str:
    return ", ".join(f"{source} -> {target}" for source, target in pairs)


def _figure(value: float, what: Measure) -> str:
    match what:
        case Measure.BUBBLE:
            return f"{value:.1%}"
        case Measure.IMBALANCE:
            return f"{value:.4g}"
        case Measure.MEMORY:
            return format_bytes(value)
        case Measure.PARAMS:
            return format_count(value)
        case Measure.FLOPS:
            return format_flops(value)
        case Measure.STAGES | Measure.RANKS | Measure.MESSAGES | Measure.EDGES:
            return f"{value:g}"
        case _:
            assert_never(what)
