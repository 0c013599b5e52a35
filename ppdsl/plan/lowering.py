"""From a schedule to a message plan: sends, receives posted ahead, waits and lifetimes."""

from __future__ import annotations

from itertools import accumulate, chain

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.coded import Coded, coded_of
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import last_positions
from ppdsl.plan.messages import MessagePlan
from ppdsl.plan.numbered import NumberedRows, Numbering, Route
from ppdsl.plan.pausing import without_collection
from ppdsl.plan.steps import Direction
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.flow import carries_gradient
from ppdsl.schedule.table import Schedule
from ppdsl.units import Rank

__all__ = ["lower"]

_NEVER = 1 << 62


def lower(schedule: Schedule, graph: StageGraph, *, lookahead: int = 1) -> MessagePlan:
    """Return the plan that runs `schedule`, legal under rendezvous channels.

    On each rank, in this order around each computation: receives posted for computations to come, waits for what this
    one needs, the computation, sends of what it made, and what is let go after it::

        recv(..) recv(..) wait(..) 1F0 send(..) send(..) free(..)

    Each ordered pair of ranks is one channel: receives are posted in the order of the sends. When posting `lookahead`
    computations ahead would let ranks wait for each other, it is doubled until it does not; posting everything at the
    start always works for a schedule whose order and data flow have no circle.

    Args:
        schedule: Computations for each rank.
        graph: The stages and the values between them.
        lookahead: How many computations ahead of its wait a receive is posted, at least 1. More hides more latency and
            holds more memory.

    Raises:
        ScheduleError: The schedule breaks a law.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(2)
    >>> for step in lower(build_schedule("gpipe", graph, (0, 1), microbatches=1), graph).rows[1]:
    ...     print(step)
    recv(edge 0 F0 of stage 1)
    wait(edge 0 F0 of stage 1)
    1F0
    1B0
    send(edge 0 B0 of stage 1)
    free(1, 0)
    """
    with without_collection():
        coded = coded_of(schedule, graph)
        if not coded.flows:
            _refuse(schedule, graph)
        traffic = _Traffic(coded)
        longest = max(map(len, schedule.rows), default=0)
        ahead = max(1, lookahead)
        rows = traffic.rows(ahead)
        # With everything posted at the start, ranks that get stuck do so by their schedule.
        while not rows.runs and ahead < longest:
            ahead *= 2
            rows = traffic.rows(ahead)
        if not rows.runs:
            _refuse(schedule, graph)
        return MessagePlan(graph, schedule, rows, coded)


def _refuse(schedule: Schedule, graph: StageGraph) -> None:
    findings = verify_schedule(schedule, graph)
    if findings:
        raise ScheduleError(*findings)


class _Traffic:
    """All messages of a step, seen from both ends."""

    def __init__(self, coded: Coded) -> None:
        self.coded = coded
        routes = _routes(coded.schedule, coded.graph)
        self.numbering = Numbering(routes, len(coded.graph.stages), coded.microbatches)
        self.around = self._around()
        self.frees = last_positions(coded)
        self.posts = self._posts()

    def rows(self, ahead: int) -> NumberedRows:
        """Return the plan's rows with receives posted `ahead` computations before they are needed."""
        return NumberedRows(self.numbering, (self._row(rank, ahead) for rank in range(len(self.coded.jobs))))

    def _row(self, rank: int, ahead: int) -> list[int]:
        around, after = self.around, self.numbering.frees
        steps: list[int] = []
        (due, posts), (last, states) = self.posts[rank], self.frees[rank]
        last = [*last, _NEVER]
        posted = freed = 0
        for at, (job, m) in enumerate(zip(self.coded.jobs[rank], self.coded.places[rank], strict=True)):
            while due[posted] <= at + ahead:
                steps.append(posts[posted])
                posted += 1
            for first in around[job]:
                steps.append(first + m)  # noqa: PERF401 - a comprehension for every action takes longer
            while last[freed] == at:
                steps.append(after + states[freed])
                freed += 1
        return steps

    def _around(self) -> list[list[int]]:
        """Return for each job the steps that go with it: waits, the computation, sends; each for micro-batch 0."""
        numbers, count = self.numbering, self.coded.microbatches
        waits: list[list[int]] = [[] for _ in self.coded.gives]
        sends: list[list[int]] = [[] for _ in self.coded.gives]
        for place, route in enumerate(numbers.routes):
            edge = self.coded.graph.edges[route.edge]
            ends = edge.producer, route.consumer
            maker, user = ends if route.direction is Direction.FORWARD else ends[::-1]
            for kind in (0,) if route.direction is Direction.FORWARD else (1, 2):
                sends[4 * maker + kind].append(numbers.messages + place * count)
                waits[4 * user + kind].append(numbers.waits + place * count)
        computations = range(numbers.computations, numbers.frees, count)
        return [[*before, own, *after] for before, own, after in zip(waits, computations, sends, strict=True)]

    def _posts(self) -> list[tuple[list[int], list[int]]]:
        """Return for each rank the receives in the order to post them, and before which computation each is due.

        A message may be needed before an earlier one of its channel; then the earlier one is due with it, so that both
        ends keep one order.
        """
        channels: dict[tuple[int, int], list[tuple[list[int], list[int], range]]] = {}
        count = self.coded.microbatches
        for place, route in enumerate(self.numbering.routes):
            made, used = _moments(self.coded, route)
            messages = range(place * count, (place + 1) * count)
            channels.setdefault((route.source, route.target), []).append((made, used, messages))
        posts: list[list[int]] = [[] for _ in self.coded.jobs]
        due: list[list[int]] = [[] for _ in self.coded.jobs]
        for (_, target), parts in sorted(channels.items()):
            made, used, sent = (list(chain.from_iterable(part)) for part in zip(*parts, strict=True))
            order = sorted(range(len(made)), key=made.__getitem__)  # stable: by route where one action makes several
            posts[target] += [sent[at] for at in order]
            # Backwards: what is due before the last message, before the last but one, ...
            dates = [used[at] for at in reversed(order)]
            due[target] += reversed(list(accumulate(dates, min)))
        # Stable: a channel keeps its order.
        orders = [sorted(range(len(dates)), key=dates.__getitem__) for dates in due]
        return [
            ([*(dates[at] for at in order), _NEVER], [receives[at] for at in order])
            for dates, receives, order in zip(due, posts, orders, strict=True)
        ]


def _moments(coded: Coded, route: Route) -> tuple[list[int], list[int]]:
    """Return the positions at which a route's messages are made, and those at which they are used."""
    producer = coded.graph.edges[route.edge].producer
    if route.direction is Direction.FORWARD:
        return coded.positions_of(producer, ActionKind.FORWARD), coded.positions_of(route.consumer, ActionKind.FORWARD)
    return coded.gradient_positions[route.consumer], coded.gradient_positions[producer]


def _routes(schedule: Schedule, graph: StageGraph) -> tuple[Route, ...]:
    """Return all routes between ranks, by edge, then consumer."""
    placement, backward = schedule.placement, not schedule.forward_only
    routes: list[Route] = []
    for edge in graph.edges:
        source, size = Rank(placement[edge.producer]), edge.bytes
        for consumer in edge.consumers:
            target = Rank(placement[consumer])
            if source == target:
                continue
            routes.append(Route(edge.index, consumer, Direction.FORWARD, source, target, size))
            if backward and carries_gradient(graph, edge, consumer):
                routes.append(Route(edge.index, consumer, Direction.BACKWARD, target, source, size))
    return tuple(routes)
