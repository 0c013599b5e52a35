"""Which names of the model's state belong to this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import TensorMeta
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.replicas.shards import is_shard, shard_like, whole
from ppdsl.runtime.world import World

__all__ = ["gather_state", "load_owned", "local_names", "owned_keys", "owners_of"]


def local_names(compiled: Compiled) -> frozenset[str]:
    """Return the names, as `model.named_parameters()` gives them, of the parameters that belong to this process."""
    mine, used = _names(compiled)
    first = 0 in compiled.local
    named = compiled.recording.model.named_parameters()
    return frozenset(name for name, _ in named if name in mine or (first and name not in used))


def _names(compiled: Compiled) -> tuple[set[str], set[str]]:
    """Return the parameters of this process's stages and of all stages, by the name the model gives first."""
    mine = {name for program in compiled.programs for name, _ in program.parameters}
    used = {name for program in compiled.recording.programs for name, _ in program.parameters}
    return mine, used


def owned_keys(compiled: Compiled) -> frozenset[str]:
    """Return the keys of the model's state dictionary that belong to this process.

    A tied parameter belongs to every rank that uses it, under all its names. What no stage uses belongs to rank 0.
    """
    owners = owners_of(compiled)
    return frozenset(key for key, ranks in owners.items() if any(rank in compiled.local for rank in ranks))


def owners_of(compiled: Compiled, keys: Iterable[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Return for each key the ranks it belongs to, ascending.

    Args:
        compiled: The stages.
        keys: Names of parameters, buffers and other state; None: the keys of the model's state dictionary.
    """
    model, placement = compiled.recording.model, compiled.placement
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    known: dict[str, set[int]] = {}
    for program in compiled.recording.programs:
        for name, _ in program.parameters:
            known.setdefault(name, set()).add(placement[program.stage])
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name[id(parameter)] in known:
            known[name] = known[first_name[id(parameter)]]
    for stage in compiled.graph.stages:
        for name in stage.buffers:
            known.setdefault(name, set()).add(placement[stage.index])
    inside = [(f"{module}.", placement[s.index]) for s in compiled.graph.stages for module in s.modules]
    owners = {}
    for key in model.state_dict() if keys is None else keys:
        ranks = known.get(key) or {rank for prefix, rank in inside if key.startswith(prefix)} or {0}
        owners[key] = tuple(sorted(ranks))
    return owners


def gather_state(compiled: Compiled, world: World) -> dict[str, Any]:
    """Return the whole model's state dictionary, on the CPU of every rank.

    What is no tensor stays this process's own.
    """
    cpu, ranks = torch.device("cpu"), range(len(compiled.plan.rows))
    state: dict[str, Any] = {}
    owners = owners_of(compiled)
    for key, value in compiled.recording.model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            state[key] = value
            continue
        source = owners[key][0]
        dtype = str(value.dtype).removeprefix("torch.")
        layout = Layout.of(TensorMeta(tuple(value.shape), dtype, tuple(value.stride())))
        mine = whole(value).to(cpu).clone() if world.holds(source) else None
        state[key] = world.share(mine, source, ranks, layout, cpu)
    return state


def load_owned(compiled: Compiled, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load this process's part of a state dictionary, which may be the whole model's.

    Args:
        compiled: The stages.
        state: Tensors by the model's own names.
        strict: Whether every name of this process must be there, and no name that the model does not have.

    Raises:
        CallError: A name is missing or unknown.
    """
    model, owned = compiled.recording.model, owned_keys(compiled)
    if strict:
        known = model.state_dict().keys()
        missing = [key for key in known if key in owned and key not in state]
        findings = [Diagnostic("missing-state", f"The state has no `{key}`, which this rank needs.") for key in missing]
        findings += [Diagnostic("unknown-state", f"The model has no `{key}`.") for key in state if key not in known]
        if findings:
            raise CallError(*findings)
    patterns = model.state_dict()
    mine = {key: value for key, value in state.items() if key in owned}
    shards = {key: shard_like(value, patterns[key]) for key, value in mine.items() if is_shard(patterns.get(key))}
    model.load_state_dict({**mine, **shards}, strict=False)
