"""Clip gradients by the norm of the whole model, as `torch.nn.utils.clip_grad_norm_` does for an unsplit one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_

from ppdsl.diagnostics import CallError, Diagnostic, RunError
from ppdsl.graph.ir import TensorMeta
from ppdsl.runtime.checkpoints.ownership import local_names, owners_of
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.moving import is_xla
from ppdsl.runtime.processes.distributed import replicas_of
from ppdsl.runtime.replicas.shards import is_shard, local_part, whole
from ppdsl.runtime.world import World
from ppdsl.runtime.xla.clipping import norms_on_xla, scale_on_xla

__all__ = ["check_gradients", "clip_gradients"]

_CPU = torch.device("cpu")
_NO_GRADIENT = -1.0
"""Stands for the norm of a gradient that is None; no norm is negative."""


def clip_gradients(
    compiled: Compiled, world: World, max_norm: float, norm_type: float, *, strict: bool
) -> tuple[torch.Tensor, RunError | None]:
    """Scale the gradients of this process's parameters so that the norm of all ranks' is at most `max_norm`.

    Every rank gets each parameter's own norm from the one rank that counts it and adds them up in the model's order,
    as torch does: the total is the same on every rank and does not depend on the placement. Ranks without parameters
    take part as all others do.

    Args:
        compiled: The stages.
        world: The ranks.
        max_norm: The norm afterwards, at most.
        norm_type: Which norm; infinity for the largest element.
        strict: Whether a norm that is not finite is an error instead of a factor.

    Returns:
        The norm before clipping, on the CPU, the same on every rank; and the error to raise, if there is one.
    """
    model = compiled.recording.model
    parameters = dict(model.named_parameters())
    owners = owners_of(compiled, parameters)
    local = local_names(compiled)
    mine = {name: parameter for name, parameter in parameters.items() if name in local}
    counted: dict[int, list[str]] = {}
    for name in parameters:
        counted.setdefault(owners[name][0], []).append(name)
    norms: dict[str, float] = {}
    for rank in range(len(compiled.plan.rows)):
        norms |= _share_norms(counted.get(rank, []), mine, rank, norm_type, compiled, world)
    present = [(name, torch.tensor(norms[name], dtype=_real(parameters[name].dtype))) for name in parameters]
    present = [(name, norm) for name, norm in present if norms[name] != _NO_GRADIENT]
    if not present:
        return torch.tensor(0.0), None
    total = torch.linalg.vector_norm(torch.stack([norm for _, norm in present]), norm_type)
    if strict and not bool(total.isfinite()):
        return total, RunError(_not_finite(total, present, owners))
    if any(is_xla(parameter.device) for parameter in mine.values()):
        scale_on_xla([parameter.grad for parameter in mine.values()], max_norm, total)
    else:
        clip_grads_with_norm_(map(_stand_in, mine.values()), max_norm, total)
    return total, None


def check_gradients(compiled: Compiled, world: World) -> None:
    """Look whether this process's gradients have a norm, the same on all replicas.

    Raises:
        CallError: A gradient is sparse, or the last step left gradients that are this replica's alone.
    """
    replicas = replicas_of(world)
    if replicas is not None and replicas.pending:
        message = "The gradients are this replica's alone, as the last step had reduce=False: their norm means nothing."
        advice = "clip after a step that takes the mean over replicas"
        raise CallError(Diagnostic("gradients-not-reduced", message, help=advice))
    names = local_names(compiled)
    for name, parameter in compiled.recording.model.named_parameters():
        if name in names and parameter.grad is not None and parameter.grad.layout != torch.strided:
            message = f"Parameter `{name}` has a sparse gradient, which cannot be clipped."
            raise CallError(Diagnostic("sparse-gradient", message, help="use sparse=False for the embedding"))


def _share_norms(
    names: list[str],
    mine: Mapping[str, torch.nn.Parameter],
    rank: int,
    norm_type: float,
    compiled: Compiled,
    world: World,
) -> dict[str, float]:
    """Return the norm of each gradient that `rank` counts; all ranks come here for every rank."""
    row: torch.Tensor | None = None
    if world.holds(rank):
        row = torch.tensor(_norms([mine[name].grad for name in names], norm_type, world), dtype=torch.float64)
    layout = Layout.of(TensorMeta((len(names),), "float64", (1,)))
    shared = world.share(row, rank, range(len(compiled.plan.rows)), layout, _CPU)
    return {} if shared is None else dict(zip(names, shared.tolist(), strict=True))


def _norms(gradients: Sequence[torch.Tensor | None], norm_type: float, world: World) -> list[float]:
    """Return the norm of each gradient; replicas put those of their shards together."""
    replicas, spread = replicas_of(world), [gradient is not None and is_shard(gradient) for gradient in gradients]
    if replicas is None or replicas.boxes is None:
        # What is spread then is spread over tensor-parallel peers, and torch knows how.
        if any(gradient is not None and is_xla(gradient.device) for gradient in gradients):
            return [_NO_GRADIENT if norm is None else norm for norm in norms_on_xla(gradients, norm_type)]
        return [_whole_norm(gradient, norm_type) for gradient in gradients]
    norms = [_norm(gradient, norm_type) for gradient in gradients]
    if not any(spread):
        return norms
    everywhere = torch.tensor(replicas.collect(norms), dtype=torch.float64)
    together = torch.linalg.vector_norm(everywhere, norm_type, dim=0).tolist()
    return [shards if there else norm for norm, shards, there in zip(norms, together, spread, strict=True)]


def _whole_norm(gradient: torch.Tensor | None, norm_type: float) -> float:
    if gradient is None or not is_shard(gradient):
        return _norm(gradient, norm_type)
    return float(whole(torch.linalg.vector_norm(gradient.detach(), norm_type)))


def _norm(gradient: torch.Tensor | None, norm_type: float) -> float:
    if gradient is None:
        return _NO_GRADIENT
    part = local_part(gradient.detach())
    return float(torch.linalg.vector_norm(part, norm_type)) if part.numel() else 0.0


def _stand_in(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a tensor whose `.grad` is the memory of this process's part of the parameter's."""
    part = local_part(parameter.detach())
    part.grad = None if parameter.grad is None else local_part(parameter.grad)
    return part


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()


def _not_finite(
    total: torch.Tensor, present: list[tuple[str, torch.Tensor]], owners: Mapping[str, tuple[int, ...]]
) -> Diagnostic:
    odd = [(name, norm) for name, norm in present if not bool(norm.isfinite())]
    message = f"The norm of all gradients is {float(total)}, so they cannot be clipped."
    lines = "\n".join(f"rank {owners[name][0]} | {name}: {float(norm)}" for name, norm in odd[:8])
    return Diagnostic("norm-not-finite", message, excerpt=lines or None, help="look for the first loss that is odd")
