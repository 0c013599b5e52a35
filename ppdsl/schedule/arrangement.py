"""Placements with a rule: loops and Vs, and orders of a chain laid onto them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from ppdsl.diagnostics import Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action, ActionKind, action_of

__all__ = ["Arrangement", "ChainOrder", "lay_chain", "loop_demand", "ring_of", "v_demand"]

ChainOrder = Callable[[int, int, int], Sequence[Sequence[Action]]]
"""Ranks, stages on each rank, micro-batches -> for each rank its actions on a chain of stages."""


class Arrangement(StrEnum):
    """Which rank holds which stage.

    `LOOP` goes round: stage `s` is on rank `s % p`. `V` goes there and back: with `2p` stages, stages `s` and
    `2p - 1 - s` share a rank. `GIVEN` is whatever the user says.
    """

    GIVEN = "given"
    LOOP = "loop"
    V = "v"


def ring_of(placement: Sequence[int], rule: Arrangement) -> tuple[int, ...] | None:
    """Return the ranks in the order in which stages first come to them, or None when `placement` breaks the rule.

    Ranks may be numbered in any order.

    >>> ring_of((0, 1, 0, 1), Arrangement.LOOP), ring_of((1, 0, 0, 1), Arrangement.V), ring_of((0, 0), Arrangement.LOOP)
    ((0, 1), (1, 0), (0,))
    >>> ring_of((0, 1, 1, 0), Arrangement.LOOP) is None
    True
    """
    ring = tuple(dict.fromkeys(placement))
    p = len(ring)
    if not p or len(placement) % p:
        return None
    if rule is Arrangement.V:
        return ring if tuple(placement) == ring + ring[::-1] else None
    return ring if tuple(placement) == ring * (len(placement) // p) else None


def loop_demand(graph: StageGraph, placement: Sequence[int], microbatches: int) -> Diagnostic | None:
    """Say what keeps a placement from being a loop; None when it is one."""
    if ring_of(placement, Arrangement.LOOP) is not None:
        return None
    p, stages = len(set(placement)), len(placement)
    if stages % p:
        low = stages - stages % p
        counts = f"{low} or {low + p}" if low else str(p)
        message = f"The schedule goes round {p} ranks, but {stages} stages do not fill whole rounds."
        return Diagnostic("placement-not-loop", message, help=f"use {counts} stages")
    return _broken("placement-not-loop", "goes round the ranks", placement, [s % p for s in range(stages)])


def v_demand(graph: StageGraph, placement: Sequence[int], microbatches: int) -> Diagnostic | None:
    """Say what keeps a placement from being a V; None when it is one."""
    if ring_of(placement, Arrangement.V) is not None:
        return None
    p, stages = len(set(placement)), len(placement)
    if stages != 2 * p:
        ranks = "1 rank" if p == 1 else f"{p} ranks"
        message = f"The schedule goes there and back over {ranks}, which takes {2 * p} stages. Found {stages}."
        help_text = f"use {2 * p} stages"
        if stages % 2 == 0:
            help_text += f", or place them on {stages // 2} {'rank' if stages == 2 else 'ranks'}"
        return Diagnostic("placement-not-v", message, help=help_text)
    wanted = [*range(p), *reversed(range(p))]
    return _broken("placement-not-v", "goes there and back over the ranks", placement, wanted)


def lay_chain(
    order: ChainOrder, graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the rows of a graph whose stages, in their order, are run as a chain.

    Any graph may be run so. All its edges lead to later stages, and a chain runs forward `s` before forward `t`, and
    backward `t` before backward `s`, whenever `s < t`: an order that a chain can follow obeys every edge that skips
    stages, forks or joins. Leaving actions out keeps that true, so stages without backward only run forward, and
    stages without weights of their own run one full backward in place of a split one.

    Args:
        order: The family's order on a chain.
        graph: The stages; their indices are a topological order.
        placement: For each stage its rank; equally many stages on each used rank.
        microbatches: At least 1.
        ranks: Number of ranks; those that the placement does not use stay idle.
    """
    ring = tuple(dict.fromkeys(placement))
    rows: list[Sequence[Action]] = [()] * ranks
    for rank, row in zip(ring, order(len(ring), len(placement) // len(ring), microbatches), strict=True):
        rows[rank] = row
    still = {stage.index for stage in graph.stages if not stage.has_backward}
    weightless = {stage.index for stage in graph.stages if not stage.trainable}
    if not still and not weightless:
        return tuple(map(tuple, rows))
    return tuple(tuple(_suited(row, still, weightless)) for row in rows)


def _suited(row: Sequence[Action], still: set[int], weightless: set[int]) -> list[Action]:
    kept = []
    for action in row:
        if action.kind is not ActionKind.FORWARD and action.stage in still:
            continue
        if action.stage in weightless:
            if action.kind is ActionKind.WEIGHT_GRAD:
                continue
            if action.kind is ActionKind.INPUT_GRAD:
                action = action_of(action.stage, ActionKind.BACKWARD, action.microbatch)
        kept.append(action)
    return kept


def _broken(code: str, rule: str, placement: Sequence[int], wanted: Sequence[int]) -> Diagnostic:
    # Ranks named in the order of their first stage are the user's own numbers.
    stage = next(s for s, (found, meant) in enumerate(zip(placement, wanted, strict=True)) if found != meant)
    message = f"The schedule {rule}, so stage {stage} belongs on rank {wanted[stage]}. Found rank {placement[stage]}."
    shown = ", ".join(map(str, wanted)) if len(wanted) <= 16 else f"{', '.join(map(str, wanted[:12]))}, ..."
    return Diagnostic(code, message, help=f"place the stages on ranks {shown}")
