"""One loss scale for all stages: `torch.amp.GradScaler`'s rules, with overflows agreed by all ranks.

Gradients of half precision vanish when they are small, so backward starts from a loss that is multiplied by a scale.
When a gradient then overflows anywhere in the model, every rank skips the optimizer's step and halves the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.calls import Request
from ppdsl.runtime.checkpoints.parts import ModelParts
from ppdsl.runtime.replicas.shards import local_part

__all__ = ["GradScaler", "scaled"]


class _Stage(Enum):
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class GradScaler:
    """Scales the loss of a pipeline; used in a loop as `torch.amp.GradScaler` is, on every rank.

    It gives the numbers that torch's gives for the whole model on one device: the scales, which steps are skipped, and
    the parameters. Every rank calls every method, also one without parameters.

    Args:
        pipe: The pipeline whose steps get it: `pipe.step(..., scaler=scaler)`.
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after `growth_interval` steps without an overflow.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Steps without an overflow before it grows.
        enabled: Without it gradients are not scaled, and every step is taken.

    >>> import torch
    >>> import ppdsl as pp
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> pp.begin(model[1], 1)
    >>> x = torch.ones(4, 2)
    >>> pipe = pp.pipeline(model, (x[:2],), targets=x[:2], loss=torch.nn.functional.mse_loss)
    >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    >>> scaler = pp.GradScaler(pipe)
    >>> result = pipe.step(x, targets=x, scaler=scaler)
    >>> scaler.unscale_(optimizer)          # only where something looks at the gradients before the step
    >>> norm = pipe.clip_grad_norm_(1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.get_scale()
    65536.0
    """

    def __init__(
        self,
        pipe: ModelParts,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0 or init_scale <= 0.0:
            message = (
                f"A scale of {init_scale} that is multiplied by {growth_factor} to grow and by {backoff_factor} to "
                "shrink is no loss scale."
            )
            advice = "growth_factor is above 1, backoff_factor between 0 and 1, init_scale above 0"
            raise CallError(Diagnostic("wrong-scale", message, help=advice))
        self.pipe = pipe
        self._enabled = enabled
        self._scale = _single(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._steps_since = 0
        self._stages: dict[int, _Stage] = {}
        self._overflows: dict[int, bool] = {}

    def is_enabled(self) -> bool:
        """Whether gradients are scaled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return what the loss is multiplied by; 1 when it is not enabled."""
        return self._scale if self._enabled else 1.0

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, and look for overflows on all ranks.

        Where it is not called, `step` does it. Gradients can be clipped or looked at afterwards.

        Args:
            optimizer: Of this rank's parameters; None on a rank that has none.

        Raises:
            CallError: It was called already, the latest step had no scaler, or ranks disagree.
            RunError: A rank does not come.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._stages:
            raise CallError(
                _misused("The gradients of this optimizer are unscaled already.", "call unscale_ once before a step")
            )
        if self.pipe.scale != self._scale:
            message = f"The gradients of the latest step were scaled by {self.pipe.scale}, not by {self._scale}."
            raise CallError(_misused(message, "give the scaler to each step: pipe.step(..., scaler=scaler)"))
        facts = {"the scale": str(self._scale), "the optimizer": str(len(self._stages))}
        unscale = partial(_unscale, optimizer, _single(1.0 / self._scale))
        self._overflows[id(optimizer)] = self.pipe.anywhere("the unscaling of the gradients", unscale, facts)
        self._stages[id(optimizer)] = _Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)`, unless a gradient of any rank overflowed.

        Args:
            optimizer: Of this rank's parameters; None on a rank that has none.
            *args: Given to its step.
            **kwargs: Given to its step.

        Returns:
            What the optimizer's step returns; None when it was skipped.

        Raises:
            CallError: It was called already since the latest `update`, the latest step had no scaler, or ranks
                disagree.
            RunError: A rank does not come.
        """
        if not self._enabled:
            return None if optimizer is None else optimizer.step(*args, **kwargs)
        if self._stages.get(id(optimizer)) is _Stage.STEPPED:
            raise CallError(_misused("This optimizer has made its step already.", "call update() after each step"))
        if id(optimizer) not in self._stages:
            self.unscale_(optimizer)
        self._stages[id(optimizer)] = _Stage.STEPPED
        if optimizer is None or self._overflows[id(optimizer)]:
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Change the scale for the next step: shrink it after an overflow, let it grow after many steps without one.

        Args:
            new_scale: The scale to use, in place of these rules.

        Raises:
            CallError: No optimizer made a step since the latest update.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _single(new_scale)
        elif not self._overflows:
            raise CallError(
                _misused("There was no step since the latest update of the scale.", "call step(optimizer) first")
            )
        elif any(self._overflows.values()):
            self._scale, self._steps_since = _single(self._scale * self._backoff_factor), 0
        else:
            self._steps_since += 1
            if self._steps_since == self._growth_interval:
                grown = _single(self._scale * self._growth_factor)
                self._scale, self._steps_since = grown if math.isfinite(grown) else self._scale, 0
        self._stages.clear()
        self._overflows.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return its state, which `torch.amp.GradScaler` can load too; empty when it is not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._steps_since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state, this class's or that of `torch.amp.GradScaler`.

        Args:
            state: From `state_dict`.

        Raises:
            CallError: It is the state of a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state:
            raise CallError(
                _misused("The state is of a scaler that was not enabled.", "load the state of one that was")
            )
        self._scale = _single(state["scale"])
        self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
        self._growth_interval, self._steps_since = state["growth_interval"], state["_growth_tracker"]


def scaled(request: Request, scaler: Any) -> Request:
    """Return a request whose gradients are scaled.

    Args:
        request: What is asked of the pipeline.
        scaler: Given by the user.

    Raises:
        CallError: It is none of these scalers.
    """
    if scaler is None:
        return request
    if not isinstance(scaler, GradScaler):
        message = f"scaler= is of type {type(scaler).__name__}, which does not know of other ranks."
        raise CallError(_misused(message, "give pp.GradScaler(pipe)"))
    return replace(request, scale=scaler.get_scale()) if request.backward else request


def _single(number: float) -> float:
    """Return the number that torch, which keeps a scale in single precision, makes of it."""
    return float(torch.tensor(number, dtype=torch.float64).float())


def _unscale(optimizer: torch.optim.Optimizer | None, inverse: float) -> bool:
    """Multiply all gradients by `inverse`; return whether one is not finite."""
    overflow = False
    with torch.no_grad():
        for gradient in [] if optimizer is None else list(_gradients(optimizer)):
            overflow = not bool(gradient.isfinite().all()) or overflow
            gradient.mul_(inverse)
    return overflow


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield this process's part of each gradient.

    Raises:
        CallError: One is of half precision, which could not hold it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16:
                message = (
                    f"A parameter of shape {list(parameter.shape)} has a gradient of float16, which cannot be unscaled."
                )
                raise CallError(_misused(message, "keep parameters in float32 and run the model under torch.autocast"))
            if parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.coalesce()
                yield parameter.grad.values()
            else:
                yield local_part(parameter.grad)


def _misused(message: str, advice: str) -> Diagnostic:
    return Diagnostic("scaler-misused", message, help=advice)
