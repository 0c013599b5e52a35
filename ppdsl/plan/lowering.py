"""From a schedule to a message plan: sends, receives posted ahead, waits and lifetimes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppdsl.diagnostics import ScheduleError
from ppdsl.graph.ir import Edge, StageGraph
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import last_uses
from ppdsl.plan.messages import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Step, Wait
from ppdsl.plan.rendezvous import rendezvous
from ppdsl.schedule.action import Action, ActionKind, action_of
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
    traffic = _Traffic.of(schedule, graph)
    longest = max(map(len, schedule.rows), default=0)
    ahead = max(1, lookahead)
    while True:
        plan = MessagePlan(graph, schedule, traffic.rows(ahead))
        # With everything posted at the start a verified schedule cannot get stuck, so this ends.
        if ahead >= longest or not rendezvous(plan).blocked:
            return plan
        ahead *= 2


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message and the position, in its target's schedule row, of the computation that needs it."""

    message: Message
    position: int


@dataclass(frozen=True)
class _Traffic:
    """All messages of a step, seen from both ends."""

    schedule: Schedule
    sends: tuple[tuple[tuple[Message, ...], ...], ...]  # [rank][position], right after the computation
    waits: tuple[tuple[tuple[Message, ...], ...], ...]  # [rank][position], right before the computation
    channels: tuple[tuple[_Arrival, ...], ...]  # one for each ordered pair of ranks, in the order of the sends
    frees: tuple[dict[int, list[tuple[int, int]]], ...]  # [rank][position] -> (stage, micro-batch)

    @classmethod
    def of(cls, schedule: Schedule, graph: StageGraph) -> _Traffic:
        """Collect what every computation sends and needs."""
        routes = _Routes(graph, schedule.placement, backward=not schedule.forward_only)
        position = {action: at for row in schedule.rows for at, action in enumerate(row)}
        channels: dict[tuple[int, int], list[_Arrival]] = {}
        incoming: list[dict[int, list[Message]]] = [{} for _ in schedule.rows]
        sends = []
        for row in schedule.rows:
            sent_by_row = []
            for action in row:
                sent = tuple(routes.sent_after(action))
                for message in sent:
                    needed = position[_user(message, graph, position)]
                    incoming[message.target].setdefault(needed, []).append(message)
                    channels.setdefault((message.source, message.target), []).append(_Arrival(message, needed))
                sent_by_row.append(sent)
            sends.append(tuple(sent_by_row))
        waits = tuple(
            tuple(tuple(sorted(incoming[rank].get(at, ()), key=_edge_order)) for at in range(len(row)))
            for rank, row in enumerate(schedule.rows)
        )
        ordered = tuple(tuple(channels[pair]) for pair in sorted(channels))
        return cls(schedule, tuple(sends), waits, ordered, last_uses(schedule, graph))

    def rows(self, ahead: int) -> tuple[tuple[Step, ...], ...]:
        """Return the plan's rows with receives posted `ahead` computations before they are needed."""
        posts = self._posts(ahead)
        rows = []
        for rank, actions in enumerate(self.schedule.rows):
            steps: list[Step] = []
            for at, action in enumerate(actions):
                steps += [Recv(message) for message in posts[rank].get(at, ())]
                steps += [Wait(message) for message in self.waits[rank][at]]
                steps.append(Compute(action))
                steps += [Send(message) for message in self.sends[rank][at]]
                steps += [Free(stage, Microbatch(m)) for stage, m in self.frees[rank].get(at, ())]
            rows.append(tuple(steps))
        return tuple(rows)

    def _posts(self, ahead: int) -> list[dict[int, list[Message]]]:
        """Return for each rank and position the receives to post before it.

        A message may be needed before an earlier one of its channel; then the earlier one is posted with it, so that
        both ends keep one order.
        """
        posts: list[list[tuple[int, int, Message]]] = [[] for _ in self.schedule.rows]
        for channel in self.channels:
            earliest = len(self.schedule.rows[channel[0].message.target])
            timed: list[tuple[int, int, Message]] = []
            for arrival in reversed(channel):
                earliest = min(earliest, arrival.position)
                timed.append((max(0, earliest - ahead), earliest, arrival.message))
            posts[channel[0].message.target] += reversed(timed)
        by_position: list[dict[int, list[Message]]] = []
        for row_posts in posts:
            row_posts.sort(key=lambda post: post[:2])  # stable: a channel keeps its order
            grouped: dict[int, list[Message]] = {}
            for at, _, message in row_posts:
                grouped.setdefault(at, []).append(message)
            by_position.append(grouped)
        return by_position


class _Routes:
    """For each stage the edges it sends to other ranks, forward and backward."""

    def __init__(self, graph: StageGraph, placement: Sequence[int], *, backward: bool) -> None:
        self.placement = placement
        self.values: list[list[tuple[Edge, int]]] = [[] for _ in graph.stages]
        self.gradients: list[list[tuple[Edge, int]]] = [[] for _ in graph.stages]
        for edge in graph.edges:
            for consumer in edge.consumers:
                if placement[consumer] == placement[edge.producer]:
                    continue
                self.values[edge.producer].append((edge, consumer))
                if backward and carries_gradient(graph, edge, consumer):
                    self.gradients[consumer].append((edge, consumer))

    def sent_after(self, action: Action) -> Iterator[Message]:
        """Yield the messages to send after `action`, by edge, then consumer."""
        match action.kind:
            case ActionKind.FORWARD:
                for edge, consumer in self.values[action.stage]:
                    source, target = self.placement[edge.producer], self.placement[consumer]
                    yield _message(edge, consumer, action.microbatch, Direction.FORWARD, source, target)
            case ActionKind.BACKWARD | ActionKind.INPUT_GRAD:
                for edge, consumer in self.gradients[action.stage]:
                    source, target = self.placement[consumer], self.placement[edge.producer]
                    yield _message(edge, consumer, action.microbatch, Direction.BACKWARD, source, target)
            case ActionKind.WEIGHT_GRAD:
                return


def _message(
    edge: Edge, consumer: int, microbatch: Microbatch, direction: Direction, source: int, target: int
) -> Message:
    return Message(edge.index, consumer, microbatch, direction, Rank(source), Rank(target), Bytes(edge.bytes))


def _user(message: Message, graph: StageGraph, position: dict[Action, int]) -> Action:
    """Return the computation that needs the message."""
    if message.direction is Direction.FORWARD:
        return action_of(message.consumer, ActionKind.FORWARD, message.microbatch)
    producer = graph.edges[message.edge].producer
    whole = action_of(producer, ActionKind.BACKWARD, message.microbatch)
    return whole if whole in position else action_of(producer, ActionKind.INPUT_GRAD, message.microbatch)


def _edge_order(message: Message) -> tuple[int, int]:
    return message.edge, message.consumer
