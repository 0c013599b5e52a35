"""Leaving the user's model as it was: what a recording may touch is noted first and put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ppdsl.recording import compat

__all__ = ["Snapshot", "preserved"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Snapshot:
    """Attributes, hooks and containers of all modules of a model, as they stood.

    Attributes:
        holders: (module, name) of each plain tensor attribute (no parameter, no buffer), by the tensor's id.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [(m, _state(m)) for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.holders: dict[int, tuple[Any, str]] = {}
        for module, state in self._modules:
            for name, (value, _) in state.items():
                if isinstance(value, torch.Tensor):
                    self.holders.setdefault(id(value), (module, name))

    def put_back(self) -> None:
        """Put everything back."""
        for module, state in self._modules:
            _put_back(module, state)

    def put_back_fakes(self, *, tensors_only: bool = False) -> list[tuple[str, torch.Tensor]]:
        """Put back only what holds a tensor without data by now; what Python built besides stays.

        Args:
            tensors_only: Leave it where no tensor stood before: the next call would find it there.

        Returns:
            (attribute, tensor) of each tensor that was left.
        """
        left: list[tuple[str, torch.Tensor]] = []
        for module, state in self._modules:
            for name, value in list(module.__dict__.items()):
                if isinstance(value, dict) and name in ("_parameters", "_buffers"):
                    _drop_fakes(value, state[name][1])
                elif not (found := list(_fakes_in(value))):
                    continue
                elif tensors_only and not isinstance(state.get(name, (None,))[0], torch.Tensor):
                    left += [(name, tensor) for tensor in found]
                else:
                    _put_back_one(module, name, state)
        return left

    @property
    def hooks_changed(self) -> bool:
        """Whether forward installed or removed hooks."""
        return any(
            dict(module.__dict__.get(name, {})) != dict(state[name][1] or {})
            for module, state in self._modules
            for name in _HOOKS
            if name in state
        )


@contextmanager
def preserved(model: torch.nn.Module) -> Iterator[Snapshot]:
    """Put attributes, hooks, buffers, `.grad` and random number states back at the end, also after an exception.

    Everything is put back or nothing: a flag that says "hooks are installed" and the hooks themselves go together. A
    model whose forward installs hooks on itself keeps what a first forward would have left, since its modules now run
    with them. Tensors that were written in place are the recorder's business (see `Recorder`).
    """
    snapshot = Snapshot(model)
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    streams = _random_states()
    grad_mode = torch.is_grad_enabled()
    done = False
    try:
        yield snapshot
        done = True
    finally:
        torch.set_grad_enabled(grad_mode)  # a forward that raised may have left it switched
        if done and snapshot.hooks_changed:
            snapshot.put_back_fakes()
        else:
            snapshot.put_back()
        for parameter, grad in grads:
            parameter.grad = grad
        _put_back_random(streams)


def _state(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    return {name: (value, _copy(value)) for name, value in module.__dict__.items()}


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) and hasattr(value, "copy") else None


def _fakes_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if compat.is_fake(value):
            yield value
    elif depth < 3 and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _fakes_in(item, depth + 1)


def _drop_fakes(slots: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in list(slots.items()):
        if isinstance(value, torch.Tensor) and compat.is_fake(value):
            if name in before:
                slots[name] = before[name]
            else:
                del slots[name]


def _put_back(module: torch.nn.Module, state: dict[str, tuple[Any, Any]]) -> None:
    attributes = module.__dict__
    for name in [name for name in attributes if name not in state]:
        del attributes[name]
    for name in state:
        _put_back_one(module, name, state)


def _put_back_one(module: torch.nn.Module, name: str, state: dict[str, tuple[Any, Any]]) -> None:
    attributes = module.__dict__
    if name not in state:
        del attributes[name]
        return
    value, copy = state[name]
    attributes[name] = value
    if copy is None:
        return
    if isinstance(value, list):
        if len(value) != len(copy) or any(a is not b for a, b in zip(value, copy, strict=True)):
            value[:] = copy
    elif isinstance(value, dict):
        if list(value) != list(copy) or any(value[key] is not copy[key] for key in copy):
            value.clear()
            for key, item in copy.items():
                value[key] = item
    elif value != copy:
        value.clear()
        value.update(copy)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _put_back_random(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
