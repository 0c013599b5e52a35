"""The schedule that a name stands for, on the ranks there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.runtime.arranging import placement_for, placement_for_search, ranks_wanted
from ppdsl.runtime.world import World
from ppdsl.schedule.action import parse_action
from ppdsl.schedule.registry import build_schedule, is_searched, named_family
from ppdsl.schedule.table import Schedule
from ppdsl.search.auto import find_schedule
from ppdsl.search.memory import Memory
from ppdsl.simulation.costs import Costs

__all__ = ["choose_schedule", "search_schedule"]


def choose_schedule(
    name: str,
    graph: StageGraph,
    microbatches: int,
    world: World,
    placement: Mapping[int | str, int] | None,
    *,
    backward: bool = True,
) -> Schedule:
    """Return the schedule of a step.

    Args:
        name: A family's name, or `auto`, which takes the shortest that is found for equal stages.
        graph: The stages.
        microbatches: Number of micro-batches.
        world: The ranks.
        placement: Rank of each stage key; None: as the family goes.
        backward: Whether the step has a backward; without it the forward-only schedule runs on the same placement.

    Raises:
        GraphError: The placement does not fit the stages.
        ScheduleError: The schedule does not fit the graph.
    """
    keys = len({stage.key for stage in graph.stages})
    if not is_searched(name):
        named = named_family(name)
        ranks = world.ranks_for(ranks_wanted(named, keys), placement)
        ranks_of = placement_for(named, graph, ranks, placement)
        return build_schedule(name if backward else "forward_only", graph, ranks_of, microbatches, ranks)
    ranks = world.ranks_for(keys, placement)
    ranks_of = placement_for_search(graph, ranks, placement)
    if not backward:
        return build_schedule("forward_only", graph, ranks_of, microbatches, ranks)
    return search_schedule(name, graph, ranks_of, microbatches, ranks, world)


def search_schedule(
    name: str,
    graph: StageGraph,
    ranks_of: Sequence[int],
    microbatches: int,
    ranks: int,
    world: World,
    costs: Costs | None = None,
    memory: Memory | None = None,
) -> Schedule:
    """Return the schedule that all processes take for `auto`.

    Args:
        name: `auto`, with arguments or without.
        graph: The stages.
        ranks_of: For each stage its rank.
        microbatches: Number of micro-batches.
        ranks: Number of ranks.
        world: The ranks; all of them must come here.
        costs: What it is searched for; None: equal stages.
        memory: What ranks may hold of the values between stages; None: any amount.

    Raises:
        ScheduleError: Nothing fits the graph, or the memory.
    """
    found = find_schedule(name, graph, ranks_of, microbatches, ranks, costs, memory=memory).schedule
    # The solver stops by the clock, so each process may have found another one.
    return _of_first_process(found, world) if "(" in name else found


def _of_first_process(schedule: Schedule, world: World) -> Schedule:
    """Return the schedule that the process of rank 0 has found."""
    text = "\n".join([schedule.name, *(" ".join(map(str, row)) for row in schedule.rows)])
    name, *rows = world.gather(text)[0].split("\n")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule(name, actions, schedule.placement, schedule.microbatches)
