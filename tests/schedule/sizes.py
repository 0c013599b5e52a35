"""Families on chains of equal stages, and how many activations a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule import ActionKind, Schedule, build_schedule, flow_of
from ppdsl.schedule.arrangement import Arrangement
from ppdsl.schedule.csv_cells import joined
from ppdsl.schedule.flow import Made
from ppdsl.schedule.registry import named_family

__all__ = ["Times", "live_peaks", "on_chain", "paired_times"]


@dataclass(frozen=True)
class Times:
    """Of a step in which overlapped actions start together and end together."""

    makespan: int
    spans: list[int]
    idle: list[int]


def on_chain(name: str, p: int, m: int, v: int = 1) -> tuple[Schedule, StageGraph]:
    """Build a family on a chain, on the placement it asks for."""
    ring = tuple(range(p))
    vee = named_family(name).family.arrangement is Arrangement.V
    placement = ring + ring[::-1] if vee else ring * v
    graph = chain_graph(len(placement))
    return build_schedule(name, graph, placement, m), graph


def live_peaks(schedule: Schedule, *, until: str) -> list[int]:
    """For each rank the most pairs of stage and micro-batch from F until the end of W, or of I (B ends both)."""
    ends = {ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD if until == "W" else ActionKind.INPUT_GRAD}
    peaks = []
    for row in schedule.rows:
        live = most = 0
        for action in row:
            live += action.kind is ActionKind.FORWARD
            most = max(most, live)
            live -= action.kind in ends
        peaks.append(most)
    return peaks


def paired_times(schedule: Schedule, graph: StageGraph, *, f: int = 1, i: int = 1, w: int = 1) -> Times:
    """Simulate pairs as one action of `f + i + w` that needs and gives what both of its parts do."""
    flow = flow_of(graph)
    cost = {"F": f, "I": i, "W": w, "B": i + w}
    groups = [joined(row, pairs) for row, pairs in zip(schedule.rows, schedule.overlaps, strict=True)]
    end: dict[Made, int] = {}
    free, first, busy, position = ([0] * schedule.ranks for _ in range(4))
    while any(at < len(row) for at, row in zip(position, groups, strict=True)):
        for rank, row in enumerate(groups):
            while position[rank] < len(row):
                group = row[position[rank]]
                needs = [need for action in group for need in flow.needs(action)]
                if any(need not in end for need in needs):
                    break
                start = max([free[rank], *(end[need] for need in needs)])
                length = sum(cost[action.kind.value] for action in group)
                first[rank] = first[rank] if position[rank] else start
                free[rank] = start + length
                busy[rank] += length
                position[rank] += 1
                end |= {made: free[rank] for action in group if (made := flow.makes(action)) is not None}
    spans = [e - s for s, e in zip(first, free, strict=True)]
    return Times(max(free), spans, [span - work for span, work in zip(spans, busy, strict=True)])
