"""Numbers and flags on modules that code between modules has read: they are fixed in the stage programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording.tape import Frame

__all__ = ["Reads", "Setting", "settings_of"]

# (frame, module, attribute) of each read, by the ids of all three.
Reads = dict[tuple[int, int, str], tuple[Frame, torch.nn.Module, str]]

_MISSING = object()


@dataclass(frozen=True)
class Setting:
    """A number, flag or text on a module that decided what was recorded.

    Attributes:
        module: Where it stands.
        name: The attribute.
        expected: What it was.
    """

    module: torch.nn.Module
    name: str
    expected: Any

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Compare with the recording.

        Raises:
            CallError: It was changed since.
        """
        value = vars(self.module).get(self.name, _MISSING)
        if type(value) is type(self.expected) and value == self.expected:
            return
        raise CallError(
            Diagnostic(
                "changed-setting",
                f"`{self.name}` of {type(self.module).__name__} is {'gone' if value is _MISSING else repr(value)}, but "
                f"the plan was recorded with {self.expected!r}.",
                (),
                "build another pipeline after such a change, or keep the number in a buffer",
            )
        )


def settings_of(reads: Reads, taken_apart: Iterable[Frame]) -> tuple[Setting, ...]:
    """Return the settings that code of these frames read; modules called whole read theirs by themselves."""
    frames = set(map(id, taken_apart))
    found: dict[tuple[int, str], Setting] = {}
    for frame, module, name in reads.values():
        value = vars(module).get(name, _MISSING)
        if id(frame) in frames and value is not _MISSING:
            found[id(module), name] = Setting(module, name, value)
    return tuple(found.values())
