"""Stages that run forward again in backward instead of keeping what autograd saves (arXiv:1604.06174).

Between forward and backward such a stage holds its inputs only. The second forward draws the same random numbers and
starts from the state (running statistics, a power iteration's vector) that the first one started from; afterwards the
state is what it was before: no statistic is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ppdsl.recording.programs import StageProgram

__all__ = ["Recomputed", "State", "copied_state", "with_state"]

State = list[tuple[torch.nn.Module, str, Any]]
"""Module, attribute, and what stands there."""


class Recomputed:
    """A stage's program with its activations recomputed; called like the program.

    What Python code inside a module counts for itself is counted again, as under torch's own checkpoint.

    Args:
        program: What the stage runs.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the stage; without gradients there is nothing to run again."""
        if not torch.is_grad_enabled():
            return self._program(*tensors)
        before = copied_state(self._program)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), with_state(self._program, before)

        run: Callable[..., Sequence[torch.Tensor]] = checkpoint
        return run(self._program, *tensors, use_reentrant=False, context_fn=contexts)


def copied_state(program: StageProgram) -> State:
    """Return copies of what a program changes in modules."""
    return [(module, name, _copied(value)) for module, name, value in _state_of(program)]


@contextmanager
def with_state(program: StageProgram, state: State) -> Iterator[None]:
    """Let a program find and change other tensors than the model's own: what autograd saves of them stays as it was."""
    own = _state_of(program)
    _put(state)
    try:
        yield
    finally:
        _put(own)


def _state_of(program: StageProgram) -> State:
    found = ((module, name, getattr(module, name, None)) for module, name in program.state)
    return [entry for entry in found if not isinstance(entry[2], torch.nn.Parameter)]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put(state: State) -> None:
    for module, name, value in state:
        setattr(module, name, value)
