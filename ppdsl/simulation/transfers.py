"""Messages of a step in time: when each leaves one rank and arrives at another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind, action_of
from ppdsl.schedule.flow import carries_gradient
from ppdsl.simulation.costs import Costs
from ppdsl.timeline import Event, Timeline
from ppdsl.units import Rank, Seconds

__all__ = ["Transfer", "transfers"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between two ranks.

    Attributes:
        source: Rank that sends.
        target: Rank that receives.
        made: The computation that made the value or gradient.
        used: The computation that needs it.
        start: When it leaves, in seconds.
        end: When it has arrived, in seconds.
    """

    source: Rank
    target: Rank
    made: Action
    used: Action
    start: Seconds
    end: Seconds


def transfers(timeline: Timeline, graph: StageGraph, costs: Costs) -> tuple[Transfer, ...]:
    """Return the messages between the ranks of a timeline, sorted by start.

    A message leaves when it is made and takes its edge's transfer time. Values that stay on a rank are no messages.

    Args:
        timeline: When each computation runs.
        graph: The stages and the values between them.
        costs: Give the transfer times.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> from ppdsl.simulation.costs import uniform_costs
    >>> from ppdsl.simulation.simulator import simulate_schedule
    >>> graph = chain_graph(2)
    >>> costs = uniform_costs(graph, latency=0.5)
    >>> timeline = simulate_schedule(build_schedule("1f1b", graph, (0, 1), microbatches=1), graph, costs)
    >>> [(str(t.made), str(t.used), t.start, t.end) for t in transfers(timeline, graph, costs)]
    [('0F0', '1F0', 1.0, 1.5), ('1B0', '0B0', 4.5, 5.0)]
    """
    events = {event.action: event for event in timeline.events}
    found = sorted(_found(graph, costs, events), key=lambda t: (t.start, t.source, t.target, t.end))
    return tuple(found)


def _found(graph: StageGraph, costs: Costs, events: dict[Action, Event]) -> Iterator[Transfer]:
    by_stage: dict[int, list[Event]] = {}
    for event in events.values():
        by_stage.setdefault(event.action.stage, []).append(event)
    for edge in graph.edges:
        seconds = costs.transfer(edge.index)
        for consumer in edge.consumers:
            backward = carries_gradient(graph, edge, consumer)
            for event in by_stage.get(edge.producer, ()):
                if event.action.kind is ActionKind.FORWARD:
                    used = events.get(action_of(consumer, ActionKind.FORWARD, event.action.microbatch))
                    yield from _between(event, used, seconds)
            for event in by_stage.get(consumer, ()) if backward else ():
                if event.action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
                    yield from _between(event, _gradient_of(edge.producer, event.action, events), seconds)


def _gradient_of(stage: int, action: Action, events: dict[Action, Event]) -> Event | None:
    kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
    return next((e for kind in kinds if (e := events.get(action_of(stage, kind, action.microbatch)))), None)


def _between(made: Event, used: Event | None, seconds: float) -> Iterator[Transfer]:
    if used is not None and used.rank != made.rank:
        arrival = Seconds(made.end + seconds)
        yield Transfer(Rank(made.rank), Rank(used.rank), made.action, used.action, made.end, arrival)
