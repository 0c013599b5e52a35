"""A schedule as whole numbers: what proofs, plans and simulations of large schedules run on.

Actions are objects for people; a loop over hundred thousands of them spends its time on hashing and comparing. Here a
job is `4 * stage + kind`, an action is `job * microbatches + m`, and what actions make for each other has a place in
one list. Whatever belongs to all micro-batches of a job then lies side by side, and is compared as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from operator import add, lt, mul
from weakref import WeakValueDictionary

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.flow import Flow, flow_of
from ppdsl.schedule.table import Schedule

__all__ = ["JOB_KINDS", "Coded", "coded_of", "is_sound", "legal_order"]

JOB_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
"""The kind of a job is its place here."""

_NUMBER = {kind: number for number, kind in enumerate(JOB_KINDS)}
_GIVEN, _AWAITED = 1, 2


@dataclass(frozen=True, eq=False)
class Coded:
    """A schedule for a graph, as whole numbers.

    Attributes:
        schedule: What is coded here.
        graph: The stages that it runs.
        flow: The data flow between them.
        jobs: For each rank its jobs.
        places: For each rank the micro-batches of its jobs.
        needs: For each job what it waits for; a micro-batch `m` waits for what has the place `need + m`.
        gives: For each job what it makes for others, or -1.
        size: Number of places.
    """

    schedule: Schedule
    graph: StageGraph
    flow: Flow
    jobs: tuple[Sequence[int], ...]
    places: tuple[Sequence[int], ...]
    needs: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]
    size: int

    @cached_property
    def microbatches(self) -> int:
        """Number of micro-batches."""
        return self.schedule.microbatches

    @property
    def givers(self) -> tuple[tuple[tuple[bool, int], ...], ...]:
        """For each job, beside its needs, whether each is a gradient and of which stage."""
        return tuple(tuple(self._giver(need) for need in needs) for needs in self.needs)

    @cached_property
    def actions(self) -> tuple[list[int], ...]:
        """For each rank its actions, as `job * microbatches + m`."""
        count = repeat(self.microbatches)
        rows = zip(self.jobs, self.places, strict=True)
        return tuple(list(map(add, map(mul, jobs, count), places)) for jobs, places in rows)

    @cached_property
    def positions(self) -> list[int]:
        """For each action its position on its rank, or -1 when it is not there; of a schedule without foreign ones."""
        positions = [-1] * (4 * len(self.graph.stages) * self.microbatches)
        for row in self.actions:
            for position, action in enumerate(row):
                positions[action] = position
        return positions

    @cached_property
    def sound(self) -> bool:
        """Whether each rank runs what it should, once, and each stage in a possible order; see `is_sound`."""
        return _at_home(self) and _in_order(self)

    @cached_property
    def flows(self) -> bool:
        """Whether it is sound, and no stage runs before what it needs of other stages of its own rank.

        Such a schedule keeps its laws as soon as ranks that wait for each other's messages reach their ends.
        """
        return self.sound and _in_line(self)

    @cached_property
    def order(self) -> list[int] | None:
        """The ranks in an order in which each can run its next action; see `legal_order`."""
        return _run(self)

    def positions_of(self, stage: int, kind: ActionKind) -> list[int]:
        """Return the positions of a stage's actions of a kind, by micro-batch; see `positions`."""
        first = (4 * stage + _NUMBER[kind]) * self.microbatches
        return self.positions[first : first + self.microbatches]

    @cached_property
    def gradient_positions(self) -> tuple[list[int], ...]:
        """For each stage the positions of the actions that make the gradients of its inputs, by micro-batch."""
        kinds = ActionKind.BACKWARD, ActionKind.INPUT_GRAD
        pairs = ([self.positions_of(stage.index, kind) for kind in kinds] for stage in self.graph.stages)
        return tuple(list(map(max, *pair)) for pair in pairs)

    def _giver(self, need: int) -> tuple[bool, int]:
        stage, gradient = divmod(need // self.microbatches, 2)
        return bool(gradient), stage


# As long as somebody holds it, what was worked out for a schedule is there for the next one that asks. A `Coded` holds
# its schedule and its graph, so while it is known no others can have their ids.
_KNOWN: WeakValueDictionary[tuple[int, int], Coded] = WeakValueDictionary()


def coded_of(schedule: Schedule, graph: StageGraph) -> Coded:
    """Return a schedule as whole numbers; the same ones while they are in use, for instance by a plan.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(2)
    >>> coded = coded_of(build_schedule("gpipe", graph, (0, 1), microbatches=2), graph)
    >>> coded.jobs[1], coded.places[1], coded.actions[1], coded.needs[4]
    ([4, 4, 5, 5], [0, 1, 0, 1], [8, 9, 10, 11], (0,))
    """
    known = _KNOWN.get((id(schedule), id(graph)))
    if known is None:
        known = _KNOWN[id(schedule), id(graph)] = _coded(schedule, graph)
    return known


def is_sound(schedule: Schedule, graph: StageGraph) -> bool:
    """Tell whether each rank runs what it should, once and in a possible order.

    Whole jobs are compared, without a finding; `verify_schedule` looks again for what exactly is wrong.
    """
    return coded_of(schedule, graph).sound


def legal_order(coded: Coded) -> list[int] | None:
    """Return the ranks in an order in which each can run its next action, or None when ranks wait for each other."""
    return coded.order


def _coded(schedule: Schedule, graph: StageGraph) -> Coded:
    number = _NUMBER
    jobs = tuple([4 * action.stage + number[action.kind] for action in row] for row in schedule.rows)
    places = tuple([action.microbatch for action in row] for row in schedule.rows)
    flow, count = flow_of(graph), schedule.microbatches
    needs: list[tuple[int, ...]] = []
    gives: list[int] = []
    for stage in range(len(graph.stages)):
        needs += _needs(flow, stage, count)
        gradient = (2 * stage + 1) * count
        gives += [2 * stage * count, gradient, gradient, -1]
    return Coded(schedule, graph, flow, jobs, places, tuple(needs), tuple(gives), 2 * len(graph.stages) * count)


def _needs(flow: Flow, stage: int, count: int) -> list[tuple[int, ...]]:
    values = tuple(2 * s * count for s in flow.values_from[stage])
    gradients = (2 * stage * count, *((2 * s + 1) * count for s in flow.gradients_from[stage]))
    return [values, gradients, gradients, ((2 * stage + 1) * count,)]


def _at_home(coded: Coded) -> bool:
    """Tell whether visits of one stage share a rank, and ranks run only actions that they may, each once."""
    schedule, stages, count = coded.schedule, coded.graph.stages, coded.microbatches
    if count < 1 or len(schedule.placement) != len(stages):
        return False
    own: list[set[int]] = [set() for _ in schedule.rows]
    homes: dict[int | str, int] = {}
    for stage, rank in zip(stages, schedule.placement, strict=True):
        if not 0 <= rank < len(own) or homes.setdefault(stage.key, rank) != rank:
            return False
        backward = stage.has_backward and not schedule.forward_only
        own[rank].update(range(4 * stage.index, 4 * stage.index + (4 if backward else 1)))
    for jobs, places, known in zip(coded.jobs, coded.places, own, strict=True):
        if jobs and not (known.issuperset(jobs) and min(places) >= 0 and max(places) < count):
            return False
    positions = coded.positions
    return len(positions) - positions.count(-1) == sum(map(len, coded.jobs))


def _in_order(coded: Coded) -> bool:
    """Tell whether each stage runs all micro-batches forward, then backward: B, or I and W."""
    count = coded.microbatches
    for stage in coded.graph.stages:
        forward, whole, split, weight = (coded.positions_of(stage.index, kind) for kind in JOB_KINDS)
        if min(forward) < 0:
            return False
        if not stage.has_backward or coded.schedule.forward_only:
            continue
        # One of B and I is there and comes after F; then never both, when as many are missing as there are.
        wholes, splits, weights = (count - positions.count(-1) for positions in (whole, split, weight))
        if wholes + splits != count or not all(map(lt, forward, coded.gradient_positions[stage.index])):
            return False
        if stage.trainable and weights != splits:
            return False
        if weights and not all(w < 0 or 0 <= i < w for i, w in zip(split, weight, strict=True)):
            return False
    return True


def _in_line(coded: Coded) -> bool:
    """Tell whether stages of one rank give each other values and gradients before they are needed."""
    placement, gradients = coded.schedule.placement, coded.gradient_positions
    forwards = [coded.positions_of(stage.index, ActionKind.FORWARD) for stage in coded.graph.stages]
    for stage, rank in enumerate(placement):
        givers = [giver for giver in coded.flow.values_from[stage] if placement[giver] == rank]
        pairs = [(forwards[giver], forwards[stage]) for giver in givers]
        if not coded.schedule.forward_only:
            givers = [giver for giver in coded.flow.gradients_from[stage] if placement[giver] == rank]
            pairs += [(gradients[giver], gradients[stage]) for giver in givers]
        if not all(all(map(lt, *pair)) for pair in pairs):
            return False
    return True


def _run(coded: Coded) -> list[int] | None:
    needs, gives = _to_await(coded), coded.gives
    given = bytearray(coded.size)
    waiting: dict[int, list[int]] = {}
    rest = [zip(jobs, places, strict=True) for jobs, places in zip(coded.jobs, coded.places, strict=True)]
    held: list[tuple[tuple[int, int], ...]] = [()] * len(rest)  # the action that each rank stands before
    order: list[int] = []
    work = deque(range(len(rest)))  # first come, first served: more is ready when a rank has its turn again
    while work:
        rank = work.popleft()
        for job, place in chain(held[rank], rest[rank]):
            for need in needs[job]:
                if given[need + place] != _GIVEN:
                    break
            else:
                order.append(rank)
                made = gives[job]
                if made >= 0:
                    if given[made + place] == _AWAITED:
                        work += waiting.pop(made + place)
                    given[made + place] = _GIVEN
                continue
            given[need + place] = _AWAITED
            waiting.setdefault(need + place, []).append(rank)
            held[rank] = ((job, place),)
            break
    return order if len(order) == sum(map(len, coded.jobs)) else None


def _to_await(coded: Coded) -> Sequence[Sequence[int]]:
    """Return for each job its needs; of a sound schedule without those of its own stage, which have run before it."""
    if not coded.sound:
        return coded.needs
    two = 2 * coded.microbatches
    return [[need for need in needs if need // two != job // 4] for job, needs in enumerate(coded.needs)]
