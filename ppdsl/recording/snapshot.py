"""Leaving the user's model as it was: what a recording may touch is noted first and put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["preserved"]


@contextmanager
def preserved(model: torch.nn.Module) -> Iterator[None]:
    """Put attributes, hooks, buffers, `.grad` and random number states back at the end, also after an exception.

    Everything is put back or nothing: a flag that says "hooks are installed" and the hooks themselves go together.
    Tensors that were written in place are the recorder's business (see `Recorder`).
    """
    modules = [(module, _state(module)) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    streams = _random_states()
    try:
        yield
    finally:
        for module, state in modules:
            _put_back(module, state)
        for parameter, grad in grads:
            parameter.grad = grad
        _put_back_random(streams)


def _state(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    return {name: (value, _copy(value)) for name, value in module.__dict__.items()}


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) and hasattr(value, "copy") else None


def _put_back(module: torch.nn.Module, state: dict[str, tuple[Any, Any]]) -> None:
    attributes = module.__dict__
    for name in [name for name in attributes if name not in state]:
        del attributes[name]
    for name, (value, copy) in state.items():
        attributes[name] = value
        if copy is None:
            continue
        if isinstance(value, list):
            if len(value) != len(copy) or any(a is not b for a, b in zip(value, copy, strict=True)):
                value[:] = copy
        elif isinstance(value, dict):
            if list(value) != list(copy) or any(value[key] is not copy[key] for key in copy):
                # An OrderedDict or a user's dict: refill by the plain dict operations, keeping the object.
                value.clear()
                for key, item in copy.items():
                    dict.__setitem__(value, key, item) if type(value) is dict else value.__setitem__(key, item)
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
