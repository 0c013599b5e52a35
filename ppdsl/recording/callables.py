"""Callables that a stage program is made of where a plain torch call is not enough."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ppdsl.recording.structure import Path, Template, fill, pick
from ppdsl.recording.tape import Ambient

__all__ = [
    "Captured",
    "EnterAmbient",
    "Fill",
    "Pick",
    "ReadAttribute",
    "SetAttribute",
    "close_ambients",
    "enter_region",
    "exit_ambient",
]


class _Named:
    """A callable that fx can print and name."""

    __module__ = "ppdsl"

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.__qualname__ = name

    def __repr__(self) -> str:
        return self.__name__


class Fill(_Named):
    """Call `target` with arguments built from a template: containers are made afresh in each call."""

    def __init__(self, target: Any, template: Template, name: str) -> None:
        super().__init__(name)
        self.target = target
        self.template = template

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Return what `target` returns for arguments filled with `tensors`."""
        args, kwargs = fill(self.template, tensors)
        return self.target(*args, **kwargs)


class Pick(_Named):
    """Take one tensor out of a result."""

    def __init__(self, path: Path) -> None:
        super().__init__("pick")
        self.path = path

    def __call__(self, result: Any) -> Any:
        """Return the tensor at the path."""
        return pick(result, self.path)


class Captured(_Named):
    """A tensor of the user's that belongs to no module, by reference; one that forward makes anew, as a copy."""

    def __init__(self, tensor: torch.Tensor, name: str, *, fresh: bool = False) -> None:
        super().__init__(name)
        self.tensor = self._given = tensor
        self.fresh = fresh

    def place(self, device: torch.device) -> None:
        """Use a copy on `device`, or the tensor itself where it is there already."""
        self.tensor = self._given.to(device)

    def __call__(self) -> torch.Tensor:
        """Return the tensor itself, or a copy that may be written."""
        return self.tensor.detach().clone().requires_grad_(self.tensor.requires_grad) if self.fresh else self.tensor


class ReadAttribute(_Named):
    """Read a buffer or a tensor attribute from the live module, whatever it holds by now."""

    def __init__(self, module: Any, attribute: str) -> None:
        super().__init__(f"read_{attribute}")
        self.module = module
        self.attribute = attribute

    def __call__(self, *_: Any) -> Any:
        """Return the attribute; arguments only order this read after others."""
        return getattr(self.module, self.attribute)


class SetAttribute(_Named):
    """Set a tensor attribute (or a container of tensors) on the live module."""

    def __init__(self, module: Any, attribute: str, template: Template) -> None:
        super().__init__(f"set_{attribute}")
        self.module = module
        self.attribute = attribute
        self.template = template

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Set the attribute to the template filled with `tensors`."""
        setattr(self.module, self.attribute, fill(self.template, tensors))


_open: list[contextlib.ExitStack] = []


class EnterAmbient(_Named):
    """Set the global switches as they were recorded, where they differ from those around the model."""

    def __init__(self, ambient: Ambient, base: Ambient) -> None:
        super().__init__("enter_ambient")
        self.ambient = ambient
        self.base = base

    def __call__(self, *_: Any) -> contextlib.ExitStack:
        """Set the switches; what is returned sets them back."""
        now, base = self.ambient, self.base
        stack = contextlib.ExitStack()
        if now.inference != base.inference:
            stack.enter_context(torch.inference_mode(now.inference))
        if now.grad != base.grad:
            stack.enter_context(torch.set_grad_enabled(now.grad))
        for device_type, dtype in now.autocast:
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=now.autocast_cache))
        for device_type in dict(base.autocast):
            if device_type not in dict(now.autocast):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if now.dtype != base.dtype:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(now.dtype)
        if now.attention != base.attention:
            stack.enter_context(_attention(now.attention))
        _open.append(stack)
        return stack


def enter_region() -> contextlib.ExitStack:
    """Begin an autocast block: until it ends, a weight is cast once."""
    stack = contextlib.ExitStack()
    torch.autocast_increment_nesting()
    stack.callback(_end_region)
    _open.append(stack)
    return stack


def _end_region() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


def exit_ambient(stack: contextlib.ExitStack) -> None:
    """Leave what `EnterAmbient` or `enter_region` entered."""
    _open.remove(stack)
    stack.close()


def close_ambients() -> None:
    """Leave everything that is still entered: a stage program ended with an exception."""
    while _open:
        _open.pop().close()


@contextlib.contextmanager
def _attention(flags: tuple[bool, ...]) -> Any:
    cuda = torch.backends.cuda
    before = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    try:
        _set_attention(flags)
        yield
    finally:
        _set_attention(before)


def _set_attention(flags: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(flags[0])
    cuda.enable_mem_efficient_sdp(flags[1])
    cuda.enable_math_sdp(flags[2])
