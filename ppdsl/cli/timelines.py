"""`ppdsl timeline`: when each rank runs what, predicted, and measured beside it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from ppdsl.cli.arguments import add_model, add_spec, add_width, number_from_one, parameters_of, ranks, room, time
from ppdsl.cli.comparing import compare_schedules
from ppdsl.cli.graphs import record_graph
from ppdsl.cli.measuring import TURNS, Measured, measure
from ppdsl.cli.models import load_model
from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.cli.schedules import own_order
from ppdsl.cli.study import Result, parse_costs, place_stages, study_schedule
from ppdsl.diagnostics import Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.report.timeline import render_comparison, render_timeline
from ppdsl.report.timeline_svg import to_svg
from ppdsl.report.traces import to_chrome_trace, to_csv, to_json
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.transfers import Transfer, transfers
from ppdsl.timeline import Timeline

__all__ = ["add_arguments", "parse_costs", "run_timeline"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `ppdsl timeline`."""
    what = parser.add_argument_group("what is simulated")
    what.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="family, with arguments as in 'interleaved_1f1b(v=2)', auto, or a CSV file (default: 1f1b)",
    )
    what.add_argument("--ranks", type=number_from_one, help="default: as many as the stages need, or 4")
    what.add_argument("--stages", type=number_from_one, help="of a chain without a model (default: by the schedule)")
    what.add_argument("--chunks", type=number_from_one, help="stages on each rank (default: by the schedule)")
    what.add_argument("--microbatches", type=number_from_one, default=8, help="in a step (default: 8)")
    what.add_argument("--backward", type=time, metavar="X", help="time of B, in forwards (default: 2)")
    what.add_argument("--latency", type=time, metavar="X", help="time of a message (default: 0)")
    what.add_argument("--cost", metavar="F=1,I=1,W=1,latency=0", help="times of all kinds at once, for each stage")
    what.add_argument(
        "--placement",
        choices=("loop", "v"),
        help="which rank has which of its several stages (default: by the schedule)",
    )
    what.add_argument(
        "--memory", type=room, metavar="N", help="what a rank may hold: activations, or a size as in 40GiB"
    )
    what.add_argument("--solver", type=time, metavar="SECONDS", help="with auto: how long to improve and prove it")
    add_model(what, required=False)
    add_spec(what)
    what.add_argument("--run", action="store_true", help="run the model in this process, measured beside predicted")
    how = parser.add_argument_group("how it is shown")
    how.add_argument(
        "--compare", metavar="NAMES", help="a table of several schedules, or of `all`; costs are of a rank's share"
    )
    how.add_argument("--wrap", action="store_true", help="go on in a line below rather than leave actions out")
    how.add_argument("--messages", action="store_true", help="draw under each rank what it sends")
    how.add_argument("--ranks-shown", type=ranks, metavar="0-3,60-63", help="draw only these ranks")
    how.add_argument("--trace", metavar="OUT.json", help="also write a trace for Perfetto and Chrome")
    how.add_argument("--format", choices=("text", "json", "csv", "svg"), default="text", help="default: text")
    add_width(how)


def run_timeline(options: Namespace, output: Output) -> Exit:
    """Simulate a schedule (or several, or run one) and draw it.

    Raises:
        WrongUseError: Options do not fit together.
    """
    if options.spec:
        return _of_spec(options, output)
    call, graph = None, None
    if options.model:
        with output.busy("loading the model"):
            call = load_model(options.model)
            graph = record_graph(call)
    if options.run:
        if call is None or graph is None:
            raise WrongUseError(_finding("--run needs a model to run.", "add --model my_package.nets:make"))
        placement = None if own_order(options.schedule) else place_stages(options.schedule, options, graph)
        with output.busy("running the model"):
            found = measure(call, options.schedule, options.microbatches, placement)
        return _show_measured(found, options, output)
    if options.compare:
        code, results = compare_schedules(options, graph, output)
        messages = [_messages(result) for result in results] if options.trace else []
        names = [result.schedule.name for result in results]
        _write_trace([result.timeline for result in results], messages, names, options, output)
        return code
    result = study_schedule(options.schedule, options, graph, own_order(options.schedule))
    return _show_predicted(result, options, output)


def _of_spec(options: Namespace, output: Output) -> Exit:
    """Show the step that a spec plans; schedule, micro-batches and placement are the spec's.

    Raises:
        WrongUseError: Options do not fit together.
    """
    if not options.model:
        raise WrongUseError(_finding("--spec divides a model.", "add --model my_package.nets:make"))
    if options.compare:
        raise WrongUseError(_finding("--compare has no effect with --spec, which names one schedule.", "leave it out"))
    from ppdsl.cli.spec_models import study_partition  # loads lark
    from ppdsl.spec.load import load_spec

    partition = load_spec(options.spec, parameters_of(options.parameters))
    with output.busy("recording the model"):
        call = load_model(options.model)
        planned = study_partition(partition, call)
    output.report(planned.warnings)
    if options.run:
        with output.busy("running the model"):
            found = measure(call, planned.schedule, planned.schedule.microbatches, spec=partition)
        return _show_measured(found, options, output)
    return _show_predicted(
        study_schedule(planned.schedule.name, options, planned.graph, planned.schedule), options, output
    )


def _show_predicted(result: Result, options: Namespace, output: Output) -> Exit:
    schedule, timeline, study = result.schedule, result.timeline, result.study
    messages = _messages(result) if options.messages or options.trace else ()
    match options.format:
        case "json":
            output.write(to_json(timeline, result.facts(), messages=messages if options.messages else None))
        case "csv":
            output.write(to_csv(timeline))
        case "svg":
            drawn = [messages] if options.messages else []
            output.write(to_svg([timeline], title=schedule.name, unit=study.unit, messages=drawn))
        case _:
            drawing = render_timeline(
                timeline,
                width=output.width,
                title=_title(schedule, study.graph, study.basis),
                unit=study.unit,
                bound=result.bound,
                period=result.period,
                peaks=[peak.count for peak in result.peaks],
                peak_bytes=[peak.bytes for peak in result.peaks] if study.sized else None,
                ranks=_ranks_shown(options, schedule.ranks),
                messages=messages if options.messages else None,
                wrap=options.wrap,
                ascii_only=output.ascii_only,
            )
            output.show(drawing)
            if result.reasons:
                output.note(" ".join(result.reasons))
    return _write_trace([timeline], [messages], schedule.name, options, output)


def _show_measured(found: Measured, options: Namespace, output: Output) -> Exit:
    both = [found.predicted, found.timeline]
    title = _title(found.schedule, found.graph, "run in one process")
    match options.format:
        case "json":
            facts = {"schedule": found.schedule.name, "microbatches": found.schedule.microbatches}
            for timeline in both:
                output.write(to_json(timeline, {**facts, "placement": found.schedule.placement}))
        case "csv":
            output.write(to_csv(found.timeline))
        case "svg":
            output.write(to_svg(both, title=found.schedule.name))
        case _:
            drawing = render_comparison(*both, width=output.width, title=title, ascii_only=output.ascii_only)
            output.show(drawing)
            output.note(TURNS)
    return _write_trace(both, [], found.schedule.name, options, output)


def _messages(result: Result) -> tuple[Transfer, ...]:
    return transfers(result.timeline, result.study.graph, result.study.costs)


def _ranks_shown(options: Namespace, count: int) -> list[int] | None:
    """Return the ranks to draw.

    Raises:
        WrongUseError: There is none of them.
    """
    if options.ranks_shown is None:
        return None
    shown = [rank for rank in options.ranks_shown if rank < count]
    if not shown:
        message = f"--ranks-shown names rank {options.ranks_shown[0]}, but there are {count} ranks."
        raise WrongUseError(_finding(message, f"name some of 0-{count - 1}"))
    return shown


def _title(schedule: Schedule, graph: StageGraph, basis: str) -> str:
    number, count = schedule.ranks, schedule.microbatches
    stages = "" if len(graph.stages) == number else f", {len(graph.stages)} stages"
    words = f"{schedule.name}: {number} rank{'s' * (number != 1)}{stages}, {count} micro-batch{'es' * (count != 1)}"
    return f"{words}, {basis}"


def _write_trace(
    timelines: Sequence[Timeline],
    messages: Sequence[Sequence[Transfer]],
    name: str | Sequence[str],
    options: Namespace,
    output: Output,
) -> Exit:
    if options.trace is None:
        return Exit.FINE
    try:
        Path(options.trace).write_text(to_chrome_trace(timelines, name=name, messages=messages), encoding="utf-8")
    except OSError as error:
        message = f"{options.trace} cannot be written: {error.strerror}."
        raise WrongUseError(_finding(message, "give a path in a folder that exists")) from None
    text = f"{options.trace} written; open it at ui.perfetto.dev or chrome://tracing"
    output.findings.print(text, no_wrap=True, overflow="ignore", crop=False)
    return Exit.FINE


def _finding(message: str, help_text: str) -> Diagnostic:
    return Diagnostic("wrong-use", message, help=help_text)
