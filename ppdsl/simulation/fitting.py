"""Costs that explain a measured step: seconds of computations, of messages, and of what happens in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.flow import Made, flow_of
from ppdsl.simulation.costs import Costs, measured_costs
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Seconds

__all__ = ["fitted_costs"]


def fitted_costs(timeline: Timeline, graph: StageGraph) -> Costs:
    """Return costs with which `simulate` comes near to a measured step, and to the next one.

    A rank that waited for a message shows how long the message took; a rank that had everything at hand shows how long
    it is busy between two computations, with the runtime's own work. That time is counted with the later computation.
    Medians of what was seen count, for the messages of each edge and for the computations of each kind of each stage.

    Args:
        timeline: A measured step.
        graph: The stages and edges it ran.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> from ppdsl.simulation.simulator import simulate
    >>> graph = chain_graph(2)
    >>> plan = lower(build_schedule("1f1b", graph, (0, 1), microbatches=4), graph)
    >>> seen = simulate(plan, uniform_costs(graph, latency=0.5))
    >>> fitted_costs(seen, graph).latency
    (0.5,)
    """
    starts = list(_starts(timeline, graph))
    waited: dict[Made, list[float]] = {}
    spare: dict[Made, list[float]] = {}
    for start in starts:
        if start.last is not None:
            key = start.last._replace(microbatch=0)
            (waited if start.arrived > start.free else spare).setdefault(key, []).append(start.at - start.arrived)
    latency = [_latency(edge.producer, edge.consumers, waited, spare) for edge in graph.edges]
    took: dict[Made, float] = {}
    for edge, seconds in zip(graph.edges, latency, strict=True):
        for key in _messages(edge.producer, edge.consumers):
            took[key] = max(took.get(key, 0.0), seconds)
    own: dict[tuple[int, str], list[float]] = {}
    for start in starts:
        late = 0.0 if start.last is None else took.get(start.last._replace(microbatch=0), 0.0)
        if start.free > float("-inf") and start.arrived + late <= start.free:
            action = start.event.action
            own.setdefault((action.stage, action.kind.value), []).append(start.at - start.free)
    between = {key: median(values) for key, values in own.items()}

    def longer(seconds: tuple[Seconds, ...], kind: str) -> tuple[Seconds, ...]:
        return tuple(Seconds(s + between.get((stage, kind), 0.0)) for stage, s in enumerate(seconds))

    costs = measured_costs(timeline, graph)
    return replace(
        costs,
        forward=longer(costs.forward, "F"),
        backward=longer(costs.backward, "B"),
        input_grad=longer(costs.input_grad, "I"),
        weight_grad=longer(costs.weight_grad, "W"),
        latency=tuple(map(Seconds, latency)),
    )


class _Start:
    """What a computation waited for: its rank, and the last message it needed."""

    def __init__(self, event: Event, free: float, arrived: float, last: Made | None) -> None:
        self.event, self.at = event, event.start
        self.free = free
        """When its rank had ended the computation before; minus infinity for a rank's first one."""
        self.arrived = arrived
        """When the last value from another rank was made; minus infinity without one."""
        self.last = last
        """That value."""


def _starts(timeline: Timeline, graph: StageGraph) -> Iterable[_Start]:
    flow = flow_of(graph)
    made = {made: event for event in timeline.events if (made := flow.makes(event.action)) is not None}
    free = [float("-inf")] * timeline.ranks
    for event in sorted(timeline.events, key=lambda e: e.start):
        arrived, last = float("-inf"), None
        for need in flow.needs(event.action):
            source = made.get(need)
            if source is not None and source.rank != event.rank and source.end > arrived:
                arrived, last = source.end, need
        yield _Start(event, free[event.rank], arrived, last)
        free[event.rank] = event.end


def _messages(producer: int, consumers: tuple[int, ...]) -> list[Made]:
    """Return what travels along an edge: the value, and each consumer's gradient of it."""
    return [Made(False, producer, 0), *(Made(True, consumer, 0) for consumer in consumers)]


def _latency(
    producer: int, consumers: tuple[int, ...], waited: dict[Made, list[float]], spare: dict[Made, list[float]]
) -> float:
    """Return what a message of an edge takes: the median of those that were waited for.

    A message that nobody waited for took at most what was seen between its making and its use.
    """
    keys = _messages(producer, consumers)
    seen = [seconds for key in keys for seconds in waited.get(key, ())]
    if seen:
        return median(seen)
    return min((seconds for key in keys for seconds in spare.get(key, ())), default=0.0)
