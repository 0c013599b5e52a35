"""What a user chooses about a pipeline, checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.batches.batch import Batch, BatchAxis
from ppdsl.runtime.batches.token_mean import TokenMean, warn_of_unequal_targets
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.runtime.processes.distributed import DistributedWorld
from ppdsl.runtime.replicas.fleet import MeshLike, refuse_replicas
from ppdsl.runtime.world import World
from ppdsl.runtime.xla.devices import XlaWorld
from ppdsl.runtime.xla.hosts import HostsWorld
from ppdsl.runtime.xla.start import wants_xla
from ppdsl.schedule.table import Schedule
from ppdsl.spec.partition import Partition

__all__ = ["Compile", "Devices", "Options", "Reduction", "make_world", "weights_of"]

Reduction = str | TokenMean | Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Any]
"""`mean`, `sum`, `token_mean` or a `TokenMean`, or a function of a micro-batch's and the whole batch's tensors by name
that returns the weight."""

Compile = bool | Collection[int | str] | Mapping[int | str, Mapping[str, Any]]
"""Keys of stages, or for each key what `torch.compile` gets; True for all stages."""

Devices = str | torch.device | Sequence[str | torch.device] | None
"""One device for all ranks of this process, one for each rank, or None for where the parameters are."""


@dataclass(frozen=True)
class Options:
    """The choices of one pipeline; `pipeline` describes each."""

    loss: Callable[..., Any] | None = None
    schedule: str | Schedule = "1f1b"
    microbatches: int | None = None
    placement: Mapping[int | str, int] | None = None
    reduction: Reduction = "mean"
    batch_axis: BatchAxis = field(default_factory=dict)
    spec: Partition | None = None
    default_axis: int | None = None
    recompute: bool | Collection[int | str] = False
    seed: int | None = None
    compile: Compile = False
    dynamic: bool = True

    def recomputed(self, keys: Sequence[int | str]) -> frozenset[int | str]:
        """Return the keys of the stages that run forward again in backward.

        Args:
            keys: Of all stages.

        Raises:
            CallError: There is no such stage.
        """
        return _chosen("recompute", keys, chosen=self.recompute)

    def compiled(self, keys: Sequence[int | str]) -> dict[int | str, Mapping[str, Any]]:
        """Return for each stage that `torch.compile` compiles what it gets beside the stage.

        Args:
            keys: Of all stages.

        Raises:
            CallError: There is no such stage.
        """
        given = self.compile if isinstance(self.compile, Mapping) else {}
        return {key: given.get(key, {}) for key in _chosen("compile", keys, chosen=self.compile)}

    def check(self) -> None:
        """Look at what can be checked without the model.

        Raises:
            CallError: Something is wrong.
        """
        findings = []
        if isinstance(self.reduction, str) and self.reduction not in ("mean", "sum", "token_mean"):
            message = f"There is no reduction {self.reduction!r}."
            advice = "one of: mean, sum, token_mean, or a function that returns a micro-batch's weight"
            findings.append(Diagnostic("unknown-reduction", message, help=advice))
        if self.microbatches is not None and self.microbatches < 1:
            message = f"A step of {self.microbatches} micro-batches has nothing to run."
            findings.append(Diagnostic("no-microbatches", message, help="use at least 1 micro-batch"))
        if isinstance(self.schedule, Schedule) and self.microbatches not in (None, self.schedule.microbatches):
            message = f"microbatches is {self.microbatches}, but the schedule has {self.schedule.microbatches}."
            findings.append(Diagnostic("microbatches-differ", message, help="leave microbatches= out"))
        if findings:
            raise CallError(*findings)

    def count_microbatches(self, keys: int) -> int:
        """Return the number of micro-batches, for a model with that many stage keys."""
        given = self.schedule.microbatches if isinstance(self.schedule, Schedule) else self.microbatches
        return keys if given is None else given


def _chosen(name: str, keys: Sequence[int | str], *, chosen: bool | Collection[int | str]) -> frozenset[int | str]:
    """Return the stages that an option names.

    Raises:
        CallError: There is no such stage.
    """
    if isinstance(chosen, bool):
        return frozenset(keys if chosen else ())
    findings = []
    for key in chosen:
        if key not in keys:
            near = difflib.get_close_matches(str(key), list(map(str, keys)), n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(map(str, keys))}"
            findings.append(Diagnostic("unknown-stage", f"{name} names stage {key!r}, which there is not.", (), advice))
    if findings:
        raise CallError(*findings)
    return frozenset(chosen)


def weights_of(
    reduction: Reduction, names: Sequence[str], leaves: Sequence[torch.Tensor], batch: Batch
) -> tuple[tuple[float, ...], int | None]:
    """Return for each micro-batch the gradient of its loss: what its loss counts in the step's.

    Also returned is how many rows or targets the step's loss is the mean of; None when it is no such mean.

    Args:
        reduction: How losses are added.
        names: Names of the call's tensors.
        leaves: The call's tensors.
        batch: The same, cut.
    """
    count = len(batch.microbatches)
    parts = [dict(zip(names, microbatch, strict=True)) for microbatch in batch.microbatches]
    if reduction == "mean":
        warn_of_unequal_targets(dict(zip(names, leaves, strict=True)), parts)
        return _shares(batch), sum(batch.sizes) or None
    if reduction == "token_mean" or isinstance(reduction, TokenMean):
        return (reduction if isinstance(reduction, TokenMean) else TokenMean()).weigh(parts)
    if isinstance(reduction, str):
        return (1.0,) * count, None
    whole = dict(zip(names, leaves, strict=True))
    return tuple(float(reduction(part, whole)) for part in parts), None


def _shares(batch: Batch) -> tuple[float, ...]:
    count, sizes = len(batch.microbatches), batch.sizes
    if len(set(sizes)) < 2:
        return (1.0 / count,) * count
    return tuple(size / sum(sizes) for size in sizes)


def make_world(
    devices: Devices, timeout: float, runtime: str | None, mesh: MeshLike = None, transport: str | None = None
) -> World:
    """Return the ranks: processes when torch.distributed is initialised, otherwise all in this process.

    Ranks on XLA devices are devices of this process, or of all processes when there are several.

    Raises:
        CallError: The choice is impossible.
    """
    initialised = dist.is_available() and dist.is_initialized()
    if not timeout > 0:
        raise CallError(Diagnostic("wrong-timeout", f"timeout is {timeout} seconds.", help="give more than 0"))
    if runtime not in (None, "inprocess", "distributed", "xla"):
        message = f"There is no runtime {runtime!r}."
        raise CallError(Diagnostic("unknown-runtime", message, help="one of: inprocess, distributed, xla"))
    if runtime == "distributed" and not initialised:
        advice = "call torch.distributed.init_process_group() first, under torchrun"
        raise CallError(Diagnostic("not-initialised", "torch.distributed is not initialised.", help=advice))
    one = isinstance(devices, str | torch.device)
    on_xla = wants_xla(devices, runtime)
    if on_xla and initialised and dist.get_world_size() > 1:
        return HostsWorld(timeout, transport or "auto", mesh)
    if on_xla or not initialised or runtime == "inprocess":
        refuse_replicas(mesh)
    if on_xla:
        return XlaWorld(transport or "auto", timeout)
    if transport is not None:
        message = f"transport is {transport!r}, but the stages do not run on XLA devices."
        raise CallError(Diagnostic("no-transport", message, help='leave transport= out, or give devices="xla"'))
    if runtime == "inprocess" or not initialised:
        if devices is None or isinstance(devices, str | torch.device):
            return InProcessWorld(None if devices is None else torch.device(devices))
        return InProcessWorld([torch.device(device) for device in devices])
    if devices is not None and not one:
        message = "devices= is a list, but under torch.distributed each process has one device."
        raise CallError(Diagnostic("wrong-devices", message, help="give this process's device, or None"))
    return DistributedWorld(timeout, torch.device(str(devices)) if devices is not None else None, mesh)
