"""The optimizer's program: started when `optimizer.step()` ends, on each device whose parameters it has."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ppdsl.runtime.xla.guard import Programs

__all__ = ["start_after_optimizers"]


class _Optimizers:
    """Starts what optimizers leave, and watches each one's programs."""

    def __init__(self) -> None:
        self._programs: weakref.WeakKeyDictionary[torch.optim.Optimizer, Programs] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        devices = {parameter.device for parameter in parameters if parameter.device.type == "xla"}
        if not devices:
            return
        programs = self._programs.setdefault(optimizer, Programs())
        programs.steps += 1
        name = type(optimizer).__name__
        there = tuple(parameter.grad is not None for parameter in parameters)
        for device in sorted(devices, key=str):
            programs.start(device, f"The step of {name} on {device}", there, "other parameters have a gradient")


_registered: list[Any] = []


def start_after_optimizers() -> None:
    """Let the programs of all optimizers of this process start at once, from now on.

    Without it they would wait for the next step, and hold it up.
    """
    if not _registered:
        _registered.append(register_optimizer_step_post_hook(_Optimizers()))
