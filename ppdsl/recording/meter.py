"""Counting what one torch call does inside: floating-point operations, random numbers, collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ppdsl.recording.compat import DispatchMode, FakeTensor, arguments_of

__all__ = ["Meter"]

_RATES = ("dropout_p", "dropout")
_MODES = ("training", "train", "is_training")
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")

_FAKES = (FakeTensor,)
_DEVICE = torch.ops.prim.device.default


class Meter(DispatchMode):
    """Counts floating-point operations and notices random numbers, operator by operator.

    Args:
        collective: Called with each operator that moves tensors between ranks, before it runs.

    Attributes:
        flops: Floating-point operations since the last reset.
        random: Whether random numbers were drawn since then.
        drawing: The functions that drew them, as far as they were called through `call`.
    """

    def __init__(self, collective: Callable[[Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collective = collective
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
        if func is _DEVICE and types == _FAKES:
            return args[0].fake_device  # asked more often than anything else
        kwargs = kwargs or {}
        known = _kinds.get(id(func))
        if known is None:
            known = _kinds[id(func)] = _kind_of(func)
        if known.draws and _draws(func, args, kwargs):
            self.random = True
        if known.collective:
            self._collective(func)
        result = _on_fakes(func, types, args, kwargs) if types == _FAKES else func(*args, **kwargs)
        if known.formula is not None:
            self.flops += known.formula(*args, **kwargs, out_val=result)
        return result


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an operator whatever its arguments are."""

    operator: Any  # kept, so that its id is not given to another
    draws: bool
    collective: bool
    formula: Callable[..., int] | None


_kinds: dict[int, _Kind] = {}


def _kind_of(operator: Any) -> _Kind:
    collective = operator.namespace in _COLLECTIVES and "wait_tensor" not in operator.name()
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    return _Kind(operator, torch.Tag.nondeterministic_seeded in operator.tags, collective, formula)


def _on_fakes(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Do what torch does for a call with fakes alone, without the two ways through its dispatcher that lead there."""
    for argument in args:
        if type(argument) is FakeTensor:
            return argument.fake_mode.dispatch(func, types, args, kwargs)
    return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator that can draw does: attention without dropout does not, nor does anything in evaluation."""
    for position, argument in enumerate(arguments_of(func)):
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in _RATES and isinstance(given, float) and given == 0.0:
            return False
        if argument.name in _MODES and given is False:
            return False
    return True
