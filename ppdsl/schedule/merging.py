"""Several stages on one rank: merge the stages' own orders into one order for each rank.

Each stage keeps its own order; a rank that is free takes, among the next actions of its stages that can run, the most
urgent one. Stage orders and data flow together have no circle, so there is always an action that can run, and its
rank is free to take it: whatever the priorities are, the merge cannot get stuck.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ppdsl.schedule.action import Action, ActionKind, action_of
from ppdsl.schedule.flow import Flow, Made

__all__ = ["backward_order", "forward_order", "merge_orders"]

_TICKS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.INPUT_GRAD: 1, ActionKind.WEIGHT_GRAD: 1}
_URGENCY = {ActionKind.BACKWARD: 0, ActionKind.INPUT_GRAD: 0, ActionKind.FORWARD: 1, ActionKind.WEIGHT_GRAD: 2}


def forward_order(stage: int, microbatches: int) -> tuple[Action, ...]:
    """Return a stage's forwards, ascending."""
    return tuple(action_of(stage, ActionKind.FORWARD, m) for m in range(microbatches))


def backward_order(stage: int, microbatches: int) -> tuple[Action, ...]:
    """Return a stage's backwards, ascending."""
    return tuple(action_of(stage, ActionKind.BACKWARD, m) for m in range(microbatches))


def merge_orders(
    orders: Sequence[Sequence[Action]],
    flow: Flow,
    placement: Sequence[int],
    ranks: int,
    *,
    forwards_done: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Return for each rank one order of all its stages' actions.

    Backwards come first, then forwards, then weight gradients, each by micro-batch, then by the longest way still to
    go. Equal stages are assumed (forward 1, backward 2). A backward of a stage without backward takes no time and no
    place in the row: it only says when a micro-batch leaves the stage, so that orders can limit how many are under way.

    Args:
        orders: For each stage its actions in the order it must run them.
        flow: The data flow between the stages.
        placement: For each stage its rank.
        ranks: Number of ranks.
        forwards_done: Whether all forwards have run before.

    >>> from ppdsl.graph.shapes import shape_graph
    >>> from ppdsl.schedule.flow import flow_of
    >>> flow = flow_of(shape_graph(3, [(0, (1,)), (1, (2,))], keys=(0, 1, 0)))
    >>> for row in merge_orders([forward_order(s, 3) for s in range(3)], flow, (0, 1, 0), 2):
    ...     print(*row)
    0F0 0F1 2F0 2F1 0F2 2F2
    1F0 1F1 1F2
    """
    if len(set(placement)) == len(placement):
        return _alone(orders, flow, placement, ranks)
    state = _Merge(orders, flow, placement, ranks, forwards_done=forwards_done)
    return state.run()


def _alone(
    orders: Sequence[Sequence[Action]], flow: Flow, placement: Sequence[int], ranks: int
) -> tuple[tuple[Action, ...], ...]:
    """With one stage on each rank there is nothing to merge."""
    rows: list[tuple[Action, ...]] = [()] * ranks
    for order, rank, backward in zip(orders, placement, flow.has_backward, strict=True):
        forwards = order if backward else [action for action in order if action.kind is ActionKind.FORWARD]
        rows[rank] = tuple(forwards)
    return tuple(rows)


@dataclass(slots=True)
class _Pick:
    """The next action of a stage, waiting for `missing` things."""

    action: Action
    missing: int


class _Merge:
    """The event queue: ticks, what exists, what waits for what, what could start on each rank."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        flow: Flow,
        placement: Sequence[int],
        ranks: int,
        *,
        forwards_done: bool,
    ) -> None:
        self.orders = orders
        self.flow = flow
        self.placement = placement
        self.forwards_done = forwards_done
        # A stage without backward lets go of a micro-batch when all that use its value have let go of it.
        users: list[list[int]] = [[] for _ in orders]
        for stage, producers in enumerate(flow.values_from):
            for producer in producers:
                users[producer].append(stage)
        self.users = users
        self.position = [0] * len(orders)
        self.existing: set[Made] = set()
        self.waiting: dict[Made, list[_Pick]] = {}
        self.ready: list[list[tuple[tuple[int, int, int, int], Action]]] = [[] for _ in range(ranks)]
        self.busy = [False] * ranks
        self.running: list[tuple[int, int, Action]] = []
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.tick = 0

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Run all stage orders to their end and return what each rank did."""
        for stage in range(len(self.orders)):
            self._offer_next(stage)
        self._start()
        while self.running:
            self.tick = self.running[0][0]
            while self.running and self.running[0][0] == self.tick:
                _, rank, finished = heapq.heappop(self.running)
                self.busy[rank] = False
                self._finish(finished)
            self._start()
        return tuple(tuple(row) for row in self.rows)

    def _offer_next(self, stage: int) -> None:
        order = self.orders[stage]
        if self.position[stage] == len(order):
            return
        candidate = order[self.position[stage]]
        self.position[stage] += 1
        missing = [need for need in self._needs(candidate) if need not in self.existing]
        pick = _Pick(candidate, len(missing))
        for need in missing:
            self.waiting.setdefault(need, []).append(pick)
        if not missing:
            self._offer(candidate)

    def _needs(self, candidate: Action) -> Sequence[Made]:
        stage, microbatch = candidate.stage, candidate.microbatch
        if candidate.kind is not ActionKind.FORWARD and not self.flow.has_backward[stage]:
            return [Made(True, user, microbatch) for user in self.users[stage]]
        needs = self.flow.needs(candidate)
        return [need for need in needs if need.gradient] if self.forwards_done else needs

    def _offer(self, candidate: Action) -> None:
        stage, kind = candidate.stage, candidate.kind
        if kind is not ActionKind.FORWARD and not self.flow.has_backward[stage]:
            self._finish(candidate)
            return
        tail = self.flow.depths[stage] if kind is ActionKind.FORWARD else self.flow.heads[stage]
        urgency = (_URGENCY[kind], candidate.microbatch, -tail, stage)
        heapq.heappush(self.ready[self.placement[stage]], (urgency, candidate))

    def _finish(self, finished: Action) -> None:
        made = self.flow.makes(finished)
        if made is not None:
            self.existing.add(made)
            for pick in self.waiting.pop(made, ()):
                pick.missing -= 1
                if pick.missing == 0:
                    self._offer(pick.action)
        self._offer_next(finished.stage)

    def _start(self) -> None:
        for rank in range(len(self.busy)):
            if self.ready[rank] and not self.busy[rank]:
                _, chosen = heapq.heappop(self.ready[rank])
                self.busy[rank] = True
                self.rows[rank].append(chosen)
                heapq.heappush(self.running, (self.tick + _TICKS[chosen.kind], rank, chosen))
