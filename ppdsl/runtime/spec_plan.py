"""Schedule and placement that a spec declares, worked out for a graph. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ppdsl.contracts.measuring import state_of
from ppdsl.diagnostics import Diagnostic, Label, ScheduleError, SpecError
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.placement import place
from ppdsl.runtime.arranging import placement_for, ranks_wanted
from ppdsl.schedule.arrangement import Arrangement
from ppdsl.schedule.csv_text import from_rows, parse_csv
from ppdsl.schedule.registry import is_searched, named_family
from ppdsl.schedule.table import Schedule
from ppdsl.search.auto import find_schedule
from ppdsl.search.memory import Memory
from ppdsl.simulation.costs import flop_costs
from ppdsl.spec.assigning import key_spans
from ppdsl.spec.partition import Partition, ScheduleDecl
from ppdsl.spec.placing import known_ranks

__all__ = ["plan_spec", "room_of", "schedule_of", "spec_placement"]

Key = int | str


def schedule_of(declared: ScheduleDecl, folder: Path) -> str | Schedule:
    """Return a declared schedule: a family's name with its arguments, or the order of a file or of the spec.

    Args:
        declared: What the spec says.
        folder: Where its CSV file is looked for.

    Raises:
        ScheduleError: The file or the order is no schedule.
    """
    if declared.file is not None:
        path = folder / declared.file
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"The schedule file {path} cannot be read: {error}."
            finding = Diagnostic("unreadable-file", message, (Label(declared.span),), "give a CSV file of actions")
            raise ScheduleError(finding) from None
        return parse_csv(text, name=str(path))
    if declared.order is not None:
        return from_rows(declared.order.rows, name="order of the spec")
    name = declared.family or "1f1b"
    if not declared.arguments:
        return name
    return f"{name}({', '.join(f'{key}={value}' if key else str(value) for key, value in declared.arguments)})"


def spec_placement(
    partition: Partition,
    graph: StageGraph,
    given: Mapping[Key, int],
    schedule: str | Schedule,
    ranks: int | None = None,
) -> dict[Key, int]:
    """Return the rank of each stage key; where the spec says nothing, by the rule of the schedule.

    Args:
        partition: The spec.
        graph: The stages.
        given: Ranks that the spec declares.
        schedule: The schedule.
        ranks: Number of ranks when the spec does not say.

    Raises:
        GraphError: The stages cannot be placed.
        SpecError: The spec places a stage elsewhere than its own order does.
    """
    keys = list(dict.fromkeys(stage.key for stage in graph.stages))
    if isinstance(schedule, Schedule):
        return _placed_by(schedule, partition, graph, given)
    named = None if is_searched(schedule) else named_family(schedule)
    count = known_ranks(partition) or ranks or (len(keys) if named is None else ranks_wanted(named, len(keys)))
    chosen = {key: position % count for position, key in enumerate(keys)}
    if named is not None and named.family.arrangement is not Arrangement.GIVEN and not given:
        found = placement_for(named, graph, count)
        chosen = {stage.key: rank for stage, rank in zip(graph.stages, found, strict=True)}
    return chosen | {key: rank for key, rank in given.items() if key in chosen}


def plan_spec(
    partition: Partition, graph: StageGraph, given: Mapping[Key, int], ranks: int | None = None
) -> tuple[tuple[int, ...], Schedule]:
    """Return for each stage its rank, and the schedule that the spec declares.

    Args:
        partition: The spec.
        graph: The stages.
        given: Ranks that the spec declares.
        ranks: Number of ranks when the spec does not say.

    Raises:
        GraphError: The stages cannot be placed.
        ScheduleError: The schedule does not fit the graph.
        SpecError: The spec places a stage elsewhere than its own order does.
    """
    declared = partition.schedule
    schedule = "1f1b" if declared is None else schedule_of(declared, Path(partition.file).parent)
    placement = spec_placement(partition, graph, given, schedule, ranks)
    count = max(known_ranks(partition) or ranks or 1, *(rank + 1 for rank in placement.values()))
    ranks_of = place(graph, count, placement, allow_idle=True)
    if isinstance(schedule, Schedule):
        findings = verify_schedule(schedule, graph)
        if findings:
            raise ScheduleError(*findings)
        return ranks_of, schedule
    microbatches = partition.settings.microbatches or len(placement)
    room = room_of(partition, graph, ranks_of, count)
    found = find_schedule(schedule, graph, ranks_of, microbatches, count, flop_costs(graph), memory=room)
    return ranks_of, found.schedule


def room_of(partition: Partition, graph: StageGraph, placement: Sequence[int], ranks: int) -> Memory | None:
    """Return what a spec's memory limit leaves on each rank for the values between stages; None without a limit.

    Parameters and gradients are there for the whole step.

    Args:
        partition: The spec.
        graph: The stages.
        placement: Rank of each stage.
        ranks: Number of ranks.
    """
    limit = partition.settings.memory
    if limit is None:
        return None
    held = (state_of([s for s in graph.stages if placement[s.index] == rank]) for rank in range(ranks))
    return Memory.of_bytes([max(0, limit - state) for state in held], graph, placement)


def _placed_by(schedule: Schedule, partition: Partition, graph: StageGraph, given: Mapping[Key, int]) -> dict[Key, int]:
    """The placement of an order: a stage stands in the row of its rank.

    Raises:
        SpecError: The spec places a stage elsewhere.
    """
    chosen: dict[Key, int] = {}
    for stage, rank in zip(graph.stages, schedule.placement, strict=False):
        chosen.setdefault(stage.key, rank)
        wanted = given.get(stage.key)
        if wanted is not None and wanted != rank:
            message = f"Stage {stage.key} is placed on rank {wanted}, but {schedule.name} runs it on rank {rank}."
            span = key_spans(partition).get(stage.key)
            labels = () if span is None else (Label(span),)
            raise SpecError(Diagnostic("placement-differs", message, labels, f"write @ {rank}, or leave the rank out"))
    return chosen
