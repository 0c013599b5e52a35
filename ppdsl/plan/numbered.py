"""A plan's rows as whole numbers; the steps they stand for are made when somebody looks at them.

A step is one kind of work for one micro-batch. Both are one number, so that plans of millions of steps are written,
compared and proved as lists of numbers, and a process makes the steps of its own ranks only. With `M` micro-batches the
number `kind * M + m` does `kind` for micro-batch `m`; with `R` routes and `S` stages the kinds are::

    0        R        2R       3R                    3R + 4S   3R + 5S
    | recv   | send   | wait   | 0F 0B 0I 0W 1F 1B ..  | free    |
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast, overload

from ppdsl.plan.coded import JOB_KINDS
from ppdsl.plan.meeting import all_end
from ppdsl.plan.pausing import without_collection
from ppdsl.plan.steps import Compute, Direction, Free, Message, Recv, Send, Step, Wait
from ppdsl.schedule.action import ActionKind, action_of
from ppdsl.units import Bytes, Microbatch, Rank

__all__ = ["NumberedRows", "Numbering", "Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """What one edge carries to one consumer in one direction: a message for each micro-batch."""

    edge: int
    consumer: int
    direction: Direction
    source: Rank
    target: Rank
    bytes: Bytes

    def message(self, microbatch: int) -> Message:
        """Return the message of a micro-batch."""
        m = Microbatch(microbatch)
        return Message(self.edge, self.consumer, m, self.direction, self.source, self.target, self.bytes)


@dataclass(frozen=True)
class Numbering:
    """Which step each number stands for.

    Attributes:
        routes: What travels between ranks.
        stages: Number of stages.
        microbatches: Number of micro-batches.
    """

    routes: tuple[Route, ...]
    stages: int
    microbatches: int

    @cached_property
    def messages(self) -> int:
        """Number of messages, and the first number of a send."""
        return len(self.routes) * self.microbatches

    @cached_property
    def waits(self) -> int:
        """The first number of a wait."""
        return 2 * self.messages

    @cached_property
    def computations(self) -> int:
        """The first number of a computation; they follow in the order of the jobs of `Coded`."""
        return 3 * self.messages

    @cached_property
    def frees(self) -> int:
        """The first number of what lets go of a state."""
        return self.computations + 4 * self.stages * self.microbatches

    @cached_property
    def size(self) -> int:
        """Number of numbers."""
        return self.frees + self.stages * self.microbatches

    @cached_property
    def makers(self) -> tuple[Callable[[int], Step], ...]:
        """For each kind what makes its step of a micro-batch."""
        carriers = [partial(_carried, step, route) for step in (Recv, Send, Wait) for route in self.routes]
        computations = [partial(_computed, stage, kind) for stage in range(self.stages) for kind in JOB_KINDS]
        return (*carriers, *computations, *(partial(_freed, stage) for stage in range(self.stages)))

    def number(self, step: Step) -> int:
        """Return a step's number, or -1 when it has none here."""
        match step:
            case Compute(action):
                job = 4 * action.stage + JOB_KINDS.index(action.kind)
                return self._at(self.computations, job, 4 * self.stages, action.microbatch)
            case Free(stage, microbatch):
                return self._at(self.frees, stage, self.stages, microbatch)
            case Recv(message) | Send(message) | Wait(message):
                first = (Recv, Send, Wait).index(type(step)) * self.messages
                return self._at(first, self._places.get(_ends_of(message), -1), len(self.routes), message.microbatch)

    def _at(self, first: int, kind: int, kinds: int, microbatch: int) -> int:
        known = 0 <= kind < kinds and 0 <= microbatch < self.microbatches
        return first + kind * self.microbatches + microbatch if known else -1

    @cached_property
    def _places(self) -> dict[_Ends, int]:
        return {_ends_of(route): place for place, route in enumerate(self.routes)}


class NumberedRows(Sequence[tuple[Step, ...]]):
    """For each rank its steps; a rank's are made when they are first asked for.

    Args:
        numbering: Which step each number stands for.
        numbers: For each rank the numbers of its steps.

    >>> rows = NumberedRows(Numbering((), stages=1, microbatches=2), [[0, 2, 8]])
    >>> print(*rows[0])
    0F0 0B0 free(0, 0)
    """

    def __init__(self, numbering: Numbering, numbers: Iterable[Iterable[int]]) -> None:
        self.numbering = numbering
        self.numbers = tuple(array("I", row) for row in numbers)
        self._made: dict[int, tuple[Step, ...]] = {}

    @cached_property
    def runs(self) -> bool:
        """Whether all ranks reach their end over channels without capacity; each step must be there at most once."""
        return all_end(self.numbers, self.numbering.messages, self.numbering.size)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, by sending rank, in the order in which it sends them."""
        count, routes, first = self.numbering.microbatches, self.numbering.routes, self.numbering.messages
        sent = (number - first for row in self.numbers for number in row if first <= number < 2 * first)
        return tuple(routes[number // count].message(number % count) for number in sent)

    def lines(self) -> Iterator[list[str]]:
        """Yield for each rank the texts of its steps, without making the steps."""
        count = self.numbering.microbatches
        texts = [tuple(str(make(cast(int, _MARK))).split(_MARK)) for make in self.numbering.makers]
        ends = [(before, after) for before, after in texts]
        for row in self.numbers:
            yield [f"{ends[number // count][0]}{number % count}{ends[number // count][1]}" for number in row]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, rank: int) -> tuple[Step, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Step, ...], ...]: ...

    def __getitem__(self, rank: int | slice) -> tuple[Step, ...] | tuple[tuple[Step, ...], ...]:
        if isinstance(rank, slice):
            return tuple(self[place] for place in range(len(self))[rank])
        place = range(len(self))[rank]
        if place not in self._made:
            makers, count = self.numbering.makers, self.numbering.microbatches
            with without_collection():
                steps = tuple([makers[number // count](number % count) for number in self.numbers[place]])
            self._made[place] = steps
        return self._made[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedRows) and self.numbering == other.numbering:
            return self.numbers == other.numbers
        return tuple(self) == tuple(other) if isinstance(other, NumberedRows | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


# Stands for the number of a micro-batch in a text that is made once for all of them.
_MARK = "\0"


_Ends = tuple[int, int, Direction, Rank, Rank, Bytes]


def _ends_of(carried: Message | Route) -> _Ends:
    return carried.edge, carried.consumer, carried.direction, carried.source, carried.target, carried.bytes


def _carried(step: Callable[[Message], Step], route: Route, microbatch: int) -> Step:
    return step(route.message(microbatch))


def _computed(stage: int, kind: ActionKind, microbatch: int) -> Compute:
    return Compute(action_of(stage, kind, microbatch))


def _freed(stage: int, microbatch: int) -> Free:
    return Free(stage, Microbatch(microbatch))
