"""Batch norms in training, and layer norms, on XLA devices, in torch's own terms.

XLA's norms take the variance as a difference of means, which loses digits, and torch_xla adds that of a batch norm to
the running variance divided by `n` where torch divides by `n - 1`. So the few operations they consist of are written
out; a device fuses them again, and autograd keeps one tensor of the input's size for them, as it does for the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["NormsWrittenOut"]

_NAMES: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
}
"""What each is given by position."""


class NormsWrittenOut(TorchFunctionMode):
    """Runs `F.batch_norm` in training, and `F.layer_norm`, as the operations they consist of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NAMES:
            given = dict(zip(_NAMES[func], args, strict=False)) | kwargs
            on_xla = given["input"].device.type == "xla"
            if on_xla and func is F.layer_norm:
                return _layer_norm(**given)
            if on_xla and given.get("training", False):
                return _batch_norm(**given)
        return func(*args, **kwargs)


def _batch_norm(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    count, channels = input.numel() // input.shape[1], input.shape[1]
    axes = [axis for axis in range(input.dim()) if axis != 1]
    x = _wide(input)
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    variance = (centred * centred).mean(axes, keepdim=True)
    scale = (variance + eps).rsqrt()
    shape = mean.shape
    if weight is not None:
        scale = scale * weight.reshape(shape)
    result = centred * scale
    if bias is not None:
        result = result + bias.reshape(shape)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.reshape(channels) * momentum)
        if running_var is not None:
            running_var.mul_(1 - momentum).add_(variance.reshape(channels) * (momentum * count / max(count - 1, 1)))
    return result.to(input.dtype)


def _layer_norm(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    if tuple(input.shape[input.dim() - len(normalized_shape) :]) != tuple(normalized_shape):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)  # which says what is wrong
    result: torch.Tensor = _LayerNorm.apply(input, weight, bias, len(normalized_shape), eps)  # type: ignore[no-untyped-call]
    return result


class _LayerNorm(torch.autograd.Function):
    """Keeps the input; from operations of its own autograd would keep two tensors of that size."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, count: int, eps: float
    ) -> torch.Tensor:
        axes = list(range(-count, 0))
        x = _wide(given)
        mean = x.mean(axes, keepdim=True)
        centred = x - mean
        scale = ((centred * centred).mean(axes, keepdim=True) + eps).rsqrt()
        result = centred * scale
        if weight is not None:
            result = result * weight
        if bias is not None:
            result = result + bias
        ctx.axes, ctx.types = axes, [None if t is None else t.dtype for t in (given, weight, bias)]
        ctx.save_for_backward(given, weight, mean, scale)
        return result.to(given.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, weight, mean, scale = ctx.saved_tensors
        gradient = gradient.to(mean.dtype)
        normal = (_wide(given) - mean) * scale
        found: list[torch.Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            inner = gradient if weight is None else gradient * weight
            along = (inner * normal).mean(ctx.axes, keepdim=True)
            found[0] = scale * (inner - inner.mean(ctx.axes, keepdim=True) - normal * along)
        shape = gradient.shape[gradient.dim() - len(ctx.axes) :]
        if ctx.needs_input_grad[1]:
            found[1] = (gradient * normal).sum_to_size(shape)
        if ctx.needs_input_grad[2]:
            found[2] = gradient.sum_to_size(shape)
        cast = [None if one is None else one.to(kind) for one, kind in zip(found, ctx.types, strict=True)]
        return *cast, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
