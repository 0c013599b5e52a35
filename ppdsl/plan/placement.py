"""Which rank holds which stage."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ppdsl.diagnostics import Diagnostic, GraphError, Label
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.arrangement import Arrangement
from ppdsl.units import counted

__all__ = ["place", "place_by_rule"]


def place(
    graph: StageGraph,
    ranks: int,
    placement: Mapping[int | str, int] | None = None,
    *,
    allow_idle: bool = False,
) -> tuple[int, ...]:
    """Return for each stage its rank; all visits of one stage key get the same one.

    Without `placement` each key gets a rank of its own, in the order of first appearance. More keys than ranks are
    never folded silently: who shares a rank decides speed and memory, so it has to be said.

    Args:
        graph: The stages.
        ranks: Number of ranks, at least 1.
        placement: For each stage key its rank, or None.
        allow_idle: Whether ranks may be left without a stage.

    Raises:
        GraphError: More keys than ranks without a placement, a key without rank, an unknown key, a rank that does not
            exist, or a rank without a stage.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> place(chain_graph(3), ranks=3)
    (0, 1, 2)
    >>> place(chain_graph(4), ranks=2, placement={0: 0, 1: 1, 2: 0, 3: 1})
    (0, 1, 0, 1)
    """
    keys = list(dict.fromkeys(stage.key for stage in graph.stages))
    if placement is None:
        _check_count(graph, keys, ranks)
        chosen = {key: rank for rank, key in enumerate(keys)}
    else:
        findings = _check_mapping(graph, keys, ranks, placement)
        if findings:
            raise GraphError(*findings)
        chosen = dict(placement)
    idle = sorted(set(range(ranks)) - set(chosen.values()))
    if idle and not allow_idle:
        raise GraphError(_idle(idle, len(keys), ranks))
    return tuple(chosen[stage.key] for stage in graph.stages)


def place_by_rule(graph: StageGraph, ranks: int, rule: Arrangement) -> tuple[int, ...]:
    """Return for each stage its rank by the rule that a schedule family asks for (`Family.arrangement`).

    Args:
        graph: The stages.
        ranks: Number of ranks, at least 1.
        rule: A loop puts stage `s` on rank `s % ranks`, a V goes there and back; without a rule see `place`.

    Raises:
        GraphError: The stages do not fill the rule's rounds, or visits of one stage would lie on several ranks.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> place_by_rule(chain_graph(4), 2, Arrangement.LOOP), place_by_rule(chain_graph(4), 2, Arrangement.V)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    if rule is Arrangement.GIVEN:
        return place(graph, ranks)
    count = len(graph.stages)
    if rule is Arrangement.V:
        turn = [*range(ranks), *reversed(range(ranks))]
        ring, whole, wanted = (turn * count)[:count], count == 2 * ranks, f"{2 * ranks} stages"
    else:
        ring, whole = [stage % ranks for stage in range(count)], count % ranks == 0
        low = count - count % ranks
        wanted = f"{low} or {low + ranks} stages" if low else counted(ranks, "stage")
    if not whole:
        shape = "a V" if rule is Arrangement.V else "a loop"
        message = f"{counted(count, 'stage')} do not make {shape} over {counted(ranks, 'rank')}."
        raise GraphError(Diagnostic(f"placement-not-{rule.value}", message, help=f"use {wanted}"))
    home: dict[int | str, int] = {}
    for stage, rank in zip(graph.stages, ring, strict=True):
        if home.setdefault(stage.key, rank) != rank:
            message = f"The schedule puts stage {stage.label} on rank {rank}, but its first visit on {home[stage.key]}."
            labels = (Label(stage.span),) if stage.span else ()
            help_text = "use a schedule that takes any placement, such as 1f1b"
            raise GraphError(Diagnostic("split-visits", message, labels=labels, help=help_text))
    return tuple(ring)


def _check_count(graph: StageGraph, keys: list[int | str], ranks: int) -> None:
    if len(keys) <= ranks:
        return
    extra = next(stage for stage in graph.stages if stage.key == keys[ranks])
    loop = ", ".join(f"{key!r}: {index % ranks}" for index, key in enumerate(keys))
    message = f"The model has {len(keys)} stages, but there {_are(ranks)}, and no placement says who shares one."
    help_text = f"run on {len(keys)} ranks, or give a placement such as placement={{{loop}}}"
    labels = (Label(extra.span, f"stage {extra.key!r} has no rank"),) if extra.span else ()
    raise GraphError(Diagnostic("more-stages-than-ranks", message, labels=labels, help=help_text))


def _check_mapping(
    graph: StageGraph, keys: list[int | str], ranks: int, placement: Mapping[int | str, int]
) -> list[Diagnostic]:
    findings = []
    spans = {stage.key: stage.span for stage in reversed(graph.stages)}
    for key, rank in placement.items():
        if key not in spans:
            # 1 and "1" are different keys and look alike in print, so repr is compared and shown.
            near = difflib.get_close_matches(str(key), [str(known) for known in keys], n=1)
            meant = next((known for known in keys if near and str(known) == near[0]), None)
            listed = "one of: " + ", ".join(map(repr, keys))
            help_text = listed if meant is None else f"did you mean {meant!r}? {listed}"
            message = f"The placement names stage {key!r}, which the model does not have."
            findings.append(Diagnostic("unknown-stage", message, help=help_text))
        elif not 0 <= rank < ranks:
            help_text = f"use a rank from 0 to {ranks - 1}, or run on more ranks" if ranks > 1 else "use rank 0"
            message = f"Stage {key!r} is on rank {rank}, but there {_are(ranks)}."
            span = spans[key]
            labels = (Label(span),) if span else ()
            findings.append(Diagnostic("unknown-rank", message, labels=labels, help=help_text))
    missing = [key for key in keys if key not in placement]
    if missing:
        named = ", ".join(map(repr, missing))
        noun = "stage" if len(missing) == 1 else "stages"
        message = f"The placement has no rank for {noun} {named}."
        findings.append(Diagnostic("stage-without-rank", message, help=f"add {missing[0]!r}: RANK to it"))
    return findings


def _idle(idle: list[int], keys: int, ranks: int) -> Diagnostic:
    used = ranks - len(idle)
    noun, verb = ("Rank", "has") if len(idle) == 1 else ("Ranks", "have")
    named = ", ".join(map(str, idle))
    stages = "1 stage" if keys == 1 else f"{keys} stages"
    message = f"{noun} {named} {verb} no stage: the model has {stages}, and there {_are(ranks)}."
    return Diagnostic(
        "idle-ranks", message, help=f"run on {used} {'rank' if used == 1 else 'ranks'}, or mark more stages"
    )


def _are(ranks: int) -> str:
    return "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
