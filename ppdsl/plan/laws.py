"""The laws of a schedule, each a function from a schedule to findings; no finding means it is safe to lower.

1. Each stage runs each micro-batch forward once, and backward once (one B, or one I and one W; without weights to train
   I alone is enough).
2. On a rank: F before B or I, I before W.
3. The ranks' orders and the data flow together have no circle.
4. Every send has its receive, and each channel keeps its order (`verify_plan`, on the lowered plan).
5. Live activations stay within the given limits, counted or in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ppdsl.diagnostics import Diagnostic, Severity
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.coded import coded_of
from ppdsl.plan.lifetimes import peak_activations
from ppdsl.schedule.action import Action, ActionKind, action_of
from ppdsl.schedule.excerpt import draw_rows
from ppdsl.schedule.flow import flow_of
from ppdsl.schedule.progress import Blocked, run_in_order
from ppdsl.schedule.table import Schedule
from ppdsl.units import format_bytes

__all__ = ["collect", "faults_of_rows", "find_circle", "verify_schedule"]

_SHOWN = 4
_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}


def verify_schedule(
    schedule: Schedule,
    graph: StageGraph,
    *,
    limits: Sequence[int] | None = None,
    byte_limits: Sequence[int] | None = None,
) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a schedule for a graph; empty when it can be lowered and run.

    Args:
        schedule: Computations for each rank; may come from a user.
        graph: The stages and the values between them.
        limits: For each rank the most activations (stage and micro-batch) it may hold; None: no limit.
        byte_limits: For each rank the most bytes that the values entering and leaving its live stages may take
            (`peak_activations`); None: no limit.

    >>> from ppdsl.diagnostics import render_plain
    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.csv_text import from_rows
    >>> order = from_rows([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1B0", "1F0", "1B1"]])
    >>> print(render_plain(verify_schedule(order, chain_graph(2))))
    error[backward-first]: Rank 1 runs 1B0 at step 1, before 1F0 at step 2.
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F1 1B0 1F0 1B1
           |     ^^^
    help: run 1F0 before 1B0
    """
    findings = collect(_shape(schedule, graph))
    if findings:
        return findings
    coded = coded_of(schedule, graph)
    findings = () if coded.sound else faults_of_rows(schedule, graph)
    if findings:
        return findings
    circle = find_circle(schedule, graph)
    if circle is not None:
        return (circle,)
    if limits is None and byte_limits is None:
        return ()
    return collect(_limits(schedule, graph, limits, byte_limits))


def faults_of_rows(schedule: Schedule, graph: StageGraph) -> tuple[Diagnostic, ...]:
    """Return what is wrong with ranks' own orders, one action after the other: where `is_sound` says no.

    Args:
        schedule: A schedule for as many stages as the graph has.
        graph: The stages and the values between them.
    """
    findings = collect(_actions(schedule, graph)) or collect(_missing(schedule, graph))
    return findings or collect(_own_order(schedule))


def collect(findings: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return findings with only the first few of each kind, and a note for the rest."""
    kept: list[Diagnostic] = []
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.code] += 1
        if seen[finding.code] <= _SHOWN:
            kept.append(finding)
    for code, count in seen.items():
        if count > _SHOWN:
            noun = "finding" if count == _SHOWN + 1 else "findings"
            message = f"{count - _SHOWN} more {noun} of this kind are not shown."
            kept.append(Diagnostic(code, message, severity=Severity.NOTE))
    return tuple(kept)


def find_circle(schedule: Schedule, graph: StageGraph) -> Diagnostic | None:
    """Return the circle of ranks that wait for each other's computations, drawn; None when all can run."""
    if coded_of(schedule, graph).order is not None:
        return None
    flow = flow_of(graph)
    progress = run_in_order(schedule.rows, flow.needs, flow.makes)
    cycle = progress.cycle
    if not cycle:
        return None
    ranks = sorted(blocked.rank for blocked in cycle)
    rows = schedule.rows
    marks = {b.rank: (b.position, _reason(rows, b)) for b in cycle}
    first = min(cycle, key=lambda blocked: blocked.rank)
    stopped, needed = rows[first.rank][first.position], _giver(rows, first)
    if len(ranks) == 1:
        message = f"Rank {ranks[0]} waits for itself: {stopped} needs {needed}, which it runs later."
    else:
        named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        message = f"Ranks {named} wait for each other: {stopped} needs {needed}, which never runs."
    return Diagnostic("deadlock", message, help="run first what others wait for", excerpt=draw_rows(rows, marks))


def _shape(schedule: Schedule, graph: StageGraph) -> Iterable[Diagnostic]:
    stages, placed, ranks = len(graph.stages), len(schedule.placement), schedule.ranks
    if placed != stages:
        message = f"The schedule is for {placed} stages, but the model has {stages}."
        yield Diagnostic("wrong-stage-count", message, help=f"write an order for stages 0 to {stages - 1}")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < ranks:
            message = f"Stage {stage} is on rank {rank}, but the schedule has {ranks} ranks."
            yield Diagnostic("unknown-rank", message, help=f"use a rank from 0 to {ranks - 1}")
    rank_of: dict[int | str, int] = {}
    for stage_, rank in zip(graph.stages, schedule.placement, strict=False):
        first = rank_of.setdefault(stage_.key, rank)
        if first != rank:
            message = f"Stage {stage_.label} is on rank {rank}, but an earlier visit of it is on rank {first}."
            yield Diagnostic("split-visits", message, help=f"run all visits of stage {stage_.key} on one rank")


def _actions(schedule: Schedule, graph: StageGraph) -> Iterable[Diagnostic]:
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for step, action in enumerate(row):
            marks = {rank: (step, "")}
            if not 0 <= action.stage < len(graph.stages):
                message = f"Rank {rank} runs {action} at step {step}, but the stages are 0 to {len(graph.stages) - 1}."
                yield Diagnostic("unknown-stage", message, excerpt=draw_rows(schedule.rows, marks))
                continue
            if not 0 <= action.microbatch < schedule.microbatches:
                last = schedule.microbatches - 1
                message = f"Rank {rank} runs {action} at step {step}, but the micro-batches are 0 to {last}."
                yield Diagnostic("unknown-microbatch", message, excerpt=draw_rows(schedule.rows, marks))
                continue
            home = schedule.placement[action.stage]
            if rank != home:
                message = f"Rank {rank} runs {action} at step {step}, but stage {action.stage} is on rank {home}."
                help_text = f"move {action} to rank {home}"
                yield Diagnostic("misplaced-action", message, help=help_text, excerpt=draw_rows(schedule.rows, marks))
            if action in seen:
                message = f"Rank {rank} runs {action} again at step {step}."
                excerpt = draw_rows(schedule.rows, marks)
                yield Diagnostic("duplicate-action", message, help="run it once", excerpt=excerpt)
            seen.add(action)
            has_backward = graph.stages[action.stage].has_backward and not schedule.forward_only
            if action.kind is not ActionKind.FORWARD and not has_backward:
                label = graph.stages[action.stage].label
                reason = "the schedule is forward only" if schedule.forward_only else f"stage {label} has no backward"
                message = f"Rank {rank} runs {action} at step {step}, but {reason}."
                excerpt = draw_rows(schedule.rows, marks)
                yield Diagnostic("needless-backward", message, help=f"leave {action} out", excerpt=excerpt)


def _missing(schedule: Schedule, graph: StageGraph) -> Iterable[Diagnostic]:
    seen = {action for row in schedule.rows for action in row}
    for stage in graph.stages:
        backward = stage.has_backward and not schedule.forward_only
        missed: dict[ActionKind, list[int]] = {}
        for m in range(schedule.microbatches):
            has = {kind for kind in ActionKind if action_of(stage.index, kind, m) in seen}
            split = has & {ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD}
            if ActionKind.BACKWARD in has and split:
                part = action_of(stage.index, min(split), m)
                message = f"Stage {stage.label} runs both {stage.index}B{m} and {part}."
                yield Diagnostic("mixed-backward", message, help="run one B, or one I and one W")
                has |= set(ActionKind)
            for kind in _wanted(backward=backward, split=bool(split), trainable=stage.trainable) - has:
                missed.setdefault(kind, []).append(m)
        for kind, microbatches in sorted(missed.items()):
            noun = "micro-batch" if len(microbatches) == 1 else "micro-batches"
            message = f"Stage {stage.label} never runs the {_WORDS[kind]} of {noun} {_listed(microbatches)}."
            rank = schedule.placement[stage.index]
            help_text = f"add {action_of(stage.index, kind, microbatches[0])} to rank {rank}"
            yield Diagnostic("missing-action", message, help=help_text)


def _wanted(*, backward: bool, split: bool, trainable: bool) -> set[ActionKind]:
    if not backward:
        return {ActionKind.FORWARD}
    if split:
        weights = {ActionKind.WEIGHT_GRAD} if trainable else set()
        return {ActionKind.FORWARD, ActionKind.INPUT_GRAD} | weights
    return {ActionKind.FORWARD, ActionKind.BACKWARD}


def _own_order(schedule: Schedule) -> Iterable[Diagnostic]:
    kinds = (
        (ActionKind.BACKWARD, ActionKind.FORWARD, "backward-first"),
        (ActionKind.INPUT_GRAD, ActionKind.FORWARD, "backward-first"),
        (ActionKind.WEIGHT_GRAD, ActionKind.INPUT_GRAD, "weight-first"),
    )
    for rank, row in enumerate(schedule.rows):
        at = {action: step for step, action in enumerate(row)}
        for step, action in enumerate(row):
            for late, early, code in kinds:
                if action.kind is not late:
                    continue
                before = Action(action.stage, early, action.microbatch)
                if at[before] > step:
                    message = f"Rank {rank} runs {action} at step {step}, before {before} at step {at[before]}."
                    excerpt = draw_rows(schedule.rows, {rank: (step, "")})
                    yield Diagnostic(code, message, help=f"run {before} before {action}", excerpt=excerpt)


def _limits(
    schedule: Schedule, graph: StageGraph, limits: Sequence[int] | None, byte_limits: Sequence[int] | None
) -> Iterable[Diagnostic]:
    peaks = peak_activations(schedule, graph)
    for peak, limit in zip(peaks, limits, strict=True) if limits is not None else ():
        if peak.count > limit and peak.action is not None:
            what = f"{peak.count} activations", str(limit)
            yield _too_much(schedule, "too-many-activations", peak.rank, peak.action, *what)
    for peak, limit in zip(peaks, byte_limits, strict=True) if byte_limits is not None else ():
        if peak.bytes > limit and peak.largest is not None:
            what = f"{format_bytes(peak.bytes)} of activations", format_bytes(limit)
            yield _too_much(schedule, "too-many-bytes", peak.rank, peak.largest, *what)


def _too_much(schedule: Schedule, code: str, rank: int, action: Action, held: str, limit: str) -> Diagnostic:
    step = schedule.rows[rank].index(action)
    message = f"Rank {rank} holds {held} at {action}, step {step}; its limit is {limit}."
    excerpt = draw_rows(schedule.rows, {rank: (step, "")})
    return Diagnostic(code, message, help="run backwards earlier, or raise the limit", excerpt=excerpt)


def _giver(rows: Sequence[Sequence[Action]], blocked: Blocked) -> str:
    if blocked.giver is None:
        return str(blocked.need)
    rank, position = blocked.giver
    return str(rows[rank][position])


def _reason(rows: Sequence[Sequence[Action]], blocked: Blocked) -> str:
    rank = "?" if blocked.giver is None else str(blocked.giver[0])
    return f"waits for {_giver(rows, blocked)} of rank {rank}"


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if len(numbers) > 5:
        return f"{', '.join(map(str, numbers[:4]))} and {len(numbers) - 4} more"
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
