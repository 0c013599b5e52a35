"""What a schedule could reach on a machine whose ranks share cores: its simulated length, and the least there is."""

from __future__ import annotations

from collections import deque

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.flow import Made, flow_of
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs

__all__ = ["floor", "makespan"]


def floor(schedule: Schedule, costs: Costs, cores: int) -> float:
    """Return the seconds of a step without a bubble and without messages.

    Args:
        schedule: All computations.
        costs: Their seconds.
        cores: How many of them run at full speed at once.
    """
    work = [sum(costs.of(action) for action in row) for row in schedule.rows]
    return max(max(work), sum(work) / cores)


def makespan(schedule: Schedule, graph: StageGraph, costs: Costs, cores: int, latency: float) -> float:
    """Return the seconds of a step of a perfect runtime: ranks wait for what they need, and share the cores.

    Args:
        schedule: Each rank's computations, in its order.
        graph: The stages.
        costs: Seconds of a computation on a core of its own.
        cores: When more ranks compute, they are slowed down alike.
        latency: Seconds of a message between ranks.
    """
    flow = flow_of(graph)
    todo = [deque(row) for row in schedule.rows]
    made: dict[Made, tuple[float, int]] = {}
    running: dict[int, tuple[Action, float]] = {}
    now = 0.0

    def ready_at(rank: int) -> float | None:
        found = [made.get(need) for need in flow.needs(todo[rank][0])]
        if any(entry is None for entry in found):
            return None
        times = [time + (latency if owner != rank else 0.0) for time, owner in filter(None, found)]
        return max(times, default=0.0)

    while running or any(todo):
        wakes = []
        for rank, row in enumerate(todo):
            if rank in running or not row:
                continue
            ready = ready_at(rank)
            if ready is not None and ready <= now:
                action = row.popleft()
                running[rank] = (action, costs.of(action))
            elif ready is not None:
                wakes.append(ready)
        if not running:
            now = min(wakes)
            continue
        speed = min(1.0, cores / len(running))
        step = min(left for _, left in running.values()) / speed
        if wakes:
            step = min(step, min(wakes) - now)
        now += step
        for rank, (action, left) in list(running.items()):
            if left - step * speed > 1e-12:
                running[rank] = (action, left - step * speed)
                continue
            del running[rank]
            result = flow.makes(action)
            if result is not None:
                made[result] = (now, rank)
    return now
