"""Which rank gets which stage when the user does not say: the rule of the schedule's family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.placement import place
from ppdsl.schedule.arrangement import Arrangement
from ppdsl.schedule.family import Named

__all__ = ["placement_for", "placement_for_search", "ranks_wanted"]


def ranks_wanted(named: Named, keys: int) -> int:
    """Return how many ranks a family takes for so many stage keys, when nothing limits it.

    A V has two stages on each rank. A loop has as many as its argument `v` says; without it two where that comes out
    even and leaves more than one rank. All others have one.

    >>> from ppdsl.schedule.registry import named_family
    >>> [ranks_wanted(named_family(name), 8) for name in ("1f1b", "zbv", "interleaved_1f1b", "interleaved_1f1b(v=4)")]
    [8, 4, 4, 2]
    """
    if named.family.arrangement is Arrangement.GIVEN:
        return keys
    chunks = named.chunks or (2 if keys % 2 == 0 and keys > 2 else 1)
    return -(-keys // chunks)


def placement_for(
    named: Named, graph: StageGraph, ranks: int, placement: Mapping[int | str, int] | None = None
) -> tuple[int, ...]:
    """Return for each stage its rank: what the user says, or else the loop or the V that the family goes.

    Args:
        named: The family.
        graph: The stages.
        ranks: Number of ranks.
        placement: For each stage key its rank, or None.

    Raises:
        GraphError: The placement does not fit the stages, or there are more keys than ranks and the family has no rule.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.schedule.registry import named_family
    >>> placement_for(named_family("zbv"), chain_graph(4), ranks=2)
    (0, 1, 1, 0)
    >>> placement_for(named_family("interleaved_1f1b"), chain_graph(4), ranks=2)
    (0, 1, 0, 1)
    """
    rule = named.family.arrangement
    if placement is None and rule is not Arrangement.GIVEN:
        keys = list(dict.fromkeys(stage.key for stage in graph.stages))
        used = min(ranks, ranks_wanted(named, len(keys)) if rule is Arrangement.V else len(keys))
        placement = _arranged(keys, used, rule)
    return place(graph, ranks, placement, allow_idle=True)


def placement_for_search(
    graph: StageGraph, ranks: int, placement: Mapping[int | str, int] | None = None
) -> tuple[int, ...]:
    """Return for each stage its rank where the schedule is searched: one stage on each rank, else a V, else a loop.

    It depends on the keys alone, so that what trains and what evaluates find the same one.

    Args:
        graph: The stages.
        ranks: Number of ranks.
        placement: For each stage key its rank, or None.

    Raises:
        GraphError: The placement does not fit the stages.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> [placement_for_search(chain_graph(4), ranks) for ranks in (4, 2, 3)]
    [(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 2, 0)]
    """
    keys = list(dict.fromkeys(stage.key for stage in graph.stages))
    if placement is None and len(keys) > ranks:
        placement = _arranged(keys, ranks, Arrangement.V if len(keys) == 2 * ranks else Arrangement.LOOP)
    return place(graph, ranks, placement, allow_idle=True)


def _arranged(keys: Sequence[int | str], ranks: int, rule: Arrangement) -> dict[int | str, int]:
    return {key: _rank(number, ranks, rule) for number, key in enumerate(keys)}


def _rank(number: int, ranks: int, rule: Arrangement) -> int:
    if rule is Arrangement.V and number >= ranks:
        # What does not fit into one V is refused when the schedule is built.
        return max(0, 2 * ranks - 1 - number)
    return number % ranks
