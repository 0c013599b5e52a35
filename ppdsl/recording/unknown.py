"""Python numbers that a module worked out while it was tried on random tensors: nobody may go on with them."""

from __future__ import annotations

from typing import Any

import torch

from ppdsl.recording.findings import unseen
from ppdsl.recording.structure import Atom, Branch, Template

__all__ = ["Unknown", "hide_numbers", "numbers_in", "restore_numbers"]


class Unknown:
    """Stands for a number on a module; the module itself finds the number, everybody else gets an error.

    Attributes:
        before: What the attribute held before the module was tried.
    """

    def __init__(self, recorder: Any, name: str, before: Any) -> None:
        self._recorder = recorder
        self._name = name
        self.before = before

    def _refuse(self, *_: Any) -> Any:
        error = unseen(self._recorder.place_now(), f"`{self._name}`, a number that a module worked out from tensors")
        self._recorder.refusals.append(error)
        raise error

    __bool__ = __int__ = __float__ = __index__ = __format__ = __abs__ = __neg__ = __round__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


def hide_numbers(recorder: Any, module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Replace the numbers that were set on `module` while it was tried, as told by its attributes `before`."""
    for name, value in list(module.__dict__.items()):
        old = before.get(name)
        if not isinstance(value, (bool, int, float)):
            continue
        if type(value) is not type(old) or value != old or (id(module), name) in recorder.assigned:
            module.__dict__[name] = unknown = Unknown(recorder, name, old)
            recorder.unknowns.append((module, name, unknown, name in before))


def restore_numbers(recorder: Any) -> None:
    """Put back what attributes held before modules were tried."""
    for module, name, unknown, existed in reversed(recorder.unknowns):
        if module.__dict__.get(name) is unknown:
            module.__dict__[name] = unknown.before
            if not existed:
                del module.__dict__[name]


def numbers_in(template: Template) -> set[tuple[type, Any]]:
    """Return the Python numbers in arguments or results."""
    if isinstance(template, Branch):
        return {number for child in template.children for number in numbers_in(child)}
    if isinstance(template, Atom) and isinstance(template.value, (bool, int, float)):
        return {(type(template.value), template.value)}
    return set()
