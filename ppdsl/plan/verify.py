"""The laws of a message plan: what `verify_plan` proves before anything starts.

A plan is not trusted because `lower` made it: messages are worked out again here, from the graph's edges and the
placement alone, so that a mistake there is found here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ppdsl.diagnostics import Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.drawing import draw_steps, explain_message
from ppdsl.plan.laws import collect, verify_schedule
from ppdsl.plan.lifetimes import last_uses
from ppdsl.plan.messages import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Step, Wait
from ppdsl.plan.pausing import without_collection
from ppdsl.plan.quick import plan_is_sound
from ppdsl.plan.rendezvous import find_deadlock
from ppdsl.schedule.action import Action, ActionKind, action_of
from ppdsl.schedule.excerpt import draw_rows
from ppdsl.schedule.flow import carries_gradient
from ppdsl.schedule.table import Schedule
from ppdsl.units import Bytes, Microbatch, Rank

__all__ = ["Planned", "faults_of", "verify", "verify_plan"]


class Planned(Protocol):
    """Whatever has a message plan: a pipeline."""

    @property
    def plan(self) -> MessagePlan:
        """The plan it runs."""
        ...


def verify(planned: Planned | MessagePlan) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a pipeline's plan; empty means that it is safe for any transport.

    Args:
        planned: A pipeline, or a plan.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> verify(lower(build_schedule("1f1b", graph, (0, 1, 0, 1), microbatches=8), graph))
    ()
    """
    return verify_plan(planned if isinstance(planned, MessagePlan) else planned.plan)


def verify_plan(plan: MessagePlan) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a plan; empty means that it is safe for any transport.

    Checked in this order, each only when all before are fine: the schedule's laws; every message sent, received and
    waited for once, by the right ranks and next to the right computations; one order on both ends of each channel;
    states freed once and not before their last use; no deadlock under rendezvous channels.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> verify_plan(lower(build_schedule("1f1b", graph, (0, 1, 0, 1), microbatches=8), graph))
    ()
    """
    with without_collection():
        if plan_is_sound(plan):
            return ()
    return faults_of(plan)


def faults_of(plan: MessagePlan) -> tuple[Diagnostic, ...]:
    """Return the same, one step after the other: where `plan_is_sound` says no."""
    findings = verify_schedule(plan.schedule, plan.graph) or collect(_computations(plan))
    findings = findings or collect(_messages(plan)) or collect(_channels(plan)) or collect(_frees(plan))
    if findings:
        return findings
    deadlock = find_deadlock(plan)
    return () if deadlock is None else (deadlock,)


def _computations(plan: MessagePlan) -> Iterable[Diagnostic]:
    rows = tuple(tuple(step.action for step in row if isinstance(step, Compute)) for row in plan.rows)
    for rank, (found, wanted) in enumerate(zip(rows, plan.schedule.rows, strict=False)):
        if found != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
            )
            has = found[at] if at < len(found) else "nothing"
            want = wanted[at] if at < len(wanted) else "nothing"
            message = f"Rank {rank} of the plan runs {has} where the schedule runs {want}, at computation {at}."
            yield Diagnostic("plan-order", message, excerpt=draw_rows(rows, {rank: (at, "")}))
    if len(rows) != len(plan.schedule.rows):
        yield Diagnostic("plan-order", f"The plan has {len(rows)} ranks, but its schedule {plan.schedule.ranks}.")


def _expected(schedule: Schedule, graph: StageGraph) -> Iterable[Message]:
    for edge in graph.edges:
        for consumer in edge.consumers:
            producer, user = Rank(schedule.placement[edge.producer]), Rank(schedule.placement[consumer])
            if producer == user:
                continue
            backward = not schedule.forward_only and carries_gradient(graph, edge, consumer)
            size = Bytes(edge.bytes)
            for m in map(Microbatch, range(schedule.microbatches)):
                yield Message(edge.index, consumer, m, Direction.FORWARD, producer, user, size)
                if backward:
                    yield Message(edge.index, consumer, m, Direction.BACKWARD, user, producer, size)


def _messages(plan: MessagePlan) -> Iterable[Diagnostic]:
    known = frozenset(_expected(plan.schedule, plan.graph))
    seen: dict[type[Step], set[Message]] = {Send: set(), Recv: set(), Wait: set()}
    for rank, row in enumerate(plan.rows):
        done: set[Action] = set()
        for at, step in enumerate(row):
            match step:
                case Compute(action):
                    done.add(action)
                case Send(message) | Recv(message) | Wait(message):
                    before = seen[type(step)]
                    wrong = _wrong_step(plan, rank, step, known, before) or _wrong_moment(plan, step, done, seen[Recv])
                    if wrong is not None:
                        code, what = wrong
                        text = f"Rank {rank} {_verb(step)} {explain_message(plan.graph, message)} at step {at}{what}."
                        yield Diagnostic(code, text, excerpt=draw_steps(plan, {rank: (at, "")}))
                    before.add(message)
                case _:
                    continue
    for kind in (Send, Recv, Wait):
        for message in sorted(known - seen[kind], key=_message_order):
            rank = message.source if kind is Send else message.target
            text = f"Rank {rank} never {_verb(kind(message))} {explain_message(plan.graph, message)}."
            yield Diagnostic(f"missing-{kind.__name__.lower()}", text)


def _wrong_step(
    plan: MessagePlan, rank: int, step: Send | Recv | Wait, known: frozenset[Message], seen: set[Message]
) -> tuple[str, str] | None:
    """Return code and words for a message that this rank should not have at all, or has already."""
    message = step.message
    home = message.source if isinstance(step, Send) else message.target
    if message not in known:
        return "foreign-message", ", but nothing on the other rank is to have it"
    if rank != home:
        return "misplaced-message", f", but that is for rank {home} to do"
    if message in seen:
        return "duplicate-message", " a second time"
    return None


def _wrong_moment(
    plan: MessagePlan, step: Send | Recv | Wait, done: set[Action], posted: set[Message]
) -> tuple[str, str] | None:
    """Return code and words for a message at the wrong place among the computations."""
    message = step.message
    producer = plan.graph.edges[message.edge].producer
    ends = (producer, message.consumer)
    maker, user = ends if message.direction is Direction.FORWARD else ends[::-1]
    match step:
        case Send() if not _ran(maker, message, done):
            return "early-send", ", before it is made"
        case Wait() if message not in posted:
            return "unposted-wait", ", before posting its receive"
        case Wait() if _ran(user, message, done):
            return "late-wait", ", after its use"
        case _:
            return None


def _ran(stage: int, message: Message, done: set[Action]) -> bool:
    forward = message.direction is Direction.FORWARD
    kinds = (ActionKind.FORWARD,) if forward else (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
    return any(action_of(stage, kind, message.microbatch) in done for kind in kinds)


def _verb(step: Send | Recv | Wait) -> str:
    match step:
        case Send():
            return "sends"
        case Recv():
            return "posts the receive of"
        case Wait():
            return "waits for"


def _message_order(message: Message) -> tuple[int, int, int, str]:
    return message.edge, message.consumer, message.microbatch, message.direction.value


def _channels(plan: MessagePlan) -> Iterable[Diagnostic]:
    sends: dict[tuple[int, int], list[Message]] = {}
    posts: dict[tuple[int, int], list[Message]] = {}
    for row in plan.rows:
        for step in row:
            if isinstance(step, Send):
                sends.setdefault((step.message.source, step.message.target), []).append(step.message)
            elif isinstance(step, Recv):
                posts.setdefault((step.message.source, step.message.target), []).append(step.message)
    for (source, target), sent in sorted(sends.items()):
        pairs = zip(sent, posts.get((source, target), []), strict=False)
        for place, (out, into) in enumerate(pairs):
            if out != into:
                yield _crossed(plan, source, target, place, out, into)
                break


def _crossed(plan: MessagePlan, source: int, target: int, place: int, sent: Message, posted: Message) -> Diagnostic:
    text = (
        f"Message {place} from rank {source} to rank {target} is {explain_message(plan.graph, sent)}, "
        f"but rank {target} posts the receive of {explain_message(plan.graph, posted)} first."
    )
    marks = {
        source: (plan.rows[source].index(Send(sent)), "sends this"),
        target: (plan.rows[target].index(Recv(posted)), "expects this"),
    }
    help_text = f"post the receives from rank {source} in the order in which it sends"
    return Diagnostic("channel-order", text, help=help_text, excerpt=draw_steps(plan, marks))


def _frees(plan: MessagePlan) -> Iterable[Diagnostic]:
    uses = last_uses(plan.schedule, plan.graph)
    for rank, row in enumerate(plan.rows):
        last = {state: position for position, states in uses[rank].items() for state in states}
        freed: set[tuple[int, int]] = set()
        computed = 0
        for at, step in enumerate(row):
            if isinstance(step, Compute):
                computed += 1
            if not isinstance(step, Free):
                continue
            state = (step.stage, int(step.microbatch))
            name = f"stage {step.stage}, micro-batch {step.microbatch}"
            code, what = "", ""
            if state not in last:
                code, what = "foreign-free", ", which it never holds"
            elif state in freed:
                code, what = "duplicate-free", ", a second time"
            elif computed <= last[state]:
                code, what = "early-free", f", before its last use in {plan.schedule.rows[rank][last[state]]}"
            if code:
                text = f"Rank {rank} frees {name} at step {at}{what}."
                yield Diagnostic(code, text, excerpt=draw_steps(plan, {rank: (at, "")}))
            freed.add(state)
        for stage, microbatch in sorted(set(last) - freed):
            text = f"Rank {rank} never frees stage {stage}, micro-batch {microbatch}."
            yield Diagnostic("missing-free", text)
