"""A step of several replicas: equal models at its beginning, one loss and one gradient at its end."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppdsl.runtime.calls import Call, Request
from ppdsl.runtime.checkpoints.ownership import local_names
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.options import Reduction
from ppdsl.runtime.processes.distributed import replicas_of, told_by_replicas
from ppdsl.runtime.replicas.shards import is_shard, local_part
from ppdsl.runtime.world import World

__all__ = ["COUNTED", "average_gradients", "average_loss", "begin_averaging", "make_replicas_equal"]

COUNTED = "the count"
"""What ranks call the rows or targets of their batch when they agree on a step."""


def make_replicas_equal(compiled: Compiled, world: World) -> None:
    """Give every replica the parameters and buffers of the first one."""
    replicas = replicas_of(world)
    if replicas is not None:
        replicas.make_equal(_held(compiled, spread=replicas.boxes is not None))


def _held(compiled: Compiled, *, spread: bool) -> Iterator[torch.Tensor]:
    """Yield this process's parameters and buffers; those that are spread over the replicas are equal as they are."""
    model, names = compiled.recording.model, local_names(compiled)
    for name, parameter in model.named_parameters():
        if name in names and not parameter.is_meta and not (spread and is_shard(parameter)):
            yield local_part(parameter.detach())
    seen: set[str] = set()
    for program in compiled.programs:
        for name in compiled.graph.stages[program.stage].buffers:
            if name not in seen and not (buffer := model.get_buffer(name)).is_meta:
                seen.add(name)
                yield buffer


def begin_averaging(
    call: Call, request: Request, reduction: Reduction, world: World
) -> tuple[tuple[float, ...], int | None]:
    """Begin a step; return what each micro-batch's loss counts, and how many rows or targets that is the mean of.

    The loss of all replicas is the mean of theirs, as gradients are. So a sum counts for as many replicas as there
    are, and a mean over rows or targets by the replica's share of those of all of them, which are known by now.
    """
    replicas = replicas_of(world)
    if replicas is None:
        return call.weights, call.counted
    if request.backward:
        replicas.begin(reduces=request.reduce)
        replicas.pending = not request.reduce
    if reduction == "sum":
        return tuple(weight * replicas.count for weight in call.weights), None
    if call.counted is None:
        return call.weights, None
    everywhere = sum(int(told) for told in told_by_replicas(world, COUNTED))
    if not everywhere or everywhere == call.counted * replicas.count:
        return call.weights, everywhere
    return tuple(weight * call.counted * replicas.count / everywhere for weight in call.weights), everywhere


def average_gradients(compiled: Compiled, world: World) -> None:
    """Wait for the mean of all gradients, tied ones last: these are summed over stages only now.

    Raises:
        RunError: A replica failed.
    """
    replicas = replicas_of(world)
    if replicas is not None:
        replicas.finish()
        replicas.finish_ties(compiled.ties, world)


def average_loss(loss: torch.Tensor | None, world: World) -> torch.Tensor | None:
    """Return the mean of the replicas' losses, the same on every rank of all of them.

    Raises:
        RunError: A replica failed.
    """
    replicas = replicas_of(world)
    if replicas is None or loss is None:
        return loss
    return torch.tensor(replicas.mean([float(loss)])[0], dtype=loss.dtype)
