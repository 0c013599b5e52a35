"""Numpy's global generator: whether somebody drew from it, asked often."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

__all__ = ["NumpyNumbers"]

_WORDS = 624


class NumpyNumbers:
    """Tells draws since the last question.

    Asking numpy for the state copies all of it. The position in it, which every draw moves, can be read where numpy
    says that it lies; only a number of the normal distribution may come without, when the draw before made two.
    """

    def __init__(self) -> None:
        self._seen = _state()
        self._position = _position_of(self._seen)

    def drawn(self) -> bool:
        """Whether the generator has moved since the last call, or since it was first looked at."""
        if self._position is not None and self._position.same():
            return False
        now = _state()
        before, self._seen = self._seen, now
        self._position = _position_of(now)
        return now != before


class _Position:
    """The generator, and what its memory said."""

    def __init__(self, numpy: Any, generator: Any) -> None:
        self._numpy = numpy
        self._generator = generator
        self._memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(generator.ctypes.state_address)
        self.seen = self._now()

    def _now(self) -> tuple[int, int, int]:
        memory = self._memory
        return memory[0], memory[_WORDS - 1], memory[_WORDS]

    def same(self) -> bool:
        return self._numpy.random.get_bit_generator() is self._generator and self._now() == self.seen


def _state() -> tuple[Any, ...] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, words, position, *rest = numpy.random.get_state()
    return (kind, int(words[0]), int(words[-1]), position, *rest)


def _position_of(state: tuple[Any, ...] | None) -> _Position | None:
    """Return where to look from now on; None where it must be asked in full each time."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or state is None or state[0] != "MT19937" or state[4]:
        return None
    try:
        position = _Position(numpy, numpy.random.get_bit_generator())
    except AttributeError:
        return None  # an old numpy
    return position if position.seen == state[1:4] else None
