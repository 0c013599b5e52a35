"""Schedules that no family builds, as users would write them: two copies of the weights, and parts of sequences.

They break the law that every stage runs every micro-batch, so they are simulated and not run.
"""

from __future__ import annotations

from dataclasses import replace

from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.schedule import Action, ActionKind, Schedule, action_of, build_schedule, from_rows

__all__ = ["chimera", "dualpipe", "seq1f1b"]

Own = tuple[Schedule, StageGraph]


def chimera(depth: int, m: int) -> Own:
    """Half of the micro-batches go down the ranks and half go up, in fixed slots; `m == depth`."""
    rows = []
    for rank in range(depth):
        slots: list[tuple[int, str]] = []
        for j in range(m // 2):
            slots += [(rank + 2 * j, f"{rank}F{j}"), (2 * depth - 1 - rank + 2 * j, f"{rank}B{j}")]
            up = depth - 1 - rank
            slots += [(up + 2 * j, f"{depth + up}F{j}"), (2 * depth - 1 - up + 2 * j, f"{depth + up}B{j}")]
        rows.append([cell for _, cell in sorted(slots)])
    return from_rows(rows), _two_chains(depth)


def dualpipe(ranks: int, m: int) -> Own:
    """DualPipeV without the V: what a rank does for the far half of the model, it does for the other copy."""
    half = ranks // 2
    placement = (*range(half), *reversed(range(half)))
    inner = build_schedule("dualpipev", chain_graph(ranks), placement, m // 2)
    rows = []
    for rank in range(ranks):
        mirrored = rank >= half
        row = inner.rows[ranks - 1 - rank if mirrored else rank]
        rows.append([_moved(action, ranks if (action.stage < half) == mirrored else 0) for action in row])
    overlaps = inner.overlaps + inner.overlaps[::-1]
    return replace(from_rows(rows), overlaps=overlaps), _two_chains(ranks)


def seq1f1b(p: int, m: int, k: int) -> Own:
    """A micro-batch in `k` parts of its sequence: forwards in order, backwards of a micro-batch's parts reversed."""
    rows = []
    forwards = range(m * k)
    backwards = [j * k + part for j in range(m) for part in reversed(range(k))]
    for rank in range(p):
        warm = min(m * k, p - rank - 2 + k)
        row = [action_of(rank, ActionKind.FORWARD, x) for x in forwards[:warm]]
        for f, b in zip(forwards[warm:], backwards, strict=False):
            row += [action_of(rank, ActionKind.FORWARD, f), action_of(rank, ActionKind.BACKWARD, b)]
        row += [action_of(rank, ActionKind.BACKWARD, b) for b in backwards[m * k - warm :]]
        rows.append(row)
    return from_rows(rows), chain_graph(p)


def _moved(action: Action, by: int) -> Action:
    return action_of(action.stage + by, action.kind, action.microbatch)


def _two_chains(depth: int) -> StageGraph:
    pairs = [(s, (s + 1,)) for s in range(2 * depth - 1) if s != depth - 1]
    return shape_graph(2 * depth, pairs)
