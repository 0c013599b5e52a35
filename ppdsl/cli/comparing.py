"""`ppdsl timeline --compare`: several schedules of the same model on the same ranks, a line each."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence

from rich.text import Text

from ppdsl.cli.output import Exit, Output
from ppdsl.cli.schedules import own_order
from ppdsl.cli.study import Result, study_schedule
from ppdsl.diagnostics import Diagnostic, GraphError, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.report.figures import format_time
from ppdsl.report.tables import format_table
from ppdsl.report.traces import to_json
from ppdsl.schedule.registry import families
from ppdsl.units import counted, format_bytes

__all__ = ["compare_schedules", "split_names"]

_HEADER = ("schedule", "stages", "makespan", "bubble", "period", "bubble", "optimal", "held")
_LEGEND = (
    "makespan and its bubble: a step that all ranks start and end together; period and its bubble: each rank goes on "
    "to its next step alone; optimal: the lower bound in per cent of the makespan; held: micro-batches whose "
    "activations a rank holds at most, each through all stages of the rank."
)
_SHARE = " 1 F: one forward through all stages of a rank."


def compare_schedules(options: Namespace, model: StageGraph | None, output: Output) -> tuple[Exit, list[Result]]:
    """Simulate schedules and write a table of them; those that cannot be built are listed with the reason.

    Args:
        options: Of `ppdsl timeline`.
        model: Stages of a model, if there is one.
        output: Where to write.
    """
    results: list[Result] = []
    refused: list[tuple[str, tuple[Diagnostic, ...]]] = []
    for name in split_names(options.compare):
        try:
            found = study_schedule(name, options, model, own_order(name), shared=True)
        except (ScheduleError, GraphError) as error:
            refused.append((name, error.diagnostics))
            if output.json:
                findings = [json.loads(diagnostic.to_json()) for diagnostic in error.diagnostics]
                output.write(json.dumps({"schedule": name, "findings": findings}))
            continue
        results.append(found)
        if output.json:
            output.write(to_json(found.timeline, found.facts()))
    if not output.json:
        _show(results, refused, output)
    return (Exit.FINE if results else Exit.FINDINGS), results


def split_names(text: str) -> list[str]:
    """Return the names in a list with commas; `all`: all families with a backward, in all variants, and `auto`.

    >>> split_names("1f1b, interleaved_1f1b(v=2),zbv")
    ['1f1b', 'interleaved_1f1b(v=2)', 'zbv']
    """
    if text.strip() != "all":
        return [name.strip() for name in re.findall(r"(?:[^,(]|\([^)]*\)?)+", text) if name.strip()]
    names: list[str] = []
    for name, family in families().items():
        variants = next((p.choices for p in family.parameters if p.name == "variant"), ())
        if family.backward:
            names += [f"{name}({variant})" for variant in variants] or [name]
    return [*names, "auto"]


def _show(results: Sequence[Result], refused: Sequence[tuple[str, tuple[Diagnostic, ...]]], output: Output) -> None:
    sized = any(result.study.sized for result in results)
    if results:
        rows = [_row(result, sized=sized) for result in results]
        header = (*_HEADER, *(("in/out",) if sized else ()))
        align = "<" + ">" * (len(header) - 1)
        table = format_table(header, rows, align=align, width=output.width, elastic=0)
        output.show(Text(_title(results[0])), table)
    for name, diagnostics in refused:
        first = diagnostics[0]
        remedy = f" Help: {first.help}" if first.help else ""
        output.note(f"{name} cannot be built: {first.message}{remedy}")
    if results:
        output.note(_LEGEND + (_SHARE if results[0].study.unit == "F" else ""))


def _title(result: Result) -> str:
    schedule, study = result.schedule, result.study
    subject = f"{study.graph.name}, " if study.sized else ""
    sizes = f"{counted(schedule.ranks, 'rank')}, {counted(schedule.microbatches, 'micro-batch')}"
    return f"{subject}{sizes}, {study.basis}"


def _row(result: Result, *, sized: bool) -> tuple[str, ...]:
    unit, timeline = result.study.unit, result.timeline
    held = max((peak.count for peak in result.peaks), default=0) / result.study.stages_a_rank
    cells: Iterable[str] = (
        f"auto: {result.schedule.name}" if result.reasons else result.schedule.name,
        str(len(result.study.graph.stages)),
        format_time(timeline.makespan, unit),
        f"{100 * timeline.bubble:.1f} %",
        format_time(result.period, unit),
        f"{100 * result.period_bubble:.1f} %",
        f"{result.optimal:.3g} %",
        f"{held:.4g}",
    )
    memory = (format_bytes(max((peak.bytes for peak in result.peaks), default=0)),) if sized else ()
    return (*cells, *memory)
