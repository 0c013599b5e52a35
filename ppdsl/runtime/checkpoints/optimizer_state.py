"""An optimizer's state by parameter name, so that it fits any division of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.checkpoints.subject import Subject

__all__ = ["OptimizerState", "load_state", "merge_groups", "state_of"]


@dataclass(frozen=True)
class OptimizerState:
    """What one process holds, or, merged, what all hold.

    Attributes:
        kind: Name of the optimizer's class.
        groups: Each with the options and the names of its parameters.
        values: The state by parameter name and key; only what this process saves.
    """

    kind: str
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    values: Mapping[str, Mapping[str, Any]]


def state_of(optimizer: torch.optim.Optimizer, subject: Subject) -> OptimizerState:
    """Return an optimizer's state by the model's names.

    Raises:
        CallError: It optimises something that is not in the model.
    """
    names = _names(optimizer, subject)
    saves = {slot.name for slot in subject.slots if slot.saves}
    mine = {slot.name for slot in subject.slots if slot.mine}
    groups = []
    values: dict[str, Mapping[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append((options, tuple(name for p in group["params"] if (name := names[id(p)]) in mine)))
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in saves and optimizer.state.get(parameter):
                values[name] = dict(optimizer.state[parameter])
    return OptimizerState(type(optimizer).__name__, tuple(groups), values)


def _names(optimizer: torch.optim.Optimizer, subject: Subject) -> dict[int, str]:
    names = {id(slot.tensor): slot.name for slot in subject.slots}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                message = f"Parameter {place} of the optimizer's group {number} is none of the model's."
                advice = "build the optimizer from pipe.parameters(), after pp.materialize"
                raise CallError(Diagnostic("foreign-parameter", message, help=advice))
    return names


def merge_groups(states: Iterable[OptimizerState]) -> list[dict[str, Any]]:
    """Return the groups of all processes, one for each set of options, with the names of their parameters.

    Raises:
        CallError: Processes have a tied parameter in groups of other options, so that its copies would drift apart.
    """
    merged: list[dict[str, Any]] = []
    seen: dict[str, dict[str, Any]] = {}
    for state in states:
        for options, names in state.groups:
            home = next((group for group in merged if _same(group["options"], options)), None)
            if home is None:
                merged.append(home := {"options": dict(options), "names": []})
            for name in names:
                if seen.setdefault(name, home) is not home:
                    one, two = (_shown(seen[name]["options"], options), _shown(options, seen[name]["options"]))
                    message = f"Ranks optimise the tied parameter `{name}` differently: with {one} and with {two}."
                    advice = "put it into the same group on every rank: groups by the names of named_parameters()"
                    raise CallError(Diagnostic("tie-in-two-groups", message, help=advice))
                if name not in home["names"]:
                    home["names"].append(name)
    return [group for group in merged if group["names"]]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and torch.equal(one.cpu(), two.cpu())
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return bool(one == two)


def _shown(options: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items() if k not in others or not _same(v, others[k])) or "less"


def load_state(
    optimizer: torch.optim.Optimizer,
    subject: Subject,
    kind: str,
    groups: Sequence[Mapping[str, Any]],
    keys: Mapping[str, Sequence[str]],
    read: Callable[[Collection[tuple[str, str]]], Mapping[tuple[str, str], Any]],
) -> None:
    """Give an optimizer the options and the state of its parameters.

    A parameter that had no state when it was saved has none afterwards.

    Args:
        optimizer: The optimizer of this process.
        subject: The model.
        kind: Name of the class that was saved.
        groups: What `merge_groups` returned.
        keys: The keys of each parameter's state.
        read: Returns the values of pairs of name and key.

    Raises:
        CallError: The optimizer is of another class, or its groups do not fit.
    """
    if type(optimizer).__name__ != kind:
        message = f"The checkpoint holds the state of {kind}, but the optimizer is {type(optimizer).__name__}."
        raise CallError(Diagnostic("optimizer-differs", message, help="leave optimizer= out to load only the model"))
    names = _names(optimizer, subject)
    packed, findings = [], []
    order: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [names[id(parameter)] for parameter in group["params"]]
        homes = [i for i, saved in enumerate(groups) if not set(mine).isdisjoint(saved["names"])]
        if len(homes) > 1:
            findings.append(_split_group(number, [groups[i] for i in homes], mine))
        options = {key: value for key, value in group.items() if key != "params"}
        options |= groups[homes[0]]["options"] if homes else {}
        packed.append({**options, "params": list(range(len(order), len(order) + len(mine)))})
        order += mine
    if findings:
        raise CallError(*findings)
    values = read([(name, key) for name in order for key in keys.get(name, ())])
    state = {
        index: {key: values[name, key] for key in keys[name]} for index, name in enumerate(order) if keys.get(name)
    }
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def _split_group(number: int, homes: Sequence[Mapping[str, Any]], mine: Sequence[str]) -> Diagnostic:
    one, two = homes[0], homes[1]
    first, second = (next(name for name in mine if name in home["names"]) for home in (one, two))
    message = (
        f"Group {number} of the optimizer has `{first}`, saved with {_shown(one['options'], two['options'])}, and "
        f"`{second}`, saved with {_shown(two['options'], one['options'])}."
    )
    return Diagnostic("groups-differ", message, help="make the groups that the saved optimizer had")
