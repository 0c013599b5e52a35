"""Batch norms in training on XLA devices, in torch's own terms.

XLA's batch norm takes the variance as a difference of means, which loses digits, and torch_xla adds it to the running
variance divided by `n` where torch divides by `n - 1`. So the few operations it consists of are written out; a device
fuses them again, and autograd keeps one tensor of the input's size for them, as it does for the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["NormsWrittenOut"]


class NormsWrittenOut(TorchFunctionMode):
    """Runs `F.batch_norm` in training as the operations it consists of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("training", False) and given["input"].device.type == "xla":
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
    x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
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
