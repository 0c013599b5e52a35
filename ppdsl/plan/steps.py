"""What a rank does in a step, one thing after the other: compute, send, receive, wait and let go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ppdsl.schedule.action import Action
from ppdsl.units import Bytes, Microbatch, Rank

__all__ = ["Compute", "Direction", "Free", "Message", "Recv", "Send", "Step", "Wait"]


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
