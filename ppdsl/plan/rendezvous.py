"""Whether a plan runs when a channel holds nothing: each send waits for its receive.

One FIFO channel for each ordered pair of ranks. A send goes on only when the other rank has posted the matching
receive; a wait goes on only when the message was sent; posting a receive never waits. What passes here runs on any
transport, because every buffer a transport adds only lets senders go on earlier.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ppdsl.diagnostics import Diagnostic
from ppdsl.plan.drawing import draw_steps, explain_message
from ppdsl.plan.meeting import all_end
from ppdsl.plan.messages import Message, MessagePlan, Recv, Send, Step, Wait
from ppdsl.schedule.progress import Blocked, Progress, run_in_order

__all__ = ["find_deadlock", "meets", "rendezvous"]


def rendezvous(plan: MessagePlan) -> Progress:
    """Run the plan's steps over channels without capacity, in time linear in the number of steps.

    Sends and receives are matched by message; that they are in the same order on both ends of each channel is a law of
    its own (`verify_plan`).

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> rendezvous(lower(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=8), graph)).blocked
    ()
    """
    return run_in_order(plan.rows, _needs, _gives)


def meets(rows: Sequence[Sequence[int]], messages: int) -> bool:
    """Tell whether all rows of messages reach their end over channels without capacity.

    The same rules as `rendezvous`, on whole numbers for large plans.

    Args:
        rows: For each rank its steps, each at most once; `3 * message` posts a receive, `3 * message + 1` waits for the
            message and `3 * message + 2` sends it.
        messages: Number of messages.

    >>> meets([[0, 5, 1], [3, 2, 4]], 2), meets([[5, 0, 1], [2, 3, 4]], 2)
    (True, False)
    """
    first = 0, 2 * messages, messages
    return all_end([[first[step % 3] + step // 3 for step in row] for row in rows], messages, 3 * messages)


def find_deadlock(plan: MessagePlan) -> Diagnostic | None:
    """Return the circle of ranks that wait for each other under rendezvous channels, drawn; None when the plan runs.

    The plan's sends and receives must match; `verify_plan` looks at that first.
    """
    cycle = rendezvous(plan).cycle
    if not cycle:
        return None
    ranks = sorted(blocked.rank for blocked in cycle)
    named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    # A wait follows from a send that stands still: no circle without one, unless the computations have one themselves.
    stuck = next((b for b in cycle if isinstance(plan.rows[b.rank][b.position], Send)), cycle[0])
    message = _message_of(plan, stuck)
    what = explain_message(plan.graph, message)
    if stuck.rank == message.source:
        reason = f"rank {stuck.rank} cannot send {what}"
        help_text = f"post its receive on rank {message.target} earlier"
    else:
        reason = f"rank {stuck.rank} never gets {what}"
        help_text = "run first what others wait for"
    excerpt = draw_steps(plan, {b.rank: (b.position, _reason(plan, b)) for b in cycle})
    return Diagnostic("deadlock", f"Ranks {named} wait for each other: {reason}.", help=help_text, excerpt=excerpt)


def _needs(step: Step) -> tuple[Hashable, ...]:
    match step:
        case Send(message):
            return (("posted", message),)
        case Wait(message):
            return (("sent", message),)
        case _:
            return ()


def _gives(step: Step) -> Hashable | None:
    match step:
        case Send(message):
            return ("sent", message)
        case Recv(message):
            return ("posted", message)
        case _:
            return None


def _message_of(plan: MessagePlan, blocked: Blocked) -> Message:
    step = plan.rows[blocked.rank][blocked.position]
    if not isinstance(step, Send | Wait):
        raise TypeError(f"{step} never waits")
    return step.message


def _reason(plan: MessagePlan, blocked: Blocked) -> str:
    message = _message_of(plan, blocked)
    giver = f" at step {blocked.giver[1]}" if blocked.giver else ""
    if isinstance(plan.rows[blocked.rank][blocked.position], Send):
        return f"waits until rank {message.target} posts its receive{giver}"
    return f"waits until rank {message.source} sends it{giver}"
