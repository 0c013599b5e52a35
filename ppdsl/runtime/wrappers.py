"""What cannot be composed with stages: wrappers that take over gradients, ties of parameters that are spread."""

from __future__ import annotations

import sys

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording.record import Recording
from ppdsl.runtime.replicas.shards import is_shard

__all__ = ["refuse_spread_ties", "refuse_wrappers"]

_REPLICAS = "give the plain model, and mesh={'dp': ..., 'pp': ...} to pp.pipeline"


def refuse_wrappers(model: object) -> None:
    """Refuse a model of which a part is wrapped for data parallelism.

    Such a wrapper counts on one forward and one backward of its module in a step; a pipeline has one for each
    micro-batch, and calls what is inside by itself.

    Raises:
        CallError: Says which part, and what to do instead.
    """
    if not isinstance(model, torch.nn.Module):
        return
    findings = []
    for name, module in model.named_modules():
        where = f"The module `{name}`" if name else "The model"
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            kind = type(module).__name__
            message = f"{where} is wrapped in {kind}, which takes the mean of gradients at each backward of its own."
            findings.append(Diagnostic("wrapped-model", message, help=_REPLICAS))
        elif _is_sharded(module):
            message = f"{where} is sharded already, but its stages are only known to the pipeline."
            advice = "give the plain model to pp.pipeline(..., mesh=...), then call pp.fully_shard on the pipeline"
            findings.append(Diagnostic("wrapped-model", message, help=advice))
    if findings:
        raise CallError(*findings[:3])


def refuse_spread_ties(recording: Recording) -> None:
    """Refuse tied parameters that are spread over processes: their copies would have to be added shard by shard.

    Raises:
        CallError: There is one.
    """
    for tie in recording.graph.ties:
        if is_shard(recording.model.get_parameter(tie.names[0])):
            message = f"The tied parameter `{tie.names[0]}` is spread over tensor-parallel peers."
            advice = "keep the modules that share it whole, or untie them"
            raise CallError(Diagnostic("spread-tie", message, help=advice))


def _is_sharded(module: torch.nn.Module) -> bool:
    """Whether a module is one of FSDP's, old or new; asking does not load the part of torch that makes them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
