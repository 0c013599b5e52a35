"""What carries tensors between ranks: one small protocol, and the parcel that names a tensor on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.messages import Direction, Message, MessagePlan
from ppdsl.runtime.layout import Layout

__all__ = ["Parcel", "Transport", "make_parcels"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message of a plan, ready for a transport.

    Attributes:
        index: Position among all messages of the plan, the same on every rank.
        message: What the plan says.
        layout: How the tensor lies on the wire.
        text: What a reader needs to know of it ("forward of `skip`, stage 0 to 2, micro-batch 1").
    """

    index: int
    message: Message
    layout: Layout
    text: str


class Transport(Protocol):
    """Moves the tensors of one rank.

    `send` and `recv` only start; `wait` ends when the tensor is there. Between two ranks parcels stay in order.
    """

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Start sending `tensor`, which has the parcel's layout; keep it alive until it has left."""

    def recv(self, parcel: Parcel) -> None:
        """Post the receive of a parcel, ahead of its use."""

    def ready(self, parcel: Parcel) -> bool:
        """Whether `wait` may be called now; False lets another rank of this process go on first."""

    def wait(self, parcel: Parcel) -> torch.Tensor:
        """Return the tensor of a posted receive, once it is complete."""

    def drain(self) -> None:
        """Return when all that was sent has left."""

    def close(self) -> None:
        """Give up everything that is under way."""


def make_parcels(plan: MessagePlan, graphs: Sequence[StageGraph] = ()) -> dict[Message, Parcel]:
    """Return the parcels of a plan, numbered in the order of ranks and of their sends.

    Args:
        plan: The plan.
        graphs: For each micro-batch the stage graph with its sizes; empty: the plan's own for all.
    """
    graph = plan.graph
    graphs = graphs or [graph] * plan.schedule.microbatches
    layouts = {id(sized): [Layout.of(edge.meta) for edge in sized.edges] for sized in graphs}
    return {
        message: Parcel(
            index, message, layouts[id(graphs[message.microbatch])][message.edge], _describe(graph, message)
        )
        for index, message in enumerate(plan.messages)
    }


def _describe(graph: StageGraph, message: Message) -> str:
    """Return what travels, from which stage to which, of which micro-batch."""
    edge = graph.edges[message.edge]
    producer, consumer = graph.stages[edge.producer].label, graph.stages[message.consumer].label
    if message.direction is Direction.FORWARD:
        return f"forward of `{edge.value}`, stage {producer} to {consumer}, micro-batch {message.microbatch}"
    return f"gradient of `{edge.value}`, stage {consumer} to {producer}, micro-batch {message.microbatch}"
