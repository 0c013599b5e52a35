"""`ppdsl timeline`: when each rank runs what, predicted, and measured beside it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppdsl.cli.graphs import record_graph
from ppdsl.cli.measuring import TURNS, Measured, measure
from ppdsl.cli.models import ModelCall, load_model
from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.cli.schedules import own_order
from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import peak_activations
from ppdsl.plan.placement import place
from ppdsl.report.tables import format_table
from ppdsl.report.timeline import format_time, render_comparison, render_timeline
from ppdsl.report.timeline_svg import to_svg
from ppdsl.report.traces import to_chrome_trace, to_csv, to_json
from ppdsl.schedule.registry import build_schedule, families
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.bounds import lower_bounds
from ppdsl.simulation.costs import Costs, flop_costs, uniform_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.timeline import Timeline

__all__ = ["parse_costs", "run_timeline"]

_COSTS = ("F", "I", "W", "B", "latency")
_COST_HELP = "write numbers for some of F, I, W (or B for both) and latency, as in --cost F=1,I=1,W=1,latency=0.5"


@dataclass(frozen=True)
class _Study:
    """What is simulated.

    Attributes:
        graph: The stages.
        placement: For each stage its rank.
        costs: Of computations and messages.
        unit: What times are counted in; None for seconds.
        basis: Where the costs come from, in words.
    """

    graph: StageGraph
    placement: tuple[int, ...]
    costs: Costs
    unit: str | None
    basis: str


@dataclass(frozen=True)
class _Result:
    """A simulated schedule.

    Attributes:
        schedule: The order.
        timeline: When it would run.
        bound: What no order of the same computations beats.
        peaks: For each rank the most activations it holds.
    """

    schedule: Schedule
    timeline: Timeline
    bound: float
    peaks: tuple[int, ...]

    @property
    def optimal(self) -> float:
        """The bound in per cent of the makespan."""
        return 100 * self.bound / self.timeline.makespan if self.timeline.makespan else 100.0


def run_timeline(options: Namespace, output: Output) -> Exit:
    """Simulate a schedule (or several, or run one) and draw it.

    Raises:
        WrongUseError: Options do not fit together.
    """
    with output.busy("loading the model"):
        call = load_model(options.model) if options.model else None
    if options.run:
        if call is None:
            raise WrongUseError(_finding("--run needs a model to run.", "add --model my_package.nets:make"))
        with output.busy("running the model"):
            found = measure(call, options.schedule, options.microbatches)
        return _show_measured(found, options, output)
    order = own_order(options.schedule)
    study = _study(options, call, order)
    if options.compare:
        return _compare(study, options, output)
    schedule = order or _build(options.schedule, study, options.microbatches)
    return _show_predicted(_simulate(schedule, study), study, options, output)


def parse_costs(text: str) -> dict[str, float]:
    """Return costs by name.

    Raises:
        WrongUseError: A name is unknown, or a value is no number or negative.

    >>> parse_costs("F=1, B=2.5, latency=0.1")
    {'F': 1.0, 'B': 2.5, 'latency': 0.1}
    """
    costs: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in _COSTS or not 0 <= number < float("inf"):
            raise WrongUseError(_finding(f"--cost has {part!r}, which is no cost.", _COST_HELP))
        costs[name] = number
    return costs


def _study(options: Namespace, call: ModelCall | None, order: Schedule | None) -> _Study:
    if call is not None:
        graph = record_graph(call)
    elif order is not None:
        graph = chain_graph(len(order.placement))
    else:
        graph = chain_graph(options.stages or options.ranks or 4)
    keys = list(dict.fromkeys(stage.key for stage in graph.stages))
    ranks = min(options.ranks or len(keys), len(keys))
    loop = {key: position % ranks for position, key in enumerate(keys)}
    placement = place(graph, ranks, loop) if order is None else order.placement
    given = parse_costs(options.cost) if options.cost else {}
    if call is not None and not given and options.backward is None:
        costs = flop_costs(graph, latency=options.latency if options.latency is not None else 10e-6)
        return _Study(graph, placement, costs, None, "estimated from FLOPs at 100 TFLOP/s")
    unit = "F" if given.get("F", 1.0) == 1.0 else "t"  # without a forward of 1 there is no unit to name
    return _Study(graph, placement, _uniform(graph, given, options), unit, "equal stages")


def _uniform(graph: StageGraph, given: Mapping[str, float], options: Namespace) -> Costs:
    both = given.get("B", options.backward if options.backward is not None else 2.0)
    return uniform_costs(
        graph,
        forward=given.get("F", 1.0),
        input_grad=given.get("I", both / 2),
        weight_grad=given.get("W", both / 2),
        latency=given.get("latency", options.latency or 0.0),
    )


def _build(name: str, study: _Study, microbatches: int) -> Schedule:
    try:
        return build_schedule(name, study.graph, study.placement, microbatches)
    except ScheduleError as error:
        if any(d.code == "unknown-schedule" for d in error.diagnostics):
            raise WrongUseError(*error.diagnostics) from None
        raise


def _simulate(schedule: Schedule, study: _Study) -> _Result:
    """Simulate without a message plan, which nothing here needs and which is the larger part of the work.

    Raises:
        ScheduleError: An own order breaks a law.
    """
    findings = () if schedule.name in families() else verify_schedule(schedule, study.graph)
    if findings:
        raise ScheduleError(*findings)
    timeline = simulate_schedule(schedule, study.graph, study.costs)
    bound = lower_bounds(schedule, study.graph, study.costs).best
    peaks = tuple(peak.count for peak in peak_activations(schedule, study.graph))
    return _Result(schedule, timeline, bound, peaks)


def _show_predicted(result: _Result, study: _Study, options: Namespace, output: Output) -> Exit:
    schedule, timeline = result.schedule, result.timeline
    title = _title(schedule, study.graph, study.basis)
    match options.format:
        case "json":
            output.write(to_json(timeline, _facts(result, study)))
        case "csv":
            output.write(to_csv(timeline))
        case "svg":
            output.write(to_svg([timeline], title=schedule.name, unit=study.unit))
        case _:
            output.show(
                render_timeline(
                    timeline,
                    width=output.width,
                    title=title,
                    unit=study.unit,
                    bound=result.bound,
                    peaks=result.peaks,
                    ascii_only=output.ascii_only,
                )
            )
    return _write_trace([timeline], schedule.name, options, output)


def _show_measured(found: Measured, options: Namespace, output: Output) -> Exit:
    both = [found.predicted, found.timeline]
    title = _title(found.schedule, found.graph, "run in one process")
    match options.format:
        case "json":
            facts = {"schedule": found.schedule.name, "microbatches": found.schedule.microbatches}
            for timeline in both:
                output.write(to_json(timeline, facts))
        case "csv":
            output.write(to_csv(found.timeline))
        case "svg":
            output.write(to_svg(both, title=found.schedule.name))
        case _:
            drawing = render_comparison(*both, width=output.width, title=title, ascii_only=output.ascii_only)
            output.show(drawing)
            output.note(TURNS)
    return _write_trace(both, found.schedule.name, options, output)


def _compare(study: _Study, options: Namespace, output: Output) -> Exit:
    trainers = [name for name, family in families().items() if family.backward]
    names = trainers if options.compare == "all" else [n.strip() for n in options.compare.split(",")]
    results = [_simulate(_build(name, study, options.microbatches), study) for name in names]
    if output.json:
        for result in results:
            output.write(to_json(result.timeline, _facts(result, study)))
        return Exit.FINE
    header = ("schedule", "makespan", "bubble", "of the bound", "held at most")
    rows = [
        (
            r.schedule.name,
            format_time(r.timeline.makespan, study.unit),
            f"{100 * r.timeline.bubble:.1f} %",
            f"{r.optimal:.3g} %",
            str(max(r.peaks, default=0)),
        )
        for r in results
    ]
    output.show(format_table(header, rows, align="<>>>>", width=output.width, elastic=0))
    return _write_trace([r.timeline for r in results], "", options, output)


def _facts(result: _Result, study: _Study) -> dict[str, object]:
    return {
        "schedule": result.schedule.name,
        "model": study.graph.name,
        "unit": study.unit or "s",
        "stages": len(study.graph.stages),
        "microbatches": result.schedule.microbatches,
        "lower_bound": result.bound,
        "percent_of_optimal": result.optimal,
        "peak_activations": result.peaks,
    }


def _title(schedule: Schedule, graph: StageGraph, basis: str) -> str:
    ranks, count = schedule.ranks, schedule.microbatches
    stages = "" if len(graph.stages) == ranks else f", {len(graph.stages)} stages"
    words = f"{schedule.name}: {ranks} rank{'s' * (ranks != 1)}{stages}, {count} micro-batch{'es' * (count != 1)}"
    return f"{words}, {basis}"


def _write_trace(timelines: Sequence[Timeline], name: str, options: Namespace, output: Output) -> Exit:
    if options.trace is None:
        return Exit.FINE
    try:
        Path(options.trace).write_text(to_chrome_trace(timelines, name=name), encoding="utf-8")
    except OSError as error:
        message = f"{options.trace} cannot be written: {error.strerror}."
        raise WrongUseError(_finding(message, "give a path in a folder that exists")) from None
    text = f"{options.trace} written; open it at ui.perfetto.dev or chrome://tracing"
    output.findings.print(text, no_wrap=True, overflow="ignore", crop=False)
    return Exit.FINE


def _finding(message: str, help_text: str) -> Diagnostic:
    return Diagnostic("wrong-use", message, help=help_text)
