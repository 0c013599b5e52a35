"""Schedule families by name, and their schedules."""

from __future__ import annotations

import difflib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.arguments import Argument, bind_arguments, split_name
from ppdsl.schedule.families import FAMILIES
from ppdsl.schedule.family import Builder, Demand, Family, Named, Rows
from ppdsl.schedule.table import Schedule
from ppdsl.units import counted

__all__ = [
    "Builder",
    "Demand",
    "Family",
    "build_schedule",
    "families",
    "is_searched",
    "named_family",
    "schedule_names",
]

_FAMILIES = FAMILIES
_SEARCHED = "auto"


def families() -> Mapping[str, Family]:
    """Return all families by name, in the order in which to show them.

    >>> list(families())[:4]
    ['1f1b', 'eager_1f1b', 'gpipe', 'interleaved_1f1b']
    """
    return MappingProxyType({family.name: family for family in _FAMILIES})


def schedule_names() -> tuple[str, ...]:
    """Return all names that users can write where a schedule is asked for; `auto` is searched by `ppdsl.search`.

    >>> schedule_names()[-3:]
    ('sequential', 'forward_only', 'auto')
    """
    return (*families(), _SEARCHED)


def is_searched(name: str) -> bool:
    """Return whether a name stands for no rule: its schedule is searched by `ppdsl.search`.

    >>> is_searched("auto(solver=5)"), is_searched("1f1b")
    (True, False)
    """
    return name.partition("(")[0].strip().casefold() == _SEARCHED


def named_family(text: str, arguments: Mapping[str, Argument] | Iterable[tuple[str, Argument]] = ()) -> Named:
    """Return the family that a name with arguments stands for.

    Args:
        text: A family's name or one of its aliases, with arguments in parentheses or without; capitals and hyphens do
            not matter.
        arguments: More arguments, by name; an argument with an empty name goes to the first parameter that is free.

    Raises:
        ScheduleError: There is no such family, or it does not take these arguments.

    >>> str(named_family("interleaved_1f1b(v=2)")), str(named_family("ZB-H2")), str(named_family("1F1B"))
    ('interleaved_1f1b(v=2)', 'zero_bubble(h2)', '1f1b')
    """
    split = split_name(text)
    if split is None:
        message = f"A schedule is a name with arguments in parentheses. Found {text!r}."
        raise ScheduleError(Diagnostic("bad-schedule-name", message, help="write for example interleaved_1f1b(v=2)"))
    name, written = split
    family, implied = _family(name)
    given = [*written, *(arguments.items() if isinstance(arguments, Mapping) else arguments)]
    values, findings = bind_arguments(family.name, family.parameters, [*implied, *given])
    if findings:
        raise ScheduleError(*findings)
    return Named(family, MappingProxyType(dict(values)))


def build_schedule(
    name: str,
    graph: StageGraph,
    placement: Sequence[int],
    microbatches: int,
    ranks: int | None = None,
    *,
    arguments: Mapping[str, Argument] | Iterable[tuple[str, Argument]] = (),
) -> Schedule:
    """Return the schedule of a family for a graph on its ranks.

    Args:
        name: A family's name, with arguments or without; capitals and hyphens do not matter.
        graph: The stages and the values between them.
        placement: For each stage its rank.
        microbatches: Number of micro-batches in a step, at least 1.
        ranks: Number of ranks; None: as many as the placement uses.
        arguments: More arguments of the family, by name.

    Raises:
        ScheduleError: There is no such family, it does not take these arguments, or it cannot be built for these sizes.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> print(build_schedule("1f1b", chain_graph(2), placement=(0, 1), microbatches=2))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    """
    named = named_family(name, arguments)
    family = named.family
    findings = [*_sizes(graph, placement, microbatches, ranks)]
    if not findings:
        findings += [found for demand in family.demands if (found := demand(graph, placement, microbatches))]
        findings = findings or [*_chunks(named, placement)]
    if findings:
        raise ScheduleError(*findings)
    count = max(placement) + 1 if ranks is None else ranks
    # How many stages each rank has is seen from the placement; only choices reach the builder.
    chosen = {key: value for key, value in named.arguments.items() if key != "v"}
    with _no_collection():
        rows = family.build(graph, placement, microbatches, count, **chosen)
        overlaps = _overlaps(family, rows, placement, microbatches)
    return Schedule(str(named), rows, tuple(placement), microbatches, not family.backward, overlaps)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking over millions of new actions again and again; they have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _family(name: str) -> tuple[Family, tuple[tuple[str, Argument], ...]]:
    known = families()
    wanted = name.strip().casefold().replace("-", "_").replace(" ", "_")
    if wanted in known:
        return known[wanted], ()
    for family in known.values():
        for alias in family.aliases:
            word, _, choice = alias.partition("=")
            if word == wanted:
                return family, (("", choice),) if choice else ()
    if wanted == _SEARCHED:
        message = "Schedule 'auto' is searched with costs and limits; no rule gives its order."
        raise ScheduleError(Diagnostic("auto-is-searched", message, help="call ppdsl.search.find_schedule"))
    near = difflib.get_close_matches(wanted, schedule_names(), n=1)
    names = ", ".join(schedule_names())
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


def _chunks(named: Named, placement: Sequence[int]) -> Iterable[Diagnostic]:
    used = len(set(placement))
    wanted = named.arguments.get("v")
    if isinstance(wanted, int) and wanted * used != len(placement):
        has = len(placement) // used
        message = (
            f"Schedule {str(named)!r} needs {counted(wanted, 'stage')} on each rank, {wanted * used} on "
            f"{counted(used, 'rank')}. Found {counted(len(placement), 'stage')}."
        )
        help_text = f"write {named.family.name}(v={has}), or use {counted(wanted * used, 'stage')}"
        yield Diagnostic("wrong-stage-count", message, help=help_text)


def _overlaps(family: Family, rows: Rows, placement: Sequence[int], microbatches: int) -> tuple[tuple[int, ...], ...]:
    if family.pairing is None:
        return ()
    pairs = family.pairing(len(set(placement)), microbatches)
    overlaps = tuple(tuple(at for at, (a, b) in enumerate(pairwise(row)) if pairs.get(a) == b) for row in rows)
    return overlaps if any(overlaps) else ()
