"""A spec held against a model: `ppdsl check FILE --model`, and what `graph` and `timeline` take from a spec."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from ppdsl.cli.models import ModelCall, load_model
from ppdsl.cli.output import Exit, Output
from ppdsl.contracts.check import ContractReport, check_contracts, parameter_counts
from ppdsl.diagnostics import Diagnostic, Severity
from ppdsl.graph.ir import StageGraph
from ppdsl.report.tables import format_table
from ppdsl.schedule.table import Schedule
from ppdsl.spec.accounting import StageAccount
from ppdsl.spec.load import load_spec
from ppdsl.spec.partition import Partition
from ppdsl.units import format_bytes, format_count, format_flops

if TYPE_CHECKING:
    from ppdsl.recording.record import Recording

__all__ = ["SpecStudy", "check_with_model", "record_with_spec", "study_from_spec", "study_partition"]


@dataclass(frozen=True)
class SpecStudy:
    """A spec on a model, planned.

    Attributes:
        partition: The spec.
        graph: The stages it divides the model into.
        accounts: What each stage has, in the spec's order.
        placement: For each stage of the graph its rank.
        schedule: Computations for each rank.
        contracts: Each contract with its figure, and the broken ones.
        warnings: What was noticed when the spec was resolved and the model recorded.
    """

    partition: Partition
    graph: StageGraph
    accounts: tuple[StageAccount, ...]
    placement: tuple[int, ...]
    schedule: Schedule
    contracts: ContractReport
    warnings: tuple[Diagnostic, ...]

    @property
    def ranks(self) -> dict[int | str, tuple[int, ...]]:
        """For each stage key its ranks."""
        found: dict[int | str, tuple[int, ...]] = {account.key: account.ranks for account in self.accounts}
        for stage, rank in zip(self.graph.stages, self.placement, strict=True):
            found[stage.key] = found.get(stage.key) or (rank,)
        return found


def record_with_spec(partition: Partition, call: ModelCall) -> Recording:
    """Record a model's call, divided by a spec.

    Raises:
        RecordingError: The model cannot be recorded.
        SpecError: The spec does not fit the model.
    """
    from ppdsl.recording.profile import measured_costs  # loads torch
    from ppdsl.recording.record import record_call

    kwargs = dict(call.kwargs)
    costs = measured_costs(partition, call.model, call.args, kwargs)
    return record_call(
        call.model, call.args, kwargs, loss=call.loss, targets=call.targets, spec=partition, costs=costs
    )  # fmt: skip


def study_from_spec(file: str, model: str, overrides: Mapping[str, int]) -> SpecStudy:
    """Read a spec, divide a model by it, and plan a step as it says.

    Args:
        file: Path of the spec.
        model: As `--model` takes it.
        overrides: Values of the spec's parameters.

    Raises:
        SpecError: The spec is wrong, or does not fit the model.
        WrongUseError: `model` names no model.
    """
    partition = load_spec(file, overrides)
    return study_partition(partition, load_model(model))


def study_partition(partition: Partition, call: ModelCall) -> SpecStudy:
    """Divide a model by a spec, and plan a step as it says.

    Raises:
        GraphError: The stages cannot be placed.
        RecordingError: The model cannot be recorded.
        ScheduleError: The schedule does not fit the stages.
        SpecError: The spec does not fit the model.
    """
    from ppdsl.runtime.spec_plan import plan_spec

    recording = record_with_spec(partition, call)
    resolution, outline, graph = recording.resolution, recording.outline, recording.graph
    given = {} if resolution is None else resolution.placement
    placement, schedule = plan_spec(partition, graph, given)
    counts = None if outline is None else parameter_counts(outline)
    report = check_contracts(partition, graph, placement, schedule, counts=counts)
    accounts = () if resolution is None else resolution.accounts
    return SpecStudy(partition, graph, accounts, placement, schedule, report, graph.warnings)


def check_with_model(partition: Partition, options: Namespace, output: Output) -> Exit:
    """Check a spec against a model: the table of its stages, then each contract with its figure.

    Args:
        partition: The spec, checked by itself.
        options: Of `ppdsl check`: `model`, as `--model` takes it.
        output: Where results and findings go.

    Raises:
        SpecError: The spec does not fit the model.
        WrongUseError: `model` names no model.
    """
    with output.busy("recording the model"):
        study = study_partition(partition, load_model(options.model))
    output.report(study.warnings)
    if output.json:
        output.write(json.dumps(_as_json(study), indent=2))
    else:
        tables = [_stage_accounts(study, output.width)]
        if study.contracts.measured:
            tables.append(_contract_table(study.contracts, output.width))
        output.show(*tables)
    output.report(study.contracts.findings)
    broken = any(finding.severity is Severity.ERROR for finding in study.contracts.findings)
    return Exit.FINDINGS if broken else Exit.FINE


def _stage_accounts(study: SpecStudy, width: int) -> Text:
    """Return the table of stages; neighbours that differ in nothing but their number are one row."""
    ranks = study.ranks
    rows = [
        (
            str(account.key),
            account.modules or "-",
            format_count(account.parameters),
            format_bytes(account.bytes),
            format_flops(account.flops),
            f"{100 * account.share:.1f} %",
            ", ".join(map(str, ranks.get(account.key, ()))) or "-",
        )
        for account in study.accounts
    ]
    header = ("stage", "modules", "parameters", "bytes", "forward", "share", "rank")
    return format_table(header, _folded(rows), align="<<>>>>>", width=width, elastic=1)


def _contract_table(contracts: ContractReport, width: int) -> Text:
    """Return the contracts, each with its figure and whether it holds."""
    rows = [(found.expectation.text, found.text, "holds" if found.ok else "broken") for found in contracts.measured]
    return format_table(("contract", "measured", ""), rows, align="<<<", width=width, elastic=0)


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Fold runs of stages of one family that are alike; modules and ranks of first and last are shown."""
    folded: list[list[tuple[str, ...]]] = []
    for row in rows:
        before = folded[-1][-1] if folded else None
        if before is not None and _family(before[0]) == _family(row[0]) != "" and before[2:6] == row[2:6]:
            folded[-1].append(row)
        else:
            folded.append([row])
    return [_fold(run) for run in folded]


def _family(key: str) -> str:
    return key.partition("[")[0] if key.endswith("]") else ""


def _fold(run: list[tuple[str, ...]]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    family = _family(first[0])
    numbers = [row[0].partition("[")[2].rstrip("]") for row in (first, last)]
    name = f"{family}[{numbers[0]}..{numbers[1]}]"
    ranks = list(dict.fromkeys(row[6] for row in run))
    shown = ", ".join(ranks) if len(ranks) <= 4 else f"{ranks[0]} to {ranks[-1]}"
    return (name, f"{first[1]} ... {last[1]}", *first[2:6], shown)


def _as_json(study: SpecStudy) -> dict[str, object]:
    ranks = study.ranks
    return {
        "name": study.partition.name,
        "model": study.graph.name,
        "schedule": study.schedule.name,
        "microbatches": study.schedule.microbatches,
        "stages": [
            {
                "stage": account.key,
                "modules": account.modules,
                "parameters": account.parameters,
                "bytes": account.bytes,
                "flops": account.flops,
                "share": account.share,
                "ranks": list(ranks.get(account.key, ())),
            }
            for account in study.accounts
        ],
        "contracts": [
            {"contract": m.expectation.text, "value": m.value, "measured": m.text, "holds": m.ok}
            for m in study.contracts.measured
        ],
    }
