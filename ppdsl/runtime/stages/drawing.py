"""Random numbers by key: what a stage draws for a micro-batch, whatever else the process has drawn before.

Before each draw torch's generators are seeded by a hash of the pipeline's seed, the step, the micro-batch and the
draw's name. Where one call of a module is one draw, that call is preceded by the seeding. Other stages run under a
TorchFunctionMode, which sees the torch calls that draw.

The CPU's generator uses the lower half of its seed alone. In the upper half stands which draw came last, so that the
place is part of the generator's state: code that puts a state back and runs again, as torch's checkpoint does, goes on
from the right place.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ppdsl.recording import compat
from ppdsl.recording.draws import Draw
from ppdsl.runtime.xla import adapter as xla_adapter

__all__ = ["Drawing", "drawing_of", "drawn_by", "key_of"]

Site = tuple[dict[str, Any], str, Callable[..., Any]]
"""A dictionary, a key of it, and what to put there."""

_MARK = 0x5D << 56
_PLACE = 0xFFFFFF
_LOW = 0xFFFFFFFF
_WORD = 0xFFFFFFFFFFFFFFFF


def key_of(text: str) -> int:
    """Return 64 bits that follow from a text, the same on every machine.

    >>> hex(key_of("decoder|0|2"))
    '0xab4edc80de58979c'
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Drawing:
    """Seeds the generators for the draws of a stage, or of a whole model.

    Args:
        draws: In the order in which they run.
        device: Where the stage computes; None: wherever, so that the current CUDA device is seeded too, if it is used.

    Attributes:
        keys: For each micro-batch of the step the hash of seed, step and micro-batch.
    """

    def __init__(self, draws: Sequence[Draw], device: torch.device | None = None) -> None:
        self.keys: Sequence[int] = ()
        self._device = device
        self._names = [key_of(draw.name) for draw in draws]
        self._key = self._last = 0
        self._asleep = 0
        self._sites: list[Site] = []
        self._mode: _Mode | None = None
        modules: dict[int, tuple[torch.nn.Module, list[int]]] = {}
        functions: dict[Any, list[int]] = {}
        for number, draw in enumerate(draws):
            if draw.module is not None:
                modules.setdefault(id(draw.module), (draw.module, []))[1].append(number)
            if draw.function is not None:
                functions.setdefault(draw.function, []).append(number)
        whole = {id(draw.module) for draw in draws if draw.function is None}
        found = {key: self._surrounded(*site, whole=key in whole) for key, site in modules.items()}
        by_call = all(draw.module is not None for draw in draws) and all(found.values())
        if not by_call:
            self._mode = _Mode(self, functions)
        self._sites += [site for key, site in found.items() if site is not None and (by_call or key in whole)]

    def _surrounded(self, module: torch.nn.Module, numbers: list[int], *, whole: bool) -> Site | None:
        return compat.around_calls(module, partial(self.seed_next, numbers), self._whole if whole else None)

    # ---------------------------------------------------------------- around a stage

    @contextmanager
    def by(self, key: int) -> Iterator[None]:
        """Draw by this hash of seed, step and micro-batch inside; afterwards the generators are as they were."""
        used = [generator for generator in (torch.default_generator, self._cuda()) if generator is not None]
        states = [generator.get_state() for generator in used]
        key, last, self._key = self._key, self._last, key
        puts = [(place, name, place.get(name), call) for place, name, call in self._sites]
        for place, name, _, call in puts:
            place[name] = call
        try:
            # What draws without having been recorded: by the micro-batch at least.
            self._seed(-1)
            with self._mode or nullcontext():
                yield
        finally:
            for place, name, before, _ in puts:
                if before is None:
                    del place[name]
                else:
                    place[name] = before
            self._key, self._last = key, last
            for generator, state in zip(used, states, strict=True):
                generator.set_state(state)

    def _cuda(self) -> torch.Generator | None:
        if self._device is not None and self._device.type != "cuda":
            return None
        if not torch.cuda.is_initialized():
            return None
        index = None if self._device is None else self._device.index
        found: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        return found

    # ---------------------------------------------------------------- before a draw

    def seed_next(self, numbers: Sequence[int]) -> bool:
        """Seed for the next one of these draws; False when they were all made already."""
        found = bisect_right(numbers, self.place)
        if found == len(numbers):
            return False
        self._seed(numbers[found])
        return True

    @property
    def place(self) -> int:
        """The draw that came last, -1 before the first."""
        return (torch.default_generator.initial_seed() >> 32 & _PLACE) - 1 if self._marked else self._last

    @property
    def _marked(self) -> bool:
        """Whether the generator was seeded here; code that is called whole may do it by itself."""
        return torch.default_generator.initial_seed() & 0xFF << 56 == _MARK

    def _seed(self, number: int) -> None:
        name = self._names[number] if number >= 0 else 0
        key = _mixed(self._key ^ name)
        torch.default_generator.manual_seed(_MARK | (number + 1) << 32 | key & _LOW)
        cuda = self._cuda()
        if cuda is not None:
            cuda.manual_seed(key)
        if self._device is not None and self._device.type == "xla":
            xla_adapter.seed(self._device, key)
        self._last = number

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Run what is one draw as a whole; if it seeds torch by itself, the place is put back."""
        self._asleep += 1
        try:
            with compat.without_mode(self._mode):
                yield
        finally:
            self._asleep -= 1
            if not self._marked:
                self._seed(self._last)

    def call(self, numbers: Sequence[int], function: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call that may draw, seeded for the next one of these draws if it does."""
        generator = kwargs.get("generator")
        place = self.place
        if self._asleep or generator is not None or not self.seed_next(numbers):
            return function(*args, **kwargs)
        before = self._states()
        result = function(*args, **kwargs)
        if all(map(torch.equal, before, self._states())):
            self._seed(place)  # without a draw: dropout in evaluation, for one
        return result

    def _states(self) -> list[torch.Tensor]:
        cuda = self._cuda()
        states = [generator.get_state() for generator in (torch.default_generator, cuda) if generator is not None]
        if self._device is not None and self._device.type == "xla":
            states.append(torch.tensor(xla_adapter.random_state(self._device) & _WORD >> 1))
        return states


def drawing_of(draws: Sequence[Draw], device: torch.device) -> Drawing | None:
    """Return what seeds these draws, or None: there are none."""
    return Drawing(draws, device) if draws else None


def drawn_by(drawing: Drawing | None, microbatch: int) -> AbstractContextManager[None]:
    """Return the scope in which a stage draws for a micro-batch; None draws nothing."""
    return _NO_SCOPE if drawing is None else drawing.by(drawing.keys[microbatch])


_NO_SCOPE = nullcontext()


class _Mode(TorchFunctionMode):
    """Hears the torch calls that draw."""

    def __init__(self, drawing: Drawing, functions: dict[Any, list[int]]) -> None:
        super().__init__()
        self._drawing = drawing
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            with self:  # what it recomputes draws again
                return compat.backward_unannounced(func, args, kwargs or {})
        numbers = self._functions.get(func)
        if numbers is None:
            return func(*args, **(kwargs or {}))
        return self._drawing.call(numbers, func, args, kwargs or {})


def _mixed(word: int) -> int:
    """Return another word, in which each bit depends on all of the given one (Steele et al. 2014, SplitMix)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
