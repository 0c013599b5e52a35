"""The message plan: for each rank its computations with their sends, receives and lifetimes.

One plan is compiled for all ranks. It is what `verify` proves, `simulate` prices, the timeline draws and the
executor runs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.table import Schedule
from ppdsl.units import Bytes, Microbatch, Rank

__all__ = ["Compute", "Direction", "Free", "Message", "MessagePlan", "Recv", "Send", "Step", "Wait"]


class Direction(StrEnum):
    """Activations go forward, gradients go backward."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor on its way between two ranks.

    Named by edge, consumer, micro-batch and direction, never by "the neighbour". Forward it is the edge's value, from
    the rank of the edge's producer to the rank of `consumer`; backward it is the gradient, the other way.
    """

    edge: int
    consumer: int
    microbatch: Microbatch
    direction: Direction
    source: Rank
    target: Rank
    bytes: Bytes

    def __str__(self) -> str:
        return f"edge {self.edge} {self.direction.value}{self.microbatch} of stage {self.consumer}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one action of a stage."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending; the tensor is kept alive until the transport is done with it."""

    message: Message

    def __str__(self) -> str:
        return f"send({self.message})"


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of a message, ahead of its use."""

    message: Message

    def __str__(self) -> str:
        return f"recv({self.message})"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a posted receive is complete."""

    message: Message

    def __str__(self) -> str:
        return f"wait({self.message})"


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a stage's state of a micro-batch: nothing on this rank will use it again.

    The state is what the stage received, made and saved for its backward, and the gradients handed to it by stages of
    the same rank. Values that stages of the same rank take by reference belong to the stage that made them. A transport
    that is still sending keeps its tensor alive by itself.
    """

    stage: int
    microbatch: Microbatch

    def __str__(self) -> str:
        return f"free({self.stage}, {self.microbatch})"


Step: TypeAlias = Compute | Send | Recv | Wait | Free


@dataclass(frozen=True)
class MessagePlan:
    """All ranks' steps, in order.

    Attributes:
        graph: The stage graph whose edges the messages carry.
        schedule: The computations this plan was lowered from.
        rows: For each rank its steps.
    """

    graph: StageGraph
    schedule: Schedule
    rows: tuple[tuple[Step, ...], ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of the step, by sending rank, in the order in which it sends them."""
        return tuple(step.message for row in self.rows for step in row if isinstance(step, Send))

    @property
    def digest(self) -> str:
        """A hash of the whole plan; ranks compare it before the first message."""
        text = "\n".join(" ".join(map(str, row)) for row in self.rows)
        return hashlib.sha256(f"{self.graph.digest}\n{text}".encode()).hexdigest()[:16]
