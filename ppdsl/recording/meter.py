"""Counting what one torch call does inside: floating-point operations, random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ppdsl.recording.compat import TorchDispatchMode

__all__ = ["Meter"]


class Meter(TorchDispatchMode):
    """Counts floating-point operations and notices random numbers, operator by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.random = False

    def reset(self) -> None:
        """Start counting for the next call."""
        self.flops, self.random = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result
