"""What lowering does, written for reading: one action, one message after the other, on objects only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ppdsl.graph.ir import StageGraph
from ppdsl.plan import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Step, Wait, rendezvous
from ppdsl.schedule import Action, ActionKind, Schedule, action_of, carries_gradient
from ppdsl.units import Microbatch, Rank

GRADIENTS = ActionKind.BACKWARD, ActionKind.INPUT_GRAD


def plain_lowering(schedule: Schedule, graph: StageGraph, ahead: int = 1) -> MessagePlan:
    """Lower a schedule that keeps its laws."""
    while True:
        rows = tuple(plain_row(schedule, graph, rank, ahead) for rank in range(schedule.ranks))
        plan = MessagePlan(graph, schedule, rows)
        if not rendezvous(plan).blocked:
            return plan
        ahead *= 2


def plain_row(schedule: Schedule, graph: StageGraph, rank: int, ahead: int) -> tuple[Step, ...]:
    messages = list(messages_of(schedule, graph))
    posts = receives(schedule, graph, rank)
    frees = plain_last_uses(schedule, graph)[rank]
    steps: list[Step] = []
    for at, action in enumerate(schedule.rows[rank]):
        steps += [Recv(message) for due, message in posts if max(0, due - ahead) == at]
        steps += [Wait(message) for message in messages if action in users(graph, message)]
        steps.append(Compute(action))
        steps += [Send(message) for message in messages if action in makers(graph, message)]
        steps += [Free(stage, Microbatch(m)) for stage, m in frees.get(at, [])]
    return tuple(steps)


def messages_of(schedule: Schedule, graph: StageGraph) -> Iterator[Message]:
    for edge in graph.edges:
        for consumer in edge.consumers:
            source, target = (Rank(schedule.placement[stage]) for stage in (edge.producer, consumer))
            for m in map(Microbatch, range(schedule.microbatches if source != target else 0)):
                yield Message(edge.index, consumer, m, Direction.FORWARD, source, target, edge.bytes)
            if carries_gradient(graph, edge, consumer) and not schedule.forward_only:
                for m in map(Microbatch, range(schedule.microbatches if source != target else 0)):
                    yield Message(edge.index, consumer, m, Direction.BACKWARD, target, source, edge.bytes)


def makers(graph: StageGraph, message: Message) -> list[Action]:
    return actions_of(graph.edges[message.edge].producer, message.consumer, message)


def users(graph: StageGraph, message: Message) -> list[Action]:
    return actions_of(message.consumer, graph.edges[message.edge].producer, message)


def actions_of(forward: int, backward: int, message: Message) -> list[Action]:
    ahead = message.direction is Direction.FORWARD
    kinds, stage = ((ActionKind.FORWARD,), forward) if ahead else (GRADIENTS, backward)
    return [action_of(stage, kind, message.microbatch) for kind in kinds]


def receives(schedule: Schedule, graph: StageGraph, rank: int) -> list[tuple[int, Message]]:
    """Return a rank's receives in order, each with the computation before which it is due."""
    messages = list(messages_of(schedule, graph))
    found: list[tuple[int, Message]] = []
    for source, row in enumerate(schedule.rows):
        channel = [
            x for a in row for x in messages if a in makers(graph, x) and x.target == rank and x.source == source
        ]
        needs = [next(at for at, a in enumerate(schedule.rows[rank]) if a in users(graph, x)) for x in channel]
        # No later one of the channel is needed earlier: both ends keep one order.
        found += [(min(needs[place:]), message) for place, message in enumerate(channel)]
    return sorted(found, key=lambda receive: receive[0])


def plain_last_uses(
    schedule: Schedule, graph: StageGraph, *, until: ActionKind = ActionKind.WEIGHT_GRAD
) -> tuple[dict[int, list[tuple[int, int]]], ...]:
    rows = []
    for rank, row in enumerate(schedule.rows):
        last: dict[tuple[int, int], int] = {}
        for at, action in enumerate(row):
            if action.kind is ActionKind.WEIGHT_GRAD and until is ActionKind.INPUT_GRAD:
                continue
            used: list[int] = [action.stage]
            if action.kind is ActionKind.FORWARD:
                used += [edge.producer for edge in graph.edges if action.stage in edge.consumers]
            for stage in used:
                if schedule.placement[stage] == rank:
                    last[stage, action.microbatch] = at
        grouped: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for state, at in sorted(last.items(), key=lambda item: (item[1], item[0])):
            grouped[at].append(state)
        rows.append(dict(grouped))
    return tuple(rows)
