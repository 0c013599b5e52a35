"""A schedule as whole numbers: what proofs and simulations of large schedules run on.

Actions are objects for people; a loop over hundred thousands of them spends its time on hashing and comparing. Here a
job is `4 * stage + kind`, and what actions make for each other has a place in one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.flow import Flow, flow_of
from ppdsl.schedule.table import Schedule

__all__ = ["JOB_KINDS", "Coded", "coded_of", "is_sound", "legal_order"]

JOB_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
"""The kind of a job is its place here."""

_NUMBER = {kind: number for number, kind in enumerate(JOB_KINDS)}
# What has run of a stage and micro-batch: nothing, F, B, I, I and W; each kind leads from one to another.
_NOTHING, _F, _B, _I, _W, _WRONG = range(6)
_NEXT = (
    (_F, _WRONG, _WRONG, _WRONG, _WRONG),
    (_WRONG, _B, _WRONG, _WRONG, _WRONG),
    (_WRONG, _I, _WRONG, _WRONG, _WRONG),
    (_WRONG, _WRONG, _WRONG, _W, _WRONG),
)


@dataclass(frozen=True)
class Coded:
    """A schedule as whole numbers.

    Attributes:
        microbatches: Number of micro-batches.
        jobs: For each rank its jobs.
        places: For each rank the micro-batches of its jobs.
        needs: For each job what it waits for; a micro-batch `m` waits for what has the place `need + m`.
        gives: For each job what it makes for others, or -1.
        size: Number of places.
    """

    microbatches: int
    jobs: tuple[list[int], ...]
    places: tuple[list[int], ...]
    needs: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]
    size: int

    @property
    def givers(self) -> tuple[tuple[tuple[bool, int], ...], ...]:
        """For each job, beside its needs, whether each is a gradient and of which stage."""
        return tuple(tuple(self._giver(need) for need in needs) for needs in self.needs)

    def _giver(self, need: int) -> tuple[bool, int]:
        stage, gradient = divmod(need // self.microbatches, 2)
        return bool(gradient), stage


def coded_of(schedule: Schedule, graph: StageGraph) -> Coded:
    """Return a schedule as whole numbers.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(2)
    >>> coded = coded_of(build_schedule("gpipe", graph, (0, 1), microbatches=2), graph)
    >>> coded.jobs[1], coded.places[1], coded.needs[4]
    ([4, 4, 5, 5], [0, 1, 0, 1], (0,))
    """
    number = _NUMBER
    jobs = tuple([4 * action.stage + number[action.kind] for action in row] for row in schedule.rows)
    places = tuple([int(action.microbatch) for action in row] for row in schedule.rows)
    flow, count = flow_of(graph), schedule.microbatches
    needs: list[tuple[int, ...]] = []
    gives: list[int] = []
    for stage in range(len(graph.stages)):
        needs += _needs(flow, stage, count)
        gradient = (2 * stage + 1) * count
        gives += [2 * stage * count, gradient, gradient, -1]
    return Coded(count, jobs, places, tuple(needs), tuple(gives), 2 * len(graph.stages) * count)


def _needs(flow: Flow, stage: int, count: int) -> list[tuple[int, ...]]:
    values = tuple(2 * s * count for s in flow.values_from[stage])
    gradients = (2 * stage * count, *((2 * s + 1) * count for s in flow.gradients_from[stage]))
    return [values, gradients, gradients, ((2 * stage + 1) * count,)]


def is_sound(schedule: Schedule, graph: StageGraph) -> bool:
    """Tell whether each rank runs what it should, once and in a possible order; false also when it is not certain.

    One pass without a finding for the usual case; `verify_schedule` looks again for what exactly is wrong.
    """
    stages, count, number = graph.stages, schedule.microbatches, _NUMBER
    if len(schedule.placement) != len(stages):
        return False
    state = [bytearray(count) for _ in stages]
    for rank, row in enumerate(schedule.rows):
        if not _runs_well(row, [home == rank for home in schedule.placement], state, count, number):
            return False
    for stage, done in zip(stages, state, strict=True):
        backward = stage.has_backward and not schedule.forward_only
        ends = {_F} if not backward else {_B, _W} if stage.trainable else {_B, _I, _W}
        if not set(done) <= ends:
            return False
    return True


def _runs_well(
    row: Sequence[Action], mine: Sequence[bool], state: list[bytearray], count: int, number: dict[ActionKind, int]
) -> bool:
    stages = len(mine)
    for action in row:
        stage, place = action.stage, action.microbatch
        if not (0 <= stage < stages and 0 <= place < count and mine[stage]):
            return False
        done = state[stage]
        after = _NEXT[number[action.kind]][done[place]]
        if after == _WRONG:
            return False
        done[place] = after
    return True


def legal_order(coded: Coded) -> list[int] | None:
    """Return the ranks in an order in which each can run its next action, or None when ranks wait for each other."""
    needs, gives = coded.needs, coded.gives
    given = bytearray(coded.size)
    waiting: dict[int, list[int]] = {}
    at = [0] * len(coded.jobs)
    order: list[int] = []
    work = list(reversed(range(len(coded.jobs))))
    while work:
        rank = work.pop()
        jobs, places = coded.jobs[rank], coded.places[rank]
        begin = position = at[rank]
        missing = -1
        for position in range(begin, len(jobs)):
            job, place = jobs[position], places[position]
            for need in needs[job]:
                if not given[need + place]:
                    missing = need + place
                    break
            if missing >= 0:
                break
            made = gives[job]
            if made >= 0:
                given[made + place] = 1
                if made + place in waiting:
                    work += waiting.pop(made + place)
        if missing >= 0:
            waiting.setdefault(missing, []).append(rank)
        else:
            position = len(jobs)
        order += [rank] * (position - begin)
        at[rank] = position
    return order if len(order) == _count(coded) else None


def _count(coded: Coded) -> int:
    """Return the number of actions of all ranks."""
    return sum(map(len, coded.jobs))
