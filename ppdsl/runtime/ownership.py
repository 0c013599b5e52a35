"""Which names of the model's state belong to this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.compiled import Compiled

__all__ = ["load_owned", "local_names", "owned_keys"]


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
    model = compiled.recording.model
    local = {program.stage for program in compiled.programs}
    mine, used = _names(compiled)
    owner = {id(parameter): name for name, parameter in model.named_parameters()}
    keys_of: dict[str, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if owner[id(parameter)] in used:
            keys_of[name] = owner[id(parameter)] in mine
    for stage in compiled.graph.stages:
        for name in stage.buffers:
            keys_of[name] = keys_of.get(name, False) or stage.index in local
    prefixes = [(module, stage.index in local) for stage in compiled.graph.stages for module in stage.modules]
    first = 0 in compiled.local
    owned = []
    for key in model.state_dict():
        known = keys_of.get(key)
        if known is None:
            inside = [here for module, here in prefixes if key.startswith(f"{module}.")]
            known = any(inside) if inside else first
        if known:
            owned.append(key)
    return frozenset(owned)


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
    model.load_state_dict({key: value for key, value in state.items() if key in owned}, strict=False)
