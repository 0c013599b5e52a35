"""`auto`: the fastest schedule within the memory, of all families that fit the graph and of the list scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.lifetimes import peak_activations
from ppdsl.schedule.arguments import split_name
from ppdsl.schedule.family import Family
from ppdsl.schedule.registry import build_schedule, families, is_searched
from ppdsl.schedule.table import Schedule
from ppdsl.search.list_scheduler import Priority, list_schedule
from ppdsl.search.memory import Memory
from ppdsl.search.solver import solve
from ppdsl.simulation.bounds import lower_bounds
from ppdsl.simulation.costs import Costs, uniform_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.timeline import Timeline

__all__ = ["Found", "Limit", "find_schedule"]

Limit = Memory | Sequence[float] | float
"""What each rank may hold: a `Memory`, or activations (stage and micro-batch), one number for each rank or for all."""


@dataclass(frozen=True)
class Found:
    """A schedule, and why it was taken.

    Attributes:
        schedule: The schedule.
        timeline: When everything would run, with the costs it was chosen for.
        reasons: Sentences: what was taken, what was close, what was left out and why.
        proven: Whether no schedule of the same kind of backward is faster within the memory.
    """

    schedule: Schedule
    timeline: Timeline
    reasons: tuple[str, ...]
    proven: bool = False


def find_schedule(
    name: str,
    graph: StageGraph,
    placement: Sequence[int],
    microbatches: int,
    ranks: int | None = None,
    costs: Costs | None = None,
    memory: Limit | None = None,
    time_limit: float | None = None,
) -> Found:
    """Return the schedule that a name stands for; `auto` searches one.

    `auto` compares every family that takes this graph and placement with the list scheduler, both priorities, full and
    split backwards, and takes the shortest step. Equally short ones: the one whose busiest rank holds less, then the
    one that stands first in the list of families. The result depends on nothing but the arguments, unless a time limit
    lets the solver (`ppdsl[solver]`) go on from there.

    Args:
        name: A family's name, or `auto`, or `auto(solver=20)` for 20 seconds of the solver; arguments as
            `build_schedule` takes them.
        graph: The stages and the values between them.
        placement: For each stage its rank.
        microbatches: Number of micro-batches in a step.
        ranks: Number of ranks; None: as many as the placement uses.
        costs: Seconds of computations and messages; None: uniform, messages free.
        memory: What ranks may hold; None: any amount.
        time_limit: Seconds for the solver to improve or prove what was found; None: it is not used.

    Raises:
        ScheduleError: There is no such schedule, it does not fit the graph, or nothing fits the memory.

    >>> from ppdsl.graph.shapes import shape_graph
    >>> diamond = shape_graph(4, [(0, (1, 2)), (1, (3,)), (2, (3,))])
    >>> found = find_schedule("auto", diamond, (0, 1, 2, 3), microbatches=4, memory=3)
    >>> found.schedule.name, found.timeline.makespan
    ('zero_bubble(h1)', 14.0)
    """
    count = max(placement, default=0) + 1 if ranks is None else ranks
    costs = costs or uniform_costs(graph)
    limits = _memory(memory, graph, count)
    seconds = _solver_seconds(name)
    if seconds is None:
        schedule = build_schedule(name, graph, placement, microbatches, ranks)
        return _given(schedule, graph, costs, limits)
    candidates = _Candidates(graph, placement, microbatches, count, costs, limits)
    best, reasons = candidates.best()
    limit = time_limit if time_limit is not None else seconds
    if not limit:
        proven = best.makespan <= best.bound + _EPSILON * best.bound
        return Found(best.schedule, best.timeline, reasons, proven)
    return _improve(best, reasons, graph, costs, limits, limit)


_EPSILON = 1e-9


@dataclass(frozen=True)
class _Candidate:
    schedule: Schedule
    timeline: Timeline
    bound: float
    held: float
    order: int

    @property
    def makespan(self) -> float:
        return float(self.timeline.makespan)


class _Candidates:
    """All schedules that `auto` compares."""

    def __init__(
        self,
        graph: StageGraph,
        placement: Sequence[int],
        microbatches: int,
        ranks: int,
        costs: Costs,
        memory: Memory | None,
    ) -> None:
        self.graph, self.placement, self.microbatches, self.ranks = graph, tuple(placement), microbatches, ranks
        self.costs, self.memory = costs, memory
        self.notes: list[str] = []
        self.too_large: list[tuple[float, float, float, int, str]] = []

    def best(self) -> tuple[_Candidate, tuple[str, ...]]:
        """Return the best candidate and the reasons.

        Raises:
            ScheduleError: Nothing fits the memory.
        """
        fitting = list(self._fitting())
        if not fitting:
            raise ScheduleError(self._nothing_fits())
        # Sums of floats in another order differ in their last digits; such times are equal.
        least = min(candidate.makespan for candidate in fitting) * (1 + _EPSILON)
        fitting.sort(key=lambda c: (max(c.makespan, least), c.held, c.order))
        best, *others = fitting
        percent = 100.0 * best.bound / best.makespan if best.makespan else 100.0
        reasons = [f"{best.schedule.name} takes {best.makespan:.6g} s, {percent:.1f} % of the lower bound's speed."]
        if others:
            second = others[0]
            reasons.append(f"Next comes {second.schedule.name} with {second.makespan:.6g} s.")
        return best, (*reasons, *self.notes)

    def _fitting(self) -> Iterator[_Candidate]:
        for order, schedule in enumerate(self._all()):
            over = None if self.memory is None else self.memory.excess(schedule, self.graph)
            if over is not None and self.memory is not None:
                limit = self.memory.limits[over.rank]
                self.notes.append(f"{schedule.name} holds {over.size:g} on rank {over.rank}; its limit is {limit:g}.")
                self.too_large.append((over.size - limit, over.size, limit, over.rank, schedule.name))
                continue
            timeline = simulate_schedule(schedule, self.graph, self.costs)
            bounds = (
                self.memory.bounds(schedule, self.graph, self.costs)
                if self.memory
                else lower_bounds(schedule, self.graph, self.costs)
            )
            peaks = self.memory.peaks(schedule, self.graph) if self.memory else peak_activations(schedule, self.graph)
            yield _Candidate(schedule, timeline, float(bounds.best), max((p.size for p in peaks), default=0.0), order)

    def _all(self) -> Iterator[Schedule]:
        for family in families().values():
            if family.backward:
                yield from self._of_family(family)
        for split in (False, True):
            for priority in Priority:
                yield from self._listed(split=split, priority=priority)

    def _of_family(self, family: Family) -> Iterator[Schedule]:
        choices = next((p for p in family.parameters if p.choices), None)
        for choice in choices.choices if choices else ("",):
            name = f"{family.name}({choice})" if choice else family.name
            try:
                yield build_schedule(name, self.graph, self.placement, self.microbatches, self.ranks)
            except ScheduleError as error:
                self.notes.append(f"{name} is left out: {error.diagnostics[0].message}")

    def _listed(self, *, split: bool, priority: Priority) -> Iterator[Schedule]:
        try:
            yield list_schedule(
                self.graph,
                self.placement,
                self.microbatches,
                self.ranks,
                costs=self.costs,
                priority=priority,
                split=split,
                memory=self.memory,
            )
        except ScheduleError as error:
            self.notes.append(f"The list scheduler is left out: {error.diagnostics[0].message}")

    def _nothing_fits(self) -> Diagnostic:
        if not self.too_large or self.memory is None:
            return Diagnostic("no-schedule", "No schedule fits this graph and placement.")
        _, size, limit, rank, name = min(self.too_large)
        message = (
            f"No schedule fits the memory: {name} needs least, {size:g} {self.memory.unit} on rank {rank}, whose limit "
            f"is {limit:g}."
        )
        return Diagnostic(
            "no-memory", message, help=f"raise the limit to {size:g}, or spread the stages over more ranks"
        )


def _memory(memory: Limit | None, graph: StageGraph, ranks: int) -> Memory | None:
    if memory is None or isinstance(memory, Memory):
        return memory
    limits = tuple(memory) if isinstance(memory, Sequence) else (memory,) * ranks
    if len(limits) != ranks:
        message = f"There are {len(limits)} memory limits for {ranks} ranks."
        raise ScheduleError(Diagnostic("memory-limits", message, help="give one limit for each rank, or one for all"))
    return Memory.of_activations(limits, len(graph.stages))


def _solver_seconds(name: str) -> float | None:
    """Return the seconds that `auto(solver=..)` asks for, 0 for `auto`, None for another name.

    Raises:
        ScheduleError: `auto` is given anything else.
    """
    split = split_name(name)
    if split is None or not is_searched(name):
        return None
    seconds = 0.0
    for key, value in split[1]:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if key.casefold() != "solver" or not 0 < seconds < float("inf"):
            message = f"Schedule 'auto' takes seconds for the solver. Found {f'{key}={value}' if key else value!r}."
            raise ScheduleError(Diagnostic("bad-argument", message, help="write for example auto(solver=20)"))
    return seconds


def _given(schedule: Schedule, graph: StageGraph, costs: Costs, memory: Memory | None) -> Found:
    over = None if memory is None else memory.excess(schedule, graph)
    if over is not None and memory is not None:
        message = (
            f"Schedule {schedule.name!r} holds {over.size:g} {memory.unit} on rank {over.rank}; its limit is "
            f"{memory.limits[over.rank]:g}."
        )
        raise ScheduleError(Diagnostic("no-memory", message, help="use auto, or raise the limit"))
    return Found(schedule, simulate_schedule(schedule, graph, costs), (f"{schedule.name} was asked for.",))


def _improve(
    best: _Candidate, reasons: tuple[str, ...], graph: StageGraph, costs: Costs, memory: Memory | None, limit: float
) -> Found:
    solution = solve(best.schedule, graph, costs, memory, time_limit=limit)
    timeline = simulate_schedule(solution.schedule, graph, costs)
    how = "proves that nothing is faster" if solution.proven else f"proves {solution.bound:.6g} s at least"
    words = f"The solver starts from {best.makespan:.6g} s, finds {float(timeline.makespan):.6g} s and {how}."
    return Found(solution.schedule, timeline, (*reasons, words), solution.proven)
