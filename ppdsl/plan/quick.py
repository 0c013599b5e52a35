"""One pass that tells whether a plan keeps its laws, for the usual case that it does.

It proves the same as the laws in `verify`, from the graph's edges and the placement alone; where it says no, these look
again for what exactly is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.lifetimes import last_uses
from ppdsl.plan.messages import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Wait
from ppdsl.plan.rendezvous import meets
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.flow import carries_gradient
from ppdsl.schedule.table import Schedule

__all__ = ["plan_is_sound"]

_MEETS = {Recv: 0, Wait: 1, Send: 2}


def plan_is_sound(plan: MessagePlan) -> bool:
    """Tell whether a plan, whose schedule keeps its laws, keeps those of plans; false also when it is not certain.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> plan_is_sound(lower(build_schedule("1f1b", chain_graph(4), (0, 1, 0, 1), microbatches=8), chain_graph(4)))
    True
    """
    if len(plan.rows) != plan.schedule.ranks:
        return False
    check = _Check(plan)
    return all(map(check.row, range(len(plan.rows)))) and check.complete()


@dataclass(frozen=True, slots=True)
class _Expected:
    """What must travel between two stages; `made` and `used` are places among what actions make."""

    number: int
    source: int
    target: int
    bytes: int
    made: int
    used: int


class _Check:
    def __init__(self, plan: MessagePlan) -> None:
        self.plan = plan
        self.count = plan.schedule.microbatches
        self.expected = _expected(plan.schedule, plan.graph)
        self.routes = list(self.expected.values())
        size = len(self.routes) * self.count
        self.sent, self.posted, self.awaited = bytearray(size), bytearray(size), bytearray(size)
        self.done = bytearray(2 * len(plan.graph.stages) * self.count)
        self.numbers: dict[int, int] = {}  # by identity: a message is looked at once, not at each of its steps
        self.uses = last_uses(plan.schedule, plan.graph)
        self.rows: list[list[int]] = []
        # Routes between the same two ranks share a channel, and its list.
        sends: dict[tuple[int, int], list[int]] = {}
        posts: dict[tuple[int, int], list[int]] = {}
        self.sends = [sends.setdefault((route.source, route.target), []) for route in self.routes]
        self.posts = [posts.setdefault((route.source, route.target), []) for route in self.routes]

    def row(self, rank: int) -> bool:
        """Tell whether a rank's steps are the right ones, each in its place."""
        actions, numbers = self.plan.schedule.rows[rank], self.numbers
        last = {state: at for at, states in self.uses[rank].items() for state in states}
        messages: list[int] = []
        computed = 0
        for step in self.plan.rows[rank]:
            if isinstance(step, Compute):
                if computed == len(actions) or step.action != actions[computed]:
                    return False
                computed += 1
                self._run(step.action)
            elif isinstance(step, Free):
                if last.pop((step.stage, int(step.microbatch)), computed) >= computed:
                    return False
            else:
                number = numbers.get(id(step.message), -1)
                if number < 0:
                    number = numbers[id(step.message)] = self._number(step.message)
                if number < 0 or not self._in_place(step, number, rank):
                    return False
                messages.append(3 * number + _MEETS[type(step)])
        self.rows.append(messages)
        return computed == len(actions) and not last

    def _run(self, action: Action) -> None:
        kind = action.kind
        if kind is not ActionKind.WEIGHT_GRAD:
            gradient = kind is not ActionKind.FORWARD
            self.done[(2 * action.stage + gradient) * self.count + action.microbatch] = 1

    def complete(self) -> bool:
        """Tell whether nothing is missing, channels keep their order and no rank waits for ever."""
        if not (all(self.sent) and all(self.posted) and all(self.awaited)):
            return False
        return self.sends == self.posts and meets(self.rows, len(self.sent))

    def _number(self, message: Message) -> int:
        route = self.expected.get((message.edge, message.consumer, message.direction))
        if route is None or not 0 <= message.microbatch < self.count:
            return -1
        if (message.source, message.target, message.bytes) != (route.source, route.target, route.bytes):
            return -1
        return route.number * self.count + message.microbatch

    def _in_place(self, step: Send | Recv | Wait, number: int, rank: int) -> bool:
        """Tell whether a message is sent, posted or awaited by the right rank, for the first time and in time."""
        place, m = divmod(number, self.count)
        route = self.routes[place]
        if isinstance(step, Recv):
            right = rank == route.target and not self.posted[number]
            self.posted[number] = 1
            self.posts[place].append(number)
        elif isinstance(step, Wait):
            ready = self.posted[number] and not self.done[route.used + m]
            right = bool(rank == route.target and not self.awaited[number] and ready)
            self.awaited[number] = 1
        else:
            right = rank == route.source and not self.sent[number] and self.done[route.made + m] > 0
            self.sent[number] = 1
            self.sends[place].append(number)
        return right


def _expected(schedule: Schedule, graph: StageGraph) -> dict[tuple[int, int, Direction], _Expected]:
    placement, count = schedule.placement, schedule.microbatches
    found: dict[tuple[int, int, Direction], _Expected] = {}
    for edge in graph.edges:
        for consumer in edge.consumers:
            ends = placement[edge.producer], placement[consumer]
            if ends[0] == ends[1]:
                continue
            made, used = 2 * edge.producer * count, 2 * consumer * count
            key = (edge.index, consumer, Direction.FORWARD)
            found[key] = _Expected(len(found), *ends, edge.bytes, made, used)
            if not schedule.forward_only and carries_gradient(graph, edge, consumer):
                key = (edge.index, consumer, Direction.BACKWARD)
                found[key] = _Expected(len(found), *ends[::-1], edge.bytes, used + count, made + count)
    return found
