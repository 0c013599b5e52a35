"""Messages and plan steps in the user's words, and excerpts of a plan for findings."""

from __future__ import annotations

from collections.abc import Mapping

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.messages import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Step, Wait
from ppdsl.schedule.excerpt import draw_rows

__all__ = ["draw_steps", "explain_message", "short_step"]


def explain_message(graph: StageGraph, message: Message) -> str:
    """Return a message in the user's words: value, micro-batch, from which stage to which.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.units import Bytes, Microbatch, Rank
    >>> explain_message(chain_graph(2), Message(0, 1, Microbatch(3), Direction.BACKWARD, Rank(1), Rank(0), Bytes(4096)))
    "the gradient of 'value0' of micro-batch 3 from stage 1 to 0"
    """
    edge = graph.edges[message.edge]
    producer, consumer = graph.stages[edge.producer].label, graph.stages[message.consumer].label
    if message.direction is Direction.FORWARD:
        return f"{edge.value!r} of micro-batch {message.microbatch} from stage {producer} to {consumer}"
    return f"the gradient of {edge.value!r} of micro-batch {message.microbatch} from stage {consumer} to {producer}"


def short_step(graph: StageGraph, step: Step) -> str:
    """Return a step in few letters: `send(0F3>2)` sends what `0F3` made to stage 2.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.units import Bytes, Microbatch, Rank
    >>> message = Message(0, 1, Microbatch(3), Direction.FORWARD, Rank(0), Rank(1), Bytes(4096))
    >>> short_step(chain_graph(2), Recv(message))
    'recv(0F3>1)'
    """
    match step:
        case Compute(action):
            return str(action)
        case Free(stage, microbatch):
            return f"free({stage},{microbatch})"
        case Send(message) | Recv(message) | Wait(message):
            ends = (graph.edges[message.edge].producer, message.consumer)
            source, target = ends if message.direction is Direction.FORWARD else ends[::-1]
            name = type(step).__name__.lower()
            return f"{name}({source}{message.direction.value}{message.microbatch}>{target})"


def draw_steps(plan: MessagePlan, marks: Mapping[int, tuple[int, str]]) -> str:
    """Return the marked ranks' steps around the marks, with carets and a few words below them."""
    shown = {
        rank: [short_step(plan.graph, step) for step in row] for rank, row in enumerate(plan.rows) if rank in marks
    }
    rows = [shown.get(rank, []) for rank in range(len(plan.rows))]
    return draw_rows(rows, marks, around=(3, 2), only_marked=True)
