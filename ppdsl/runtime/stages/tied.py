"""A parameter that several stages use, as one of them sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["TiedParameter", "apart"]


class TiedParameter:
    """A parameter that several stages use, as one of them sees it: it keeps this stage's own gradient apart.

    The order in which gradients of several stages are added would otherwise depend on the schedule and the placement.
    """

    __slots__ = ("gradient", "parameter")

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.gradient: torch.Tensor | None = None

    def exchange(self) -> None:
        """Swap `parameter.grad` with this stage's own gradient; called before and after a backward."""
        self.gradient, self.parameter.grad = self.parameter.grad, self.gradient


@contextmanager
def apart(parameters: Sequence[TiedParameter]) -> Iterator[None]:
    """Keep one stage's gradients of tied parameters apart while the body runs."""
    for tied in parameters:
        tied.exchange()
    try:
        yield
    finally:
        for tied in parameters:
            tied.exchange()
