"""`ppdsl verify`: prove a schedule from a CSV file, or show what is wrong with it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from rich.text import Text

from ppdsl.cli.arguments import add_model, add_width
from ppdsl.cli.graphs import record_graph
from ppdsl.cli.models import load_model
from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.diagnostics import Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lowering import lower
from ppdsl.plan.messages import MessagePlan
from ppdsl.plan.verify import verify_plan
from ppdsl.report.palette import LABEL
from ppdsl.report.tables import format_table
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.csv_text import parse_csv
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.measures import Metrics, metrics
from ppdsl.units import Rank, counted, format_bytes

__all__ = ["add_arguments", "own_order", "read_schedule", "run_verify"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `ppdsl verify`."""
    parser.add_argument("file", metavar="FILE.csv", help="a line for each rank, an action such as 2F0 in each cell")
    add_model(parser, required=False)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    add_width(parser)


def run_verify(options: Namespace, output: Output) -> Exit:
    """Prove a schedule's laws, its messages and that it cannot deadlock."""
    schedule = read_schedule(options.file)
    graph = record_graph(load_model(options.model)) if options.model else chain_graph(len(schedule.placement))
    findings = _wrong_graph(schedule, graph) or verify_schedule(schedule, graph)
    if findings:
        output.report(findings)
        return Exit.FINDINGS
    plan = lower(schedule, graph)
    findings = verify_plan(plan)
    if findings:
        output.report(findings)
        return Exit.FINDINGS
    numbers = metrics(plan)
    if output.json:
        output.write(json.dumps(_facts(schedule, graph, numbers)))
    else:
        subject = graph.name if options.model else f"a chain of {len(graph.stages)} stages"
        output.show(
            _summary(schedule, subject, numbers), _ranks(plan, numbers, output.width, sized=bool(options.model))
        )
    return Exit.FINE


def read_schedule(file: str) -> Schedule:
    """Return the schedule in a CSV file.

    Raises:
        WrongUseError: The file cannot be read.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        message = f"{file} cannot be read: {reason}."
        help_text = "give a CSV file with a line for each rank and an action such as 2F0 in each cell"
        raise WrongUseError(Diagnostic("unreadable-file", message, help=help_text)) from None
    return parse_csv(text, name=file)


def own_order(name: str) -> Schedule | None:
    """Return the schedule in a CSV file, or None when `name` is the name of a family."""
    return read_schedule(name) if name.endswith(".csv") else None


def _wrong_graph(schedule: Schedule, graph: StageGraph) -> tuple[Diagnostic, ...]:
    if len(schedule.placement) == len(graph.stages):
        return ()
    message = f"{schedule.name} has {len(schedule.placement)} stages, but the model {graph.name} {len(graph.stages)}."
    return (Diagnostic("wrong-stage-count", message, help="write an action for each stage of `ppdsl graph`"),)


def _summary(schedule: Schedule, subject: str, numbers: Metrics) -> Text:
    actions = sum(map(len, schedule.rows))
    peak = max((p.count for p in numbers.peaks), default=0)
    lines = [
        Text.assemble((f"{schedule.name} is proved", LABEL), f" for {subject}"),
        Text(
            f"  {counted(schedule.ranks, 'rank')}, {counted(len(schedule.placement), 'stage')}, "
            f"{counted(schedule.microbatches, 'micro-batch')}, {counted(actions, 'action')}, "
            f"{counted(numbers.messages, 'message')}"
        ),
        Text("  every micro-batch passes every stage once, in order; every message sent is received"),
        Text("  no deadlock, even when no message is buffered"),
        Text(f"  at most {peak} activations on a rank"),
        Text(
            f"  bubble {100 * numbers.bubble:.1f} %, {numbers.percent_of_optimal:.3g} % of the lower bound "
            "(forward 1, backward 2, messages free)"
        ),
    ]
    return Text("\n").join(lines)


def _ranks(plan: MessagePlan, numbers: Metrics, width: int, *, sized: bool) -> Text:
    """Return a table of what each rank does, and when it holds most."""
    schedule = plan.schedule
    sent = Counter(message.source for message in plan.messages)
    got = Counter(message.target for message in plan.messages)
    rows = []
    for peak in numbers.peaks:
        kinds = Counter(action.kind for action in schedule.rows[peak.rank])
        stages = [stage for stage, rank in enumerate(schedule.placement) if rank == peak.rank]
        memory = (format_bytes(peak.bytes),) if sized else ()
        rows.append(
            (
                str(peak.rank),
                " ".join(map(str, stages)),
                *(str(kinds[kind]) for kind in ActionKind),
                str(sent[Rank(peak.rank)]),
                str(got[Rank(peak.rank)]),
                str(peak.count),
                *memory,
                "-" if peak.action is None else str(peak.action),
            )
        )
    header = ("rank", "stages", *(kind.value for kind in ActionKind), "sends", "receives", "holds", "first at")
    align = "><>>>>>>><"
    if sized:
        header, align = (*header[:-1], "in/out", header[-1]), "><>>>>>>>><"
    return format_table(header, rows, align=align, width=width, elastic=1)


def _facts(schedule: Schedule, graph: StageGraph, numbers: Metrics) -> dict[str, object]:
    return {
        "file": schedule.name,
        "model": graph.name,
        "proved": True,
        "ranks": schedule.ranks,
        "stages": len(graph.stages),
        "microbatches": schedule.microbatches,
        "actions": sum(map(len, schedule.rows)),
        "messages": numbers.messages,
        "makespan": numbers.makespan,
        "bubble": numbers.bubble,
        "lower_bound": numbers.bounds.best,
        "placement": schedule.placement,
        "peak_activations": [p.count for p in numbers.peaks],
        "peak_actions": [None if p.action is None else str(p.action) for p in numbers.peaks],
        "peak_bytes": [p.bytes for p in numbers.peaks],
    }
