"""Counting what one torch call does inside: floating-point operations, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ppdsl.recording.compat import TorchDispatchMode, arguments_of

__all__ = ["Meter"]

_RATES = ("dropout_p", "dropout")
_MODES = ("training", "train", "is_training")


class Meter(TorchDispatchMode):
    """Counts floating-point operations and notices random numbers, operator by operator.

    Attributes:
        flops: Floating-point operations since the last reset.
        random: Whether random numbers were drawn since then.
        drawing: The functions that drew them, as far as they were called through `call`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Start counting for the next call."""
        self.flops, self.random = 0, False
        self.drawing: tuple[Any, ...] = ()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one torch call inside the one that is counted, and note whether it draws."""
        before, self.random = self.random, False
        try:
            return function(*args, **kwargs)
        finally:
            if self.random:
                self.drawing = (*self.drawing, function)
            self.random |= before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.random = True
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator that can draw does: attention without dropout does not, nor does anything in evaluation."""
    for position, argument in enumerate(arguments_of(func)):
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in _RATES and isinstance(given, float) and given == 0.0:
            return False
        if argument.name in _MODES and given is False:
            return False
    return True
