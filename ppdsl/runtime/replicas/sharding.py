"""`pp.fully_shard`: parameters, gradients and optimizer state spread over the replicas of a pipeline."""

from __future__ import annotations

import itertools
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.checkpoints.parts import ModelParts
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.processes.distributed import DistributedWorld, replicas_of
from ppdsl.runtime.replicas.averaging import make_replicas_equal
from ppdsl.runtime.replicas.boxes import Boxes

__all__ = ["fully_shard"]

_MOMENT = "the sharding of the parameters"

_numbers = itertools.count()

Pipe = TypeVar("Pipe", bound=ModelParts)


def fully_shard(pipe: Pipe, *, reshard_after_forward: bool = False) -> Pipe:
    """Spread each stage's parameters over the replicas of the pipeline, with torch's `fully_shard` (FSDP2).

    Call it on every rank after `pipeline(..., mesh=...)`, after the model has its values and before the optimizer is
    built. Each replica keeps a shard of every parameter, of its gradient and of the optimizer's state; a stage's
    parameters are gathered before it computes. Numbers stay what they are without it.

    Shards live as long as the pipeline: after `pipe.close()` they cannot be gathered any more.

    Tied parameters stay whole on every replica: their gradients are added over stages first. The model's own forward
    cannot be called any more; `full_state_dict`, `save` and `export_safetensors` give whole tensors.

    Args:
        pipe: What `pipeline` returned.
        reshard_after_forward: Whether a stage gives its parameters up after each computation and gathers them again
            for the next one. It takes less memory and two gatherings for each micro-batch; without it there is one in
            a step.

    Returns:
        The pipeline itself.

    Raises:
        CallError: It cannot be sharded; says why.
        RunError: Another rank failed.
    """
    if not isinstance(pipe, ModelParts):
        message = f"An object of type {type(pipe).__name__} is no pipeline."
        advice = "call pp.fully_shard on what pp.pipeline(..., mesh=...) returned"
        raise CallError(Diagnostic("no-pipeline", message, help=advice))
    library, compiled, world = pipe.parts_to_spread()
    replicas = replicas_of(world)
    try:
        _check(compiled, world, sharded=replicas is not None and replicas.boxes is not None)
    except CallError as error:
        world.refuse(_MOMENT, error)
        raise
    world.agree(_MOMENT, {"reshard_after_forward": str(reshard_after_forward), "the plan": compiled.plan.digest})
    if replicas is None or not isinstance(world, DistributedWorld):
        return pipe
    with world.step():
        compiled.open()
        make_replicas_equal(compiled, world)
        tied = {id(group.parameter) for group in compiled.ties}
        own = {p.stage: [q for _, q in p.parameters if id(q) not in tied] for p in compiled.programs}
        device = world.device(world.rank) or torch.device("cpu")
        # A name of its own: torch takes meshes of one name and the same ranks for one, and keeps what it knows of them
        # longer than the groups of a pipeline that was closed live.
        name = f"dp{next(_numbers)}"
        mesh = DeviceMesh.from_group(world.channels.replicas_group, device.type, mesh_dim_names=(name,))
        replicas.boxes = Boxes(library.model, own, mesh, reshard_after_forward=reshard_after_forward)
        library.present = replicas.boxes.in_place
    pipe.renew()
    return pipe


def _check(compiled: Compiled, world: object, *, sharded: bool) -> None:
    """Refuse what cannot be sharded.

    Raises:
        CallError: Says what and why.
    """
    if not isinstance(world, DistributedWorld) or world.replicas is None:
        message = "The pipeline has no replicas to spread its parameters over."
        raise CallError(Diagnostic("no-replicas", message, help="for example mesh={'dp': 2, 'pp': 2}"))
    if sharded:
        message = "The parameters of this pipeline are spread over replicas already."
        raise CallError(Diagnostic("already-sharded", message, help="call pp.fully_shard once"))
    if world.fleet.peers > 1:
        message = "The pipeline has tensor-parallel peers, and parameters cannot be spread over them and over replicas."
        raise CallError(Diagnostic("sharding-and-tp", message, help="leave out pp.fully_shard, or the axis `tp`"))
    if world.staged:
        message = "Shards on a CUDA device travel by NCCL, and the default group of torch.distributed has none."
        raise CallError(Diagnostic("sharding-needs-nccl", message, help='init_process_group("cpu:gloo,cuda:nccl")'))
    for program in compiled.programs:
        for name, parameter in program.parameters:
            if parameter.is_meta:
                message = f"Parameter `{name}` is on meta: it has no values to spread."
                advice = "fill it with pp.materialize or pp.load first"
                raise CallError(Diagnostic("meta-parameter", message, help=advice))
            if parameter.grad is not None:
                message = f"Parameter `{name}` has a gradient, which would be lost."
                raise CallError(Diagnostic("gradient-lost", message, help="call pp.fully_shard before the first step"))
