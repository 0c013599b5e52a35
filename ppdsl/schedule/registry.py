"""Schedule families by name: the builder of each, and what it demands."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.forward_only import forward_only
from ppdsl.schedule.gpipe import gpipe
from ppdsl.schedule.one_f_one_b import one_f_one_b
from ppdsl.schedule.sequential import sequential
from ppdsl.schedule.table import Schedule

__all__ = ["Builder", "Demand", "Family", "build_schedule", "families"]

Demand = Callable[[StageGraph, Sequence[int], int], Diagnostic | None]
"""Graph, placement, micro-batches -> what is wrong with them for this family, or None."""


class Builder(Protocol):
    """A pure function from sizes to rows; what else a family depends on is bound beforehand (`functools.partial`)."""

    def __call__(
        self, graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int
    ) -> tuple[tuple[Action, ...], ...]:
        """Return for each rank its actions in order."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule family.

    Attributes:
        name: What users write.
        build: The builder.
        summary: A few words for lists and help.
        backward: Whether it has backwards.
        splits_backward: Whether its backwards are split into I and W.
        demands: What must hold of graph, placement and micro-batches before it can be built.
    """

    name: str
    build: Builder
    summary: str
    backward: bool = True
    splits_backward: bool = False
    demands: tuple[Demand, ...] = ()


_FAMILIES = (
    Family("1f1b", one_f_one_b, "warm up by depth, then one forward, one backward; least memory"),
    Family("gpipe", gpipe, "all forwards, then all backwards"),
    Family("sequential", sequential, "one micro-batch after the other, as a plain loop; for debugging"),
    Family("forward_only", forward_only, "no backward; what evaluate runs", backward=False),
)


def families() -> Mapping[str, Family]:
    """Return all families by name, in the order in which to show them.

    >>> list(families())
    ['1f1b', 'gpipe', 'sequential', 'forward_only']
    """
    return MappingProxyType({family.name: family for family in _FAMILIES})


def build_schedule(
    name: str, graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int | None = None
) -> Schedule:
    """Return the schedule of a family for a graph on its ranks.

    Args:
        name: A family's name; capitals and hyphens do not matter.
        graph: The stages and the values between them.
        placement: For each stage its rank.
        microbatches: Number of micro-batches in a step, at least 1.
        ranks: Number of ranks; None: as many as the placement uses.

    Raises:
        ScheduleError: There is no such family, or it cannot be built for these sizes.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> print(build_schedule("1f1b", chain_graph(2), placement=(0, 1), microbatches=2))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    """
    family = _family(name)
    findings = [*_sizes(graph, placement, microbatches, ranks)]
    if not findings:
        findings += [found for demand in family.demands if (found := demand(graph, placement, microbatches))]
    if findings:
        raise ScheduleError(*findings)
    count = max(placement) + 1 if ranks is None else ranks
    rows = family.build(graph, placement, microbatches, count)
    return Schedule(family.name, rows, tuple(placement), microbatches, forward_only=not family.backward)


def _family(name: str) -> Family:
    known = families()
    wanted = name.strip().casefold().replace("-", "_")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1)
    names = ", ".join(known)
    help_text = f"did you mean {near[0]!r}? all schedules: {names}" if near else f"one of: {names}"
    raise ScheduleError(Diagnostic("unknown-schedule", f"There is no schedule named {name!r}.", help=help_text))


def _sizes(graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int | None) -> list[Diagnostic]:
    findings = []
    if microbatches < 1:
        message = f"A step of {microbatches} micro-batches has nothing to run."
        findings.append(Diagnostic("no-microbatches", message, help="use at least 1 micro-batch"))
    if len(placement) != len(graph.stages):
        message = f"The placement has {len(placement)} ranks for {len(graph.stages)} stages."
        findings.append(Diagnostic("placement-length", message, help="give one rank for each stage"))
    count = max(placement, default=0) + 1 if ranks is None else ranks
    for stage, rank in enumerate(placement):
        if not 0 <= rank < count:
            noun = "rank" if count == 1 else "ranks"
            message = f"Stage {stage} is on rank {rank}, but there are {count} {noun}."
            findings.append(Diagnostic("unknown-rank", message, help=f"use a rank from 0 to {count - 1}"))
    return findings
