"""Memory limits against parameters and gradients of stages that are named one by one, and of whole ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.spec.assigning import key_spans
from ppdsl.spec.cuts import Key
from ppdsl.spec.fitting import needed_bytes
from ppdsl.spec.modules import ModuleTree
from ppdsl.spec.partition import Partition
from ppdsl.spec.placing import stage_options, stage_ranks
from ppdsl.units import format_bytes

__all__ = ["check_memory"]


def check_memory(partition: Partition, tree: ModuleTree, homes: Mapping[str, tuple[Key, ...]]) -> Iterator[Diagnostic]:
    """Yield stages above their own limit, and ranks above that of each rank.

    Args:
        partition: The spec.
        tree: The model's modules.
        homes: For each parameter, by first name, its stages.
    """
    held: dict[Key, set[str]] = {}
    for name, keys in homes.items():
        for key in keys:
            held.setdefault(key, set()).add(name)
    spans = key_spans(partition)
    options, ranks = stage_options(partition), stage_ranks(partition)
    limit = partition.settings.memory
    on_rank: dict[int, set[str]] = {}
    trained: set[str] = set()
    for key, names in held.items():
        own = options[key].memory if key in options else None
        bounds = [bound for bound in (own, None if ranks.get(key) else limit) if bound is not None]
        frozen = key in options and bool(options[key].freeze)
        needed = needed_bytes(names, tree.parameters, frozen=frozen)
        if bounds and needed > min(bounds):
            where = f"Stage `{key}`"
            yield _too_much(where, needed, min(bounds), (Label(spans[key]),) if key in spans else ())
        if not frozen:
            trained |= names
        for rank in ranks.get(key, ()):
            on_rank.setdefault(rank, set()).update(names)
    for rank, names in sorted(on_rank.items()):
        needed = needed_bytes(names & trained, tree.parameters)
        needed += needed_bytes(names - trained, tree.parameters, frozen=True)
        if limit is not None and needed > limit:
            labels = tuple(Label(spans[key], f"on rank {rank}") for key in held if rank in ranks.get(key, ()))
            yield _too_much(f"Rank {rank}", needed, limit, labels)


def _too_much(where: str, needed: int, limit: int, labels: tuple[Label, ...]) -> Diagnostic:
    message = (
        f"{where} needs {format_bytes(needed)} for parameters and gradients, but the limit is {format_bytes(limit)}."
    )
    return Diagnostic("does-not-fit", message, tuple(dict.fromkeys(labels)), "move modules to another rank")
