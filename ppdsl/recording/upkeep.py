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

__all__ = ["Upkeep"]

_TABLES = ("_parameters", "_buffers", "_modules")
_IGNORED = ("_ppdsl_marks", "extra_repr")
_LONGEST = 64  # a longer container is a table that nobody writes in forward, and slow to look through
_PLAIN = (bool, int, float, str, type(None), list, dict, set, tuple)

# For each attribute, or entry of a table, what it holds.
_Picture = dict[str, Any]


class Upkeep:
    """Notes who changes what on which module during one recording.

    Attributes:
        start: What each module held when the recording began, by the module's id.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {id(module): module for module in model.modules()}
        self.start = {key: _picture(module) for key, module in self._modules.items()}
        self._now = {key: dict(picture) for key, picture in self.start.items()}
        self._writers: dict[tuple[int, str], Frame] = {}
        self._recorded: dict[tuple[int, str], Any] = {}

    def look(self, modules: Iterable[torch.nn.Module], frame: Frame) -> None:
        """Note what has changed since the last look, as the doing of `frame` where no other is known."""
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            known, found = self._now.get(id(module)), _picture(module)
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
            found = _picture(module)
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
        start, now = self.start.get(key, {}).get(entry), _picture(module).get(entry)
        if entry.startswith(_TABLES):
            return now != start and (start is None or now != self._recorded.get((key, entry)))
        tensor = isinstance(vars(module).get(entry), torch.Tensor)
        return tensor and now != start and now != self._recorded.get((key, entry))


def _picture(module: torch.nn.Module) -> _Picture:
    found: _Picture = {}
    for name, value in vars(module).items():
        if name in _TABLES:
            found.update({f"{name}.{key}": id(item) for key, item in value.items() if item is not None})
        elif name.endswith("_hooks"):
            found[name] = tuple((key, id(hook)) for key, hook in value.items()) if isinstance(value, dict) else None
        elif isinstance(value, torch.Tensor):
            found[name] = id(value)
        elif type(value) in _PLAIN and name not in _IGNORED:
            short = not isinstance(value, (list, dict, set, tuple)) or len(value) <= _LONGEST
            found[name] = state_of(value, 3) if short else (id(value), len(value))
    return found
