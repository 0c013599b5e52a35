"""What `ppdsl timeline` simulates: stages on ranks with costs, from a model or from a few numbers."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ppdsl.cli.arguments import Room
from ppdsl.cli.output import WrongUseError
from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import Peak, peak_activations
from ppdsl.plan.placement import place
from ppdsl.schedule.arrangement import Arrangement
from ppdsl.schedule.registry import build_schedule, is_searched, named_family
from ppdsl.schedule.table import Schedule
from ppdsl.search.memory import Memory
from ppdsl.simulation.bounds import lower_bounds
from ppdsl.simulation.costs import Costs, flop_costs, uniform_costs
from ppdsl.simulation.simulator import period, simulate_schedule
from ppdsl.timeline import Timeline

__all__ = ["Result", "Study", "parse_costs", "place_stages", "study_schedule"]

_COSTS = ("F", "I", "W", "B", "latency")
_COST_HELP = "write numbers for some of F, I, W (or B for both) and latency, as in --cost F=1,I=1,W=1,latency=0.5"
_RANKS = 4
_MORE_STAGES = 2  # on each rank, where stages go round or there and back and nobody says how often
_AUTO_SHAPES: tuple[tuple[int, str], ...] = ((1, "loop"), (2, "loop"), (2, "v"))
_SECONDS = re.compile(r"(\d) s\b")
_TYPED_WRONG = ("unknown-schedule", "bad-schedule-name", "unknown-argument", "bad-argument", "argument-twice")


@dataclass(frozen=True)
class Study:
    """Stages on ranks, and what they cost.

    Attributes:
        graph: The stages.
        placement: For each stage its rank.
        costs: Of computations and messages.
        unit: What times are counted in; None for seconds.
        basis: Where the costs come from, in words.
        sized: Whether the sizes of values are those of a model.
        share: What part of a unit a stage is.
    """

    graph: StageGraph
    placement: tuple[int, ...]
    costs: Costs
    unit: str | None
    basis: str
    sized: bool
    share: float = 1.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return max(self.placement, default=0) + 1

    @property
    def stages_a_rank(self) -> float:
        """Stages of a rank, in the mean."""
        return len(self.placement) / self.ranks


@dataclass(frozen=True)
class Result:
    """A simulated schedule.

    Attributes:
        study: What was simulated.
        schedule: The order.
        timeline: When it would run.
        bound: What no order of the same computations beats.
        peaks: For each rank the most activations it holds, and when.
        period: Length of a step when steps follow each other without a barrier.
        reasons: Why a searched schedule was taken, in sentences.
        proven: Whether nothing is faster, of a searched schedule.
    """

    study: Study
    schedule: Schedule
    timeline: Timeline
    bound: float
    peaks: tuple[Peak, ...]
    period: float
    reasons: tuple[str, ...] = ()
    proven: bool = False

    @property
    def optimal(self) -> float:
        """The bound in per cent of the makespan."""
        return 100 * min(1.0, self.bound / self.timeline.makespan) if self.timeline.makespan else 100.0

    @property
    def period_bubble(self) -> float:
        """Share of all ranks' time in the period in which they wait."""
        time = self.period * self.timeline.ranks
        return max(0.0, 1.0 - sum(self.timeline.busy) / time) if time else 0.0

    def facts(self) -> dict[str, object]:
        """Return what JSON says beside the actions."""
        searched = {"reasons": self.reasons, "proven": self.proven} if self.reasons else {}
        return {
            "schedule": self.schedule.name,
            "model": self.study.graph.name,
            "unit": self.study.unit or "s",
            "stages": len(self.study.graph.stages),
            "microbatches": self.schedule.microbatches,
            "placement": self.schedule.placement,
            "lower_bound": self.bound,
            "percent_of_optimal": self.optimal,
            "period": self.period,
            "period_bubble": self.period_bubble,
            "peak_activations": [peak.count for peak in self.peaks],
            "peak_actions": [str(peak.action) if peak.action else None for peak in self.peaks],
            "peak_bytes": [peak.bytes for peak in self.peaks] if self.study.sized else None,
            **searched,
        }


def study_schedule(
    name: str,
    options: Namespace,
    model: StageGraph | None = None,
    order: Schedule | None = None,
    *,
    shared: bool = False,
) -> Result:
    """Build a schedule for what the options say, and simulate it.

    Args:
        name: A family with its arguments; it decides how many stages a rank has and where, unless an option or a model
            does.
        options: Of `ppdsl timeline`.
        model: Stages of a model, if there is one.
        order: The schedule itself, when it is the user's own.
        shared: Whether the stages of a rank take the given costs together, so that schedules with few and with many
            stages can be compared; else each stage does.

    Raises:
        ScheduleError: The schedule cannot be built, or an own order breaks a law.
        WrongUseError: There is no such family.
    """
    try:
        if order is not None:
            return _judge(order, _study(name, options, model, order, shared=shared), options)
        if not is_searched(name):
            return _build(name, _study(name, options, model, None, shared=shared), options)
        free = shared and model is None and not (options.stages or options.chunks or options.placement)
        shapes = _AUTO_SHAPES if free else ((options.chunks, options.placement),)
        tried = []
        for chunks, placement in shapes:
            named = Namespace(**{**vars(options), "chunks": chunks, "placement": placement})
            tried.append(_build(name, _study(name, named, model, None, shared=shared), options))
        return min(tried, key=_worse)
    except ScheduleError as error:
        if any(d.code in _TYPED_WRONG for d in error.diagnostics):
            raise WrongUseError(*error.diagnostics) from None
        raise


def _worse(result: Result) -> tuple[float, ...]:
    held = max((peak.count for peak in result.peaks), default=0) * result.study.share
    return round(result.timeline.makespan, 9), round(result.period, 9), held


def _judge(order: Schedule, study: Study, options: Namespace) -> Result:
    """Simulate a user's own order.

    Raises:
        ScheduleError: It breaks a law, or needs more memory than there is.
    """
    findings = verify_schedule(order, study.graph)
    memory = None if options.memory is None else _memory(study, options.memory)
    excess = None if findings or memory is None else memory.excess(order, study.graph)
    if excess is not None:
        message = f"{order.name} holds {excess.size:g} on rank {excess.rank}; its limit is {options.memory.amount:g}."
        findings = (Diagnostic("no-memory", message, help="raise the limit, or use auto"),)
    if findings:
        raise ScheduleError(*findings)
    return _result(order, study, memory)


def _build(name: str, study: Study, options: Namespace) -> Result:
    """Build or search a schedule, and simulate it."""
    if not is_searched(name) and options.memory is None:
        return _result(build_schedule(name, study.graph, study.placement, options.microbatches), study)
    from ppdsl.search.auto import find_schedule  # the only command that needs the search

    memory = None if options.memory is None else _memory(study, options.memory)
    found = find_schedule(
        name,
        study.graph,
        study.placement,
        options.microbatches,
        costs=study.costs,
        memory=memory,
        time_limit=options.solver,
    )
    result = _result(found.schedule, study, memory)
    if not is_searched(name):
        return result
    reasons = tuple(_SECONDS.sub(rf"\1 {study.unit or 's'}", reason) for reason in found.reasons)
    return replace(result, reasons=reasons, proven=found.proven)


def _memory(study: Study, room: Room) -> Memory:
    """Return the same limit for all ranks; activations count as costs do: of a stage, or of a rank's share."""
    limits = (room.amount,) * study.ranks
    if room.bytes:
        return Memory.of_bytes(limits, study.graph, study.placement)
    return Memory(limits, (study.share,) * len(study.placement))


def _result(schedule: Schedule, study: Study, memory: Memory | None = None) -> Result:
    # Without a message plan, which nothing here needs and which is the larger part of the work.
    timeline = simulate_schedule(schedule, study.graph, study.costs)
    limits, weights = (None, None) if memory is None else (memory.limits, memory.weights)
    bound = lower_bounds(schedule, study.graph, study.costs, limits=limits, weights=weights).best
    between = period(schedule, study.graph, study.costs)
    return Result(study, schedule, timeline, bound, peak_activations(schedule, study.graph), between)


def place_stages(name: str, options: Namespace, model: StageGraph) -> dict[int | str, int]:
    """Return for each stage key of a model the rank that a schedule wants it on.

    Raises:
        WrongUseError: There is no such schedule.
    """
    try:
        graph, placement = _place(name, options, model)
    except ScheduleError as error:
        raise WrongUseError(*error.diagnostics) from None
    return {stage.key: rank for stage, rank in zip(graph.stages, placement, strict=True)}


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
            message = f"--cost has {part!r}, which is no cost."
            raise WrongUseError(Diagnostic("wrong-use", message, help=_COST_HELP))
        costs[name] = number
    return costs


def _study(name: str, options: Namespace, model: StageGraph | None, order: Schedule | None, *, shared: bool) -> Study:
    given = parse_costs(options.cost) if options.cost else {}
    if order is not None:
        graph = model or chain_graph(len(order.placement))
        placement = order.placement
    else:
        graph, placement = _place(name, options, model, shared=shared)
    if model is not None and not given and options.backward is None:
        costs = flop_costs(graph, latency=options.latency if options.latency is not None else 10e-6)
        return Study(graph, placement, costs, None, "estimated from FLOPs at 100 TFLOP/s", sized=True)
    unit = "F" if given.get("F", 1.0) == 1.0 else "t"  # without a forward of 1 there is no unit to name
    share = (max(placement) + 1) / len(placement) if shared else 1.0
    costs = _uniform(graph, given, options, share)
    return Study(graph, placement, costs, unit, "equal stages", sized=model is not None, share=share)


def _place(
    name: str, options: Namespace, model: StageGraph | None, *, shared: bool = False
) -> tuple[StageGraph, tuple[int, ...]]:
    """Return the stages and their ranks, as the schedule's family likes them."""
    rule, count = Arrangement.GIVEN, None
    if not is_searched(name):
        named = named_family(name)
        rule, count = named.family.arrangement, named.chunks
    rule = rule if options.placement is None else Arrangement(options.placement)
    count = options.chunks or count or (1 if rule is Arrangement.GIVEN else _MORE_STAGES)
    graph = model or chain_graph(options.stages or (options.ranks or _RANKS) * count)
    keys = list(dict.fromkeys(stage.key for stage in graph.stages))
    if shared and model is not None:  # all schedules on as many ranks
        count = 1
    ranks = options.ranks or (len(keys) // count if len(keys) % count == 0 else len(keys))
    ranks = min(ranks, len(keys))
    there = rule is Arrangement.V
    chosen = {key: _rank_of(position, ranks, back=there) for position, key in enumerate(keys)}
    return graph, place(graph, ranks, chosen)


def _rank_of(position: int, ranks: int, *, back: bool) -> int:
    """Return the rank of a stage that goes round, or there and back."""
    turn, step = divmod(position, ranks)
    return ranks - 1 - step if back and turn % 2 else step


def _uniform(graph: StageGraph, given: Mapping[str, float], options: Namespace, share: float) -> Costs:
    both = given.get("B", options.backward if options.backward is not None else 2.0)
    return uniform_costs(
        graph,
        forward=share * given.get("F", 1.0),
        input_grad=share * given.get("I", both / 2),
        weight_grad=share * given.get("W", both / 2),
        latency=given.get("latency", options.latency or 0.0),
    )
