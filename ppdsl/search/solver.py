"""An exact solver (OR-tools CP-SAT) that improves a schedule, or proves that none is faster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind, action_of
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.table import Schedule
from ppdsl.search.memory import Memory
from ppdsl.simulation.bounds import lower_bounds
from ppdsl.simulation.costs import Costs
from ppdsl.simulation.network import arrival_delays
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.units import Seconds

__all__ = ["Solution", "solve"]

_TICKS = 100_000
_LARGEST = 1_000_000
_WEIGHTS = 10_000


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    Attributes:
        schedule: The best schedule it knows; never slower than the one it started from.
        bound: No schedule of the same actions within the memory is faster, in seconds.
        proven: Whether `schedule` is as fast as `bound`.
    """

    schedule: Schedule
    bound: float
    proven: bool


def solve(
    start: Schedule, graph: StageGraph, costs: Costs, memory: Memory | None = None, *, time_limit: float = 20.0
) -> Solution:
    """Return the fastest order of a schedule's actions on its placement that the solver finds in time.

    Every action's start is a variable; ranks do one thing at a time, data flow and message times are kept, every stage
    takes micro-batches in order, and activations stay within the memory from the start of F to the last use. `start`
    is the hint, so nothing slower is returned. Where it meets a lower bound the solver is not even started. Up to some
    hundred actions are proven in seconds; for thousands it seldom helps.

    The result depends on the machine's speed only when time runs out before the proof.

    Args:
        start: A schedule that keeps the laws and the memory.
        graph: The stages and the values between them.
        costs: Seconds of computations and messages.
        memory: What ranks may hold; None: any amount.
        time_limit: Seconds.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    bounds = memory.bounds(start, graph, costs) if memory else lower_bounds(start, graph, costs)
    bound = float(bounds.best)
    makespan = float(simulate_schedule(start, graph, costs).makespan)
    if makespan <= bound * (1 + 1e-9):
        return Solution(start, makespan, proven=True)
    model = _Model(start, graph, costs, memory, _cp_model())
    return model.solve(bound, makespan, time_limit)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        message = "The solver needs OR-tools, which is not installed."
        help_text = 'install it with pip install "ppdsl[solver]", or leave the time limit out'
        raise ScheduleError(Diagnostic("no-solver", message, help=help_text)) from error
    return cp_model


class _Model:
    """Variables and constraints; times are whole ticks."""

    def __init__(self, start: Schedule, graph: StageGraph, costs: Costs, memory: Memory | None, cp: Any) -> None:
        self.start, self.graph, self.costs, self.cp = start, graph, costs, cp
        self.exact, self.tick = _tick_of(costs)
        # Rounded up times could make a hint late: its starts are worked out again in ticks.
        ticks = _in_ticks(costs, self.tick, exact=self.exact)
        self.hint = {e.action: round(e.start) for e in simulate_schedule(start, graph, ticks).events}
        self.actions = sorted(self.hint, key=_order)
        self.ticks = {action: round(ticks.of(action)) for action in self.actions}
        self.waits = {key: round(wait) for key, wait in arrival_delays(start.placement, graph, ticks).items()}
        self.horizon = max((self.hint[a] + self.ticks[a] for a in self.actions), default=0)
        self.model = cp.CpModel()
        self.begin = {a: self.model.new_int_var(0, self.horizon - self.ticks[a], str(a)) for a in self.actions}
        self._ranks()
        self._data_flow()
        self._stages()
        if memory is not None:
            self._memory(memory)
        self.end = self.model.new_int_var(0, self.horizon, "end")
        for action in self.actions:
            self.model.add(self.end >= self.begin[action] + self.ticks[action])
        self.model.minimize(self.end)
        for action, at in self.hint.items():
            self.model.add_hint(self.begin[action], at)
        self.model.add_hint(self.end, self.horizon)

    def solve(self, bound: float, makespan: float, time_limit: float) -> Solution:
        """Run the solver and return what it found."""
        self.model.add(self.end >= math.floor(bound / self.tick * (1 - 1e-9)))
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        # Presolve of thousands of intervals takes far longer than the search.
        solver.parameters.cp_model_presolve = False
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return Solution(self.start, bound, proven=False)
        at = {action: solver.value(self.begin[action]) for action in self.actions}
        rows = tuple(
            tuple(sorted(row, key=lambda a: (at[a], at[a] + self.ticks[a], _order(a)))) for row in self.start.rows
        )
        found = replace(self.start, name=f"solver({self.start.name})", rows=rows, overlaps=())
        least = max(bound, solver.best_objective_bound * self.tick if self.exact else bound)
        seconds = float(simulate_schedule(found, self.graph, self.costs).makespan)
        if seconds >= makespan * (1 - 1e-12):
            found, seconds = self.start, makespan
        return Solution(found, least, proven=seconds <= least * (1 + 1e-9))

    def _ranks(self) -> None:
        for row in self.start.rows:
            intervals = [
                self.model.new_fixed_size_interval_var(self.begin[a], self.ticks[a], str(a))
                for a in row
                if self.ticks[a]
            ]
            self.model.add_no_overlap(intervals)

    def _data_flow(self) -> None:
        for action, giver, wait in self._arcs():
            self.model.add(self.begin[action] >= self.begin[giver] + self.ticks[giver] + wait)

    def _arcs(self) -> list[tuple[Action, Action, int]]:
        flow = flow_of(self.graph)
        maker = {made: a for a in self.actions if (made := flow.makes(a)) is not None}
        return [
            (action, maker[need], self.waits.get((need.gradient, need.stage, action.stage), 0))
            for action in self.actions
            for need in flow.needs(action)
        ]

    def _stages(self) -> None:
        last: dict[tuple[int, ActionKind], Action] = {}
        for action in self.actions:
            key = (action.stage, action.kind)
            if key in last:
                self.model.add(self.begin[action] >= self.begin[last[key]] + self.ticks[last[key]])
            last[key] = action

    def _memory(self, memory: Memory) -> None:
        whole = all(float(x).is_integer() for x in (*memory.weights, *memory.limits) if x < math.inf)
        for rank, limit in enumerate(memory.limits):
            stages = [s for s, home in enumerate(self.start.placement) if home == rank]
            if limit == math.inf or not stages:
                continue
            # Weights rounded up and limits rounded down: what fits here fits.
            scale = 1.0 if whole else _WEIGHTS / max(memory.weights[s] for s in stages)
            intervals, demands = [], []
            for stage in stages:
                for microbatch in range(self.start.microbatches):
                    intervals.append(self._life(stage, microbatch))
                    demands.append(math.ceil(memory.weights[stage] * scale - 1e-9))
            self.model.add_cumulative(intervals, demands, math.floor(limit * scale + 1e-9))

    def _life(self, stage: int, microbatch: int) -> Any:
        """Return the interval from the start of a forward to the end of the last action that uses its state."""
        home = self.start.placement[stage]
        users = {
            c for e in self.graph.edges if e.producer == stage for c in e.consumers if self.start.placement[c] == home
        }
        uses = [action_of(stage, kind, microbatch) for kind in ActionKind]
        uses += [action_of(user, ActionKind.FORWARD, microbatch) for user in sorted(users)]
        uses = [action for action in uses if action in self.begin]
        begin = self.begin[uses[0]]
        name = f"life{stage}.{microbatch}"
        ends = [self.hint[a] + self.ticks[a] for a in uses]
        end = self.model.new_int_var(0, self.horizon, name)
        size = self.model.new_int_var(0, self.horizon, name)
        for action in uses:
            self.model.add(end >= self.begin[action] + self.ticks[action])
        self.model.add_hint(end, max(ends))
        self.model.add_hint(size, max(ends) - self.hint[uses[0]])
        return self.model.new_interval_var(begin, size, end, name)


def _order(action: Action) -> tuple[int, int, int]:
    """Sort forwards along the model, then gradients against it, then weights: a topological order."""
    phase = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 1, ActionKind.INPUT_GRAD: 1, ActionKind.WEIGHT_GRAD: 2}
    at = phase[action.kind]
    return at, action.stage if at == 0 else -action.stage, action.microbatch


def _tick_of(costs: Costs) -> tuple[bool, float]:
    """Return whether all times are whole multiples of a tick, and the tick."""
    edges = range(len(costs.latency))
    times = [*costs.forward, *costs.backward, *costs.input_grad, *costs.weight_grad, *map(costs.transfer, edges)]
    parts = [Fraction(time).limit_denominator(_LARGEST) for time in times if time]
    same = all(abs(float(part) - time) <= 1e-12 * time for part, time in zip(parts, filter(None, times), strict=True))
    if same and parts:
        below = math.lcm(*(part.denominator for part in parts))
        above = math.gcd(*(int(part * below) for part in parts))
        if max(parts) * below / above <= _LARGEST:
            return True, above / below
    return False, max(times, default=1.0) / _TICKS or 1.0


def _in_ticks(costs: Costs, tick: float, *, exact: bool) -> Costs:
    def whole(seconds: float) -> Seconds:
        return Seconds(float(round(seconds / tick) if exact else math.ceil(seconds / tick)))

    edges = range(len(costs.latency))
    return Costs(
        forward=tuple(map(whole, costs.forward)),
        backward=tuple(map(whole, costs.backward)),
        input_grad=tuple(map(whole, costs.input_grad)),
        weight_grad=tuple(map(whole, costs.weight_grad)),
        latency=tuple(whole(costs.transfer(edge)) for edge in edges),
        bandwidth=(math.inf,) * len(edges),
        bytes=costs.bytes,
    )
