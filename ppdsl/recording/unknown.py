"""Python numbers that a module worked out while it was tried on random tensors: nobody may go on with them."""

from __future__ import annotations

from typing import Any

import torch

from ppdsl.recording.findings import unseen
from ppdsl.recording.structure import Atom, Branch, Template
from ppdsl.recording.upkeep import Picture, picture_of

__all__ = ["Unknown", "hide_numbers", "numbers_in", "restore_numbers"]


class Unknown:
    """Stands for a number, or a list or object with numbers, on a module; only the module itself finds them.

    Attributes:
        before: What the attribute held before the module was tried.
    """

    def __init__(self, recorder: Any, name: str, before: Any) -> None:
        self._recorder = recorder
        self._name = name
        self.before = before

    def _refuse(self, *_: Any) -> Any:
        error = unseen(
            self._recorder.place_now(), f"`{self._name}`, which a module worked out from the numbers in tensors"
        )
        self._recorder.refusals.append(error)
        raise error

    __bool__ = __int__ = __float__ = __index__ = __format__ = __abs__ = __neg__ = __round__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __call__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


def hide_numbers(recorder: Any, module: torch.nn.Module, before: dict[str, Any], picture: Picture) -> None:
    """Replace what was set or filled on `module` while it was tried.

    Args:
        recorder: The recorder.
        module: What was tried, or a module inside.
        before: Its attributes before.
        picture: What its containers and objects held before.
    """
    now = picture_of(module)
    for name, value in list(vars(module).items()):
        if isinstance(value, (bool, int, float)):
            old = before.get(name)
            changed = type(value) is not type(old) or value != old or (id(module), name) in recorder.assigned
        elif isinstance(value, (str, torch.Tensor, torch.nn.Module, type(None), Unknown)) or name.startswith("_"):
            continue
        else:
            changed = now.get(name) != picture.get(name)
        if changed:
            inner = before.get(name) if isinstance(value, (bool, int, float)) else value
            module.__dict__[name] = unknown = Unknown(recorder, name, inner)
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
