"""Ranks of stages as a spec writes them, and whether these ranks exist and are all used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.cuts import Key
from ppdsl.spec.partition import Options, Partition
from ppdsl.units import counted

__all__ = ["check_ranks", "known_ranks", "stage_options", "stage_ranks"]


def stage_ranks(partition: Partition) -> dict[Key, tuple[int, ...]]:
    """Return for each key that the spec places its ranks."""
    return {key: ranks for key, ranks, _ in _placed(partition)}


def stage_options(partition: Partition) -> dict[Key, Options]:
    """Return for each key of a stage or split its options."""
    found = {key: split.options for split in partition.splits for key in split.keys}
    return found | {stage.key: stage.options for stage in partition.stages}


def known_ranks(partition: Partition) -> int | None:
    """Return the number of ranks: as the settings say, else one more than the highest that is named."""
    if partition.settings.ranks is not None:
        return partition.settings.ranks
    axes = partition.settings.mesh.axes if partition.settings.mesh is not None else ()
    sizes = [size for name, size in axes if name == "pp"]
    if sizes:
        return sizes[0]
    named = [rank for _, ranks, _ in _placed(partition) for rank in ranks]
    return max(named) + 1 if named else None


def check_ranks(partition: Partition, keys: Sequence[Key]) -> Iterator[Diagnostic]:
    """Yield stages on ranks that do not exist, and ranks without a stage when all stages are placed."""
    ranks = known_ranks(partition)
    if ranks is None:
        return
    used: set[int] = set()
    seen: set[tuple[Span, int]] = set()
    for key, own, span in _placed(partition):
        used.update(own)
        for rank in own:
            if not 0 <= rank < ranks and (span, rank) not in seen:
                seen.add((span, rank))
                yield _unknown_rank(key, rank, ranks, span)
    idle = sorted(set(range(ranks)) - used)
    if idle and not seen and not set(keys) - set(stage_ranks(partition)):
        yield _idle(idle, len(keys), ranks, partition)


def _placed(partition: Partition) -> Iterator[tuple[Key, tuple[int, ...], Span]]:
    for stage in partition.stages:
        if stage.ranks:
            yield stage.key, stage.ranks, stage.span
    for split in partition.splits:
        for key, rank in zip(split.keys, split.ranks, strict=False):
            if rank is not None:
                yield key, (rank,), split.span
    for cut in partition.cuts:
        if cut.rank is not None:
            yield cut.key, (cut.rank,), cut.span


def _unknown_rank(key: Key, rank: int, ranks: int, span: Span) -> Diagnostic:
    are = "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
    help_text = "use rank 0" if ranks == 1 else f"use a rank from 0 to {ranks - 1}, or set ranks to {rank + 1}"
    return Diagnostic("unknown-rank", f"Stage `{key}` is on rank {rank}, but there {are}.", (Label(span),), help_text)


def _idle(idle: list[int], keys: int, ranks: int, partition: Partition) -> Diagnostic:
    noun, verb = ("Rank", "has") if len(idle) == 1 else ("Ranks", "have")
    named = ", ".join(map(str, idle))
    are = "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
    message = f"{noun} {named} {verb} no stage: the spec has {counted(keys, 'stage')}, and there {are}."
    span = dict(partition.settings.spans).get("ranks")
    labels = (Label(span),) if span is not None else ()
    return Diagnostic("idle-ranks", message, labels, "place a stage there, or use fewer ranks")
