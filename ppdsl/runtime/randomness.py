"""What a pipeline's random numbers follow from, and the states of one process's own, to go on with later."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import torch

from ppdsl.runtime.stages.drawing import key_of
from ppdsl.runtime.world import World

__all__ = ["RandomKeys", "agree_on_seed", "random_state", "set_random_state"]


class RandomKeys:
    """Seed, steps and evaluations of one pipeline: with a draw's name all that a random number depends on.

    Args:
        seed: The pipeline's seed, the same on all ranks.
        given: Whether the user gave it; then a checkpoint does not replace it.

    >>> keys = RandomKeys(7)
    >>> first = keys.next(training=True, microbatches=2)
    >>> first[0] == keys.key(step=0, microbatch=0)
    True
    >>> len({*first, *keys.next(training=True, microbatches=2), *keys.next(training=False, microbatches=2)})
    6
    """

    def __init__(self, seed: int, *, given: bool = True) -> None:
        self.seed = seed
        self._given = given
        self.steps = 0
        self.evaluations = 0

    def next(self, *, training: bool, microbatches: int, replica: int = 0) -> tuple[int, ...]:
        """Return the key of each micro-batch of the next step or evaluation, and count it.

        Args:
            training: Whether it is a step that trains.
            microbatches: How many micro-batches it has.
            replica: Which replica this is; the micro-batches of all replicas are numbered on.
        """
        step = self.steps if training else self.evaluations
        self.steps += training
        self.evaluations += not training
        first = replica * microbatches
        return tuple(self.key(step, m, training=training) for m in range(first, first + microbatches))

    def key(self, step: int, microbatch: int, *, training: bool = True) -> int:
        """Return the key of a micro-batch, both counted from 0."""
        return key_of(f"{self.seed} {'step' if training else 'evaluation'} {step} {microbatch}")

    def state(self) -> dict[str, int]:
        """Return what `restore` takes."""
        return {"seed": self.seed, "steps": self.steps, "evaluations": self.evaluations}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a state that `state` returned; a seed that the user gave stays."""
        self.seed = self.seed if self._given else state["seed"]
        self.steps, self.evaluations = state["steps"], state["evaluations"]


def agree_on_seed(seed: int | None, world: World) -> RandomKeys:
    """Return the keys from the user's seed, or from rank 0's `torch.initial_seed()`; all ranks must call it."""
    if seed is not None:
        return RandomKeys(seed)
    return RandomKeys(int(json.loads(world.gather(json.dumps(torch.initial_seed()))[0])), given=False)


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
