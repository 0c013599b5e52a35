"""The random number states of one process, to go on with after a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """Return the states of torch, of its current CUDA device if there is one in use, and of Python."""
    version, numbers, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": [version, list(numbers), gauss]}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a state that `random_state` returned.

    >>> before = random_state()
    >>> first = torch.rand(1)
    >>> set_random_state(before)
    >>> bool(torch.rand(1) == first)
    True
    """
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
