"""From a schedule to a message plan: sends, receives posted ahead, waits and lifetimes."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import Edge, StageGraph
from ppdsl.plan.coded import coded_of
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import last_uses
from ppdsl.plan.messages import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Step, Wait
from ppdsl.plan.pausing import without_collection
from ppdsl.plan.rendezvous import meets
from ppdsl.schedule.flow import carries_gradient
from ppdsl.schedule.table import Schedule
from ppdsl.units import Bytes, Microbatch, Rank

__all__ = ["lower"]


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
    findings = verify_schedule(schedule, graph)
    if findings:
        raise ScheduleError(*findings)
    with without_collection():
        traffic = _Traffic(schedule, graph)
        longest = max(map(len, schedule.rows), default=0)
        ahead = max(1, lookahead)
        # With everything posted at the start a verified schedule cannot get stuck, so this ends.
        while ahead < longest and not traffic.can_run(ahead):
            ahead *= 2
        return MessagePlan(graph, schedule, traffic.rows(ahead))


@dataclass(frozen=True, slots=True)
class _Route:
    """What one edge carries to one consumer in one direction: a message for each micro-batch."""

    edge: Edge
    consumer: int
    direction: Direction
    source: int
    target: int

    @property
    def maker(self) -> int:
        """The stage that makes what is sent."""
        return self.edge.producer if self.direction is Direction.FORWARD else self.consumer

    @property
    def user(self) -> int:
        """The stage that needs it."""
        return self.consumer if self.direction is Direction.FORWARD else self.edge.producer

    def messages(self, microbatches: int) -> list[Message]:
        """Return the message of each micro-batch."""
        edge, consumer, direction, size = self.edge.index, self.consumer, self.direction, Bytes(self.edge.bytes)
        source, target = Rank(self.source), Rank(self.target)
        return [Message(edge, consumer, Microbatch(m), direction, source, target, size) for m in range(microbatches)]


class _Traffic:
    """All messages of a step, seen from both ends; message `route * microbatches + m` is a whole number here."""

    def __init__(self, schedule: Schedule, graph: StageGraph) -> None:
        self.schedule = schedule
        self.coded = coded_of(schedule, graph)
        self.routes = _routes(schedule, graph)
        self.sent: list[tuple[int, ...]] = [()] * len(self.coded.gives)  # by job, the places of its routes
        self.needed: list[tuple[int, ...]] = [()] * len(self.coded.gives)
        count = schedule.microbatches
        for number, route in enumerate(self.routes):
            for kind in (0,) if route.direction is Direction.FORWARD else (1, 2):
                self.sent[4 * route.maker + kind] += (number * count,)
                self.needed[4 * route.user + kind] += (number * count,)
        self.frees = last_uses(schedule, graph)
        self.channels = self._channels()
        self.posts: tuple[int, list[dict[int, list[int]]]] = (0, [])  # the last look-ahead, and its receives

    def can_run(self, ahead: int) -> bool:
        """Tell whether the plan with this look-ahead runs over channels without capacity."""
        rows = []
        posts = self._posts(ahead)
        for rank, (jobs, places) in enumerate(zip(self.coded.jobs, self.coded.places, strict=True)):
            steps: list[int] = []  # 3 * message, and 0 to post it, 1 to wait for it, 2 to send it
            for at, (job, m) in enumerate(zip(jobs, places, strict=True)):
                if at in posts[rank]:
                    steps += [3 * message for message in posts[rank][at]]
                if self.needed[job]:
                    steps += [3 * (route + m) + 1 for route in self.needed[job]]
                if self.sent[job]:
                    steps += [3 * (route + m) + 2 for route in self.sent[job]]
            rows.append(steps)
        return meets(rows, len(self.routes) * self.schedule.microbatches)

    def rows(self, ahead: int) -> tuple[tuple[Step, ...], ...]:
        """Return the plan's rows with receives posted `ahead` computations before they are needed."""
        messages = [message for route in self.routes for message in route.messages(self.schedule.microbatches)]
        posts = self._posts(ahead)
        rows = []
        for rank, actions in enumerate(self.schedule.rows):
            steps: list[Step] = []
            post, free = posts[rank], self.frees[rank]
            coded = zip(actions, self.coded.jobs[rank], self.coded.places[rank], strict=True)
            for at, (action, job, m) in enumerate(coded):
                if at in post:
                    steps += [Recv(messages[message]) for message in post[at]]
                steps += [Wait(messages[route + m]) for route in self.needed[job]]
                steps.append(Compute(action))
                steps += [Send(messages[route + m]) for route in self.sent[job]]
                if at in free:
                    steps += [Free(stage, Microbatch(k)) for stage, k in free[at]]
            rows.append(tuple(steps))
        return tuple(rows)

    def _channels(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return for each ordered pair of ranks the target, and in the order of the sends message and use."""
        count = self.schedule.microbatches
        used = [[0] * count for _ in self.routes]
        for jobs, places in zip(self.coded.jobs, self.coded.places, strict=True):
            for at, (job, m) in enumerate(zip(jobs, places, strict=True)):
                for first in self.needed[job]:
                    used[first // count][m] = at
        channels: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for jobs, places in zip(self.coded.jobs, self.coded.places, strict=True):
            for job, m in zip(jobs, places, strict=True):
                for first in self.sent[job]:
                    number = first // count
                    route = self.routes[number]
                    channel = channels.setdefault((route.source, route.target), [])
                    channel.append((first + m, used[number][m]))
        return [(target, channels[source, target]) for source, target in sorted(channels)]

    def _posts(self, ahead: int) -> list[dict[int, list[int]]]:
        """Return for each rank and position the receives to post before it.

        A message may be needed before an earlier one of its channel; then the earlier one is posted with it, so that
        both ends keep one order.
        """
        if self.posts[0] == ahead:
            return self.posts[1]
        posts: list[list[tuple[int, int, int]]] = [[] for _ in self.schedule.rows]
        for target, channel in self.channels:
            earliest = len(self.schedule.rows[target])
            timed: list[tuple[int, int, int]] = []
            for message, needed in reversed(channel):
                if needed < earliest:
                    earliest = needed
                timed.append((earliest - ahead if earliest > ahead else 0, earliest, message))
            timed.reverse()
            posts[target] += timed
        by_position: list[dict[int, list[int]]] = []
        for row_posts in posts:
            row_posts.sort(key=itemgetter(0, 1))  # stable: a channel keeps its order
            grouped: dict[int, list[int]] = {}
            for at, _, message in row_posts:
                if at in grouped:
                    grouped[at].append(message)
                else:
                    grouped[at] = [message]
            by_position.append(grouped)
        self.posts = ahead, by_position
        return by_position


def _routes(schedule: Schedule, graph: StageGraph) -> list[_Route]:
    """Return all routes between ranks, by edge, then consumer."""
    placement, backward = schedule.placement, not schedule.forward_only
    routes = []
    for edge in graph.edges:
        for consumer in edge.consumers:
            source, target = placement[edge.producer], placement[consumer]
            if source == target:
                continue
            routes.append(_Route(edge, consumer, Direction.FORWARD, source, target))
            if backward and carries_gradient(graph, edge, consumer):
                routes.append(_Route(edge, consumer, Direction.BACKWARD, target, source))
    return routes
