"""The laws of a schedule and its message plan on whole numbers, for the usual case that both keep them.

It proves the same as `laws` and `verify`, from the graph's edges and the placement alone; where it says no, these look
again for what exactly is wrong. All steps of one kind are compared at once: where each of them is, is one list by
micro-batch, and a law compares two such lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import lt

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.coded import JOB_KINDS, Coded, coded_of
from ppdsl.plan.messages import MessagePlan
from ppdsl.plan.numbered import NumberedRows, Numbering, Route
from ppdsl.plan.steps import Direction
from ppdsl.schedule.flow import carries_gradient
from ppdsl.schedule.table import Schedule
from ppdsl.units import Rank

__all__ = ["plan_is_sound"]


def plan_is_sound(plan: MessagePlan) -> bool:
    """Tell whether a plan and its schedule keep their laws; false also when it is not certain.

    That ranks' computations do not wait for each other in a circle follows: each needs what is computed before it on
    its rank, or waits for a message that is sent after what it carries was computed, and all messages arrive.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> plan_is_sound(lower(build_schedule("1f1b", chain_graph(4), (0, 1, 0, 1), microbatches=8), chain_graph(4)))
    True
    """
    coded = coded_of(plan.schedule, plan.graph)
    rows = _numbered(plan) if coded.flows and len(plan.rows) == plan.schedule.ranks else None
    if rows is None:
        return False
    check = _Check(rows, coded)
    return check.count() and check.computations() and check.messages() and check.states() and rows.runs


def _numbered(plan: MessagePlan) -> NumberedRows | None:
    """Return the plan's rows as numbers of what must be there; None when it has something else."""
    numbering = Numbering(_expected(plan.schedule, plan.graph), len(plan.graph.stages), plan.schedule.microbatches)
    if isinstance(plan.rows, NumberedRows) and plan.rows.numbering == numbering:
        return plan.rows
    numbers = [[numbering.number(step) for step in row] for row in plan.rows]
    return None if any(-1 in row for row in numbers) else NumberedRows(numbering, numbers)


class _Check:
    """Where each step of a plan is: its place among all steps, one rank's after the other's; -1: nowhere.

    A step that comes after one and before another of a rank is on that rank, and is there at all: most laws are proved
    together with the order. What is left is that nothing is there twice: there are as many steps as there must be.
    """

    def __init__(self, rows: NumberedRows, coded: Coded) -> None:
        self.numbering, self.coded, self.microbatches = rows.numbering, coded, coded.microbatches
        self.where = where = [-1] * self.numbering.size
        self.begins = [0]
        for row in rows.numbers:
            begin = self.begins[-1]
            for place, number in enumerate(row, begin):
                where[number] = place
            self.begins.append(begin + len(row))

    def count(self) -> bool:
        """Tell whether there are as many steps as there must be."""
        computations, states = sum(map(len, self.coded.jobs)), len(self.coded.graph.stages) * self.microbatches
        return self.begins[-1] == 3 * self.numbering.messages + computations + states

    def computations(self) -> bool:
        """Tell whether each rank runs the schedule's actions in its order."""
        computed = self.where[self.numbering.computations : self.numbering.frees]
        for rank, actions in enumerate(self.coded.actions):
            places = list(map(computed.__getitem__, actions))
            if places and not (
                _ascending(places) and self.begins[rank] <= places[0] and places[-1] < self.begins[rank + 1]
            ):
                return False
        return True

    def messages(self) -> bool:
        """Tell whether each message is sent after it is made and posted before it is awaited, before its use.

        And whether each ordered pair of ranks sends and receives in one order.
        """
        messages = self.numbering.messages
        channels: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for number, route in enumerate(self.numbering.routes):
            receives, sends, waits = (self._of(first, number) for first in (0, messages, 2 * messages))
            made, used = self._ends(route)
            if min(receives) < self.begins[route.target] or max(sends) >= self.begins[route.source + 1]:
                return False
            if not (_before(made, sends) and _before(receives, waits) and _before(waits, used)):
                return False
            sent, posted = channels.setdefault((route.source, route.target), ([], []))
            sent += sends
            posted += receives
        return all(_ascending([posted[at] for at in _order(sent)]) for sent, posted in channels.values())

    def states(self) -> bool:
        """Tell whether each state is let go of after all its uses: the stage's own, and those by reference."""
        placement, numbering = self.coded.schedule.placement, self.numbering
        jobs = [[4 * stage + kind for kind in range(len(JOB_KINDS))] for stage in range(len(placement))]
        for consumer, producers in enumerate(self.coded.flow.values_from):
            for producer in producers:
                if placement[producer] == placement[consumer]:
                    jobs[producer].append(4 * consumer)
        for stage, uses in enumerate(jobs):
            frees = self._of(numbering.frees, stage)
            if max(frees) >= self.begins[placement[stage] + 1]:
                return False
            if not all(_before(self._of(numbering.computations, job), frees) for job in uses):
                return False
        return True

    def _of(self, first: int, kind: int) -> list[int]:
        """Return where the steps of a kind are, by micro-batch; `first` is the number of the first kind's first."""
        begin = first + kind * self.microbatches
        return self.where[begin : begin + self.microbatches]

    def _ends(self, route: Route) -> tuple[list[int], list[int]]:
        """Return where the messages of a route are made, and where they are used."""
        first, producer = self.numbering.computations, self.coded.graph.edges[route.edge].producer
        if route.direction is Direction.FORWARD:
            return self._of(first, 4 * producer), self._of(first, 4 * route.consumer)
        # Of B and I one is there for each micro-batch.
        made, used = (
            list(map(max, self._of(first, 4 * stage + 1), self._of(first, 4 * stage + 2)))
            for stage in (route.consumer, producer)
        )
        return made, used


def _before(earlier: Iterable[int], later: Iterable[int]) -> bool:
    return all(map(lt, earlier, later))


def _ascending(places: Sequence[int]) -> bool:
    return all(map(lt, places, islice(places, 1, None)))


def _order(places: Sequence[int]) -> list[int]:
    return sorted(range(len(places)), key=places.__getitem__)


def _expected(schedule: Schedule, graph: StageGraph) -> tuple[Route, ...]:
    """Return what must travel: each value to each consumer on another rank, and the gradient back."""
    placement = [Rank(rank) for rank in schedule.placement]
    found = []
    for edge in graph.edges:
        here, size = placement[edge.producer], edge.bytes
        for there, consumer in [(placement[consumer], consumer) for consumer in edge.consumers]:
            if there != here:
                found.append(Route(edge.index, consumer, Direction.FORWARD, here, there, size))
                if not schedule.forward_only and carries_gradient(graph, edge, consumer):
                    found.append(Route(edge.index, consumer, Direction.BACKWARD, there, here, size))
    return tuple(found)
