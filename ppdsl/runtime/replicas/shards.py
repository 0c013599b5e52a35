"""Parameters of which this process holds only a shard (`torch.distributed.tensor.DTensor`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["empty_like", "is_shard", "local_part", "shard_like", "waited", "whole"]


def is_shard(tensor: object) -> bool:
    """Whether a tensor is spread over processes; asking does not load the part of torch that spreads them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: memory of its own, which it shares with the whole."""
    spread: Any = tensor
    part: torch.Tensor = spread.to_local() if is_shard(tensor) else tensor
    return part


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor when it is there: one that a collective of torch still makes can be waited for."""
    wait: Callable[[], torch.Tensor] | None = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; where it is spread, every process that holds a part has to come here."""
    spread: Any = tensor.detach()
    full: torch.Tensor = spread.full_tensor() if is_shard(tensor) else spread
    return full


def shard_like(full: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor that every process has, laid out as `pattern` is; without a word."""
    if not is_shard(pattern) or is_shard(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    spread: Any = pattern
    part: torch.Tensor = distribute_tensor(
        full.to(spread.to_local().device), spread.device_mesh, spread.placements, src_data_rank=None
    )
    return part


def empty_like(pattern: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor that is spread as `pattern` is."""
    return torch.empty_like(pattern.detach(), dtype=dtype)
