"""Random numbers that torch calls do not tell of: Python's and numpy's, generators, seeds set in the middle."""

from __future__ import annotations

import random

import torch

from ppdsl.recording.numpy_state import NumpyNumbers
from ppdsl.recording.tape import Frame
from ppdsl.source import Place

__all__ = ["Generators", "Streams"]


class Streams:
    """Python's and numpy's global generators: who draws from them."""

    def __init__(self) -> None:
        self._python = _python_now()
        self._numpy = NumpyNumbers()

    def look(self, frame: Frame) -> None:
        """Note a draw since the last look as the doing of code of `frame` itself."""
        python = _python_now()
        if python != self._python:
            self._python = python
            frame.drew = True
        if self._numpy.drawn():
            frame.drew = True


def _python_now() -> tuple[int, int, float | None]:
    """What any draw from Python's generator changes: its position, or the number that the draw before left over."""
    _, words, left_over = random.getstate()
    return words[0], words[-1], left_over


class Generators:
    """The user's own torch generators, over the recordings of one model.

    Between two recordings each generator is set to a state of no meaning. Where a recording then finds another one at
    the first use, forward seeds it by a call that cannot be heard; where it finds a generator it has not met, forward
    makes it anew.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._expected: dict[int, torch.Tensor] = {}
        self._run = 0

    def begin(self) -> None:
        """A recording begins."""
        self._run += 1
        self._expected = {}
        for key, (generator, _) in self._met.items():
            generator.manual_seed(7_919 * self._run)
            self._expected[key] = generator.get_state()

    def use(self, generator: torch.Generator, frame: Frame, place: Place | None) -> None:
        """A call that is recorded takes numbers from `generator`."""
        key = id(generator)
        if key not in self._met:
            self._met[key] = (generator, generator.get_state())
            if self._run > 1:
                frame.seeded = place
        elif key in self._expected:
            if not torch.equal(self._expected.pop(key), generator.get_state()):
                frame.seeded = place
            generator.set_state(self._met[key][1])

    def restore(self) -> None:
        """Put every generator back to where the first recording found it."""
        for generator, state in self._met.values():
            generator.set_state(state)
