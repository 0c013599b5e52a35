"""Stages that run forward again in backward, on XLA devices.

Forward runs without autograd, as a program of its own; backward runs forward again with it, in one program with the
backward. So nothing has to keep a compiler from finding the same work in two places of one program, and between the
two programs the device holds the stage's inputs only. torch's own checkpoint knows no XLA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ppdsl.recording.programs import StageProgram
from ppdsl.runtime.stages.recompute import State, copied_state, with_state

__all__ = ["Again"]

Run = Callable[..., Sequence[torch.Tensor]]


class Again:
    """A stage's program with its activations recomputed; called like the program.

    Args:
        run: Runs the program on its device.
        program: What it runs.
    """

    def __init__(self, run: Run, program: StageProgram) -> None:
        self._run = run
        self._program = program
        # Makes autograd come back also to a stage whose parameters alone have gradients.
        self._anchor = torch.zeros((), requires_grad=True)
        self._without = [not result.meta.requires_grad for result in program.results]

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the stage; without gradients there is nothing to run again."""
        if not torch.is_grad_enabled() or all(self._without):
            return self._run(*tensors)
        state = copied_state(self._program)
        found: Sequence[torch.Tensor] = _Twice.apply(self, state, self._anchor, *tensors)  # type: ignore[no-untyped-call]
        return found

    def first(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the results of forward, and those of them that have no gradient."""
        results = [result.detach() for result in self._run(*tensors)]
        return results, [result for result, without in zip(results, self._without, strict=True) if without]

    def second(
        self, state: State, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Run forward and backward, and return the gradients of `tensors`; those of parameters are added to `.grad`."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad(), with_state(self._program, state):
            results = self._run(*leaves)
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        torch.autograd.backward([result for result, _ in pairs], [gradient for _, gradient in pairs])
        return [leaf.grad for leaf in leaves]


class _Twice(torch.autograd.Function):
    """Forward without autograd, backward with forward in it."""

    @staticmethod
    def forward(ctx: Any, again: Again, state: State, _anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.again, ctx.state = again, state
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        results, without = again.first(tensors)
        ctx.mark_non_differentiable(*without)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, None, *ctx.again.second(ctx.state, ctx.saved_tensors, gradients)
