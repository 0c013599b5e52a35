"""What Python keeps on modules: flags, numbers, containers, hooks, and which tensors stand in their tables.

A module that is called whole reads all this by itself while it runs. Code between modules is not run again, so what it
changes on a module (`self.block.scale = 2.0`, a hook set for one call, a parameter exchanged) must be found: such a
module is taken apart, with what it read as constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ppdsl.recording.sameness import state_of
from ppdsl.recording.tape import Frame

__all__ = ["Picture", "Upkeep", "picture_of"]

_TABLES = ("_parameters", "_buffers", "_modules")
_IGNORED = ("_ppdsl_marks", "extra_repr")
_LONGEST = 64  # a longer container is a table that nobody writes in forward, and slow to look through
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, tuple)

# For each attribute, or entry of a table, what it holds.
Picture = dict[str, Any]


class Upkeep:
    """Notes who changes what on which module during one recording.

    Attributes:
        start: What each module held when the recording began, by the module's id.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {id(module): module for module in model.modules()}
        self.start = {key: picture_of(module) for key, module in self._modules.items()}
        self._now = {key: dict(picture) for key, picture in self.start.items()}
        self._writers: dict[tuple[int, str], Frame] = {}
        self._recorded: dict[tuple[int, str], Any] = {}

    def look(self, modules: Iterable[torch.nn.Module], frame: Frame) -> None:
        """Note what has changed since the last look, as the doing of `frame` where no other is known."""
        memo: dict[int, Any] = {}
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            known, found = self._now.get(id(module)), picture_of(module, memo)
            if known is not None and known != found:
                for entry in known.keys() | found.keys():
                    if known.get(entry) != found.get(entry):
                        writer = self._writers.get((id(module), entry), frame)
                        writer.changed[id(module), entry] = module
            self._now[id(module)] = found

    def wrote(self, module: torch.nn.Module, name: str, frame: Frame, *, recorded: bool) -> None:
        """Note that `frame` set an attribute; a recorded write happens in the stage program as well."""
        self._writers[id(module), name] = frame
        if recorded and id(module) in self._now:
            found = picture_of(module)
            for entry in (name, f"_buffers.{name}", f"_parameters.{name}"):
                known = self._now[id(module)].pop(entry, None)
                if entry in found:
                    if known is None and entry.startswith(_TABLES):
                        frame.changed[id(module), entry] = module  # registered since the last look
                    self._now[id(module)][entry] = self._recorded[id(module), entry] = found[entry]

    def lasting(self, frame: Frame) -> list[tuple[torch.nn.Module, str]]:
        """Return (module, entry) of what `frame` has left otherwise than it found it, of entries that hold tensors."""
        return [(module, entry) for (key, entry), module in frame.changed.items() if self._lasts(module, key, entry)]

    def _lasts(self, module: torch.nn.Module, key: int, entry: str) -> bool:
        start, now = self.start.get(key, {}).get(entry), picture_of(module).get(entry)
        if entry.startswith(_TABLES):
            return now != start and (start is None or now != self._recorded.get((key, entry)))
        tensor = isinstance(vars(module).get(entry), torch.Tensor)
        return tensor and now != start and now != self._recorded.get((key, entry))


def picture_of(module: torch.nn.Module, memo: dict[int, Any] | None = None) -> Picture:
    """Return what a module holds at the moment, comparably.

    Args:
        module: Any module.
        memo: Pictures of objects that several modules share (a configuration), by id.
    """
    found: Picture = {}
    for name, value in vars(module).items():
        if name in _TABLES:
            found.update({f"{name}.{key}": id(item) for key, item in value.items() if item is not None})
        elif name.endswith("_hooks"):
            found[name] = tuple((key, id(hook)) for key, hook in value.items()) if isinstance(value, dict) else None
        elif isinstance(value, torch.Tensor):
            found[name] = id(value)
        elif type(value) in _CONTAINERS:
            found[name] = state_of(value, 3) if len(value) <= _LONGEST else (id(value), len(value))
        elif name in _IGNORED or isinstance(value, torch.nn.Module):
            continue
        elif type(value) in _PLAIN:
            found[name] = (type(value), value)
        elif getattr(value, "__dict__", None) and not callable(value):
            memo = {} if memo is None else memo
            if id(value) not in memo:
                memo[id(value)] = state_of(value, 3)
            found[name] = memo[id(value)]
    return found
