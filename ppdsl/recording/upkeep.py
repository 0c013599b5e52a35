"""What Python keeps on modules: flags, numbers, containers, hooks, and which tensors stand in their tables.

A module that is called whole reads all this by itself while it runs. Code between modules is not run again, so what it
changes on a module (`self.block.scale = 2.0`, a hook set for one call, a parameter exchanged) must be found: such a
module is taken apart, with what it read as constants.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from ppdsl.recording.tape import Frame
from ppdsl.recording.watching import Kept, Watch

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
        self._shared: dict[int, Watch] = {}
        self._portraits = {id(module): _Portrait(module, self._shared, set()) for module in model.modules()}
        self._inside: dict[int, list[torch.nn.Module]] = {}
        self.start = {key: portrait.picture for key, portrait in self._portraits.items()}
        self._now = {key: dict(picture) for key, picture in self.start.items()}
        self._writers: dict[tuple[int, str], Frame] = {}
        self._recorded: dict[tuple[int, str], Any] = {}

    def look(self, module: torch.nn.Module, frame: Frame) -> None:
        """Note what has changed in a module and those inside, as the doing of `frame` where no other is known."""
        fresh: set[Watch] = set()
        portraits, inside = self._portraits, self._inside.get(id(module))
        if inside is not None and all(portraits[id(one)].unchanged(fresh) for one in inside):
            return
        # Where a module was added or taken away, the one that holds it has changed.
        inside = [one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
        self._inside[id(module)] = inside
        for one in inside:
            portrait = portraits.get(id(one))
            if portrait is None or not portrait.unchanged(fresh):
                portrait = portraits[id(one)] = _Portrait(one, self._shared, fresh)
            self._compare(one, portrait.picture, frame)

    def _compare(self, module: torch.nn.Module, found: Picture, frame: Frame) -> None:
        known = self._now.get(id(module))
        if known is not None and known != found:
            for entry in known.keys() | found.keys():
                if known.get(entry) != found.get(entry):
                    writer = self._writers.get((id(module), entry), frame)
                    writer.changed[id(module), entry] = module
        self._now[id(module)] = dict(found)

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


def picture_of(module: torch.nn.Module) -> Picture:
    """Return what a module holds at the moment, comparably."""
    return _Portrait(module, {}, set()).picture


class _Portrait:
    """A picture of a module, and what it was made of.

    Args:
        module: Any module.
        shared: What is known of objects that several modules share (a configuration), by id.
        fresh: Those of them that have been looked at just now.
    """

    __slots__ = ("_attributes", "_kept", "_long", "_module", "_watches", "picture")

    def __init__(self, module: torch.nn.Module, shared: dict[int, Watch], fresh: set[Watch]) -> None:
        attributes = _attributes_of(module)
        self._module = module  # its id must not be given to another module
        self._attributes = (tuple(attributes), tuple(attributes.values()))
        self._kept = Kept()
        self._long: list[tuple[Any, int]] = []
        self._watches: list[Watch] = []
        self.picture: Picture = {}
        for name, value in attributes.items():
            self._add(name, value, shared, fresh)

    def _add(self, name: str, value: Any, shared: dict[int, Watch], fresh: set[Watch]) -> None:
        found = self.picture
        if name in _TABLES:
            found.update({f"{name}.{key}": id(item) for key, item in value.items() if item is not None})
            if isinstance(value, dict):
                self._kept.add_mapping(value)
        elif name.endswith("_hooks"):
            found[name] = None
            if isinstance(value, dict):
                found[name] = tuple((key, id(hook)) for key, hook in value.items())
                self._kept.add_mapping(value)
        elif isinstance(value, torch.Tensor):
            found[name] = id(value)
        elif type(value) in _CONTAINERS:
            if len(value) > _LONGEST:
                self._long.append((value, len(value)))
                found[name] = (id(value), len(value))
                return
            self._watches.append(Watch(value))
            found[name] = self._watches[-1].state
        elif name in _IGNORED or isinstance(value, torch.nn.Module):
            return
        elif type(value) in _PLAIN:
            found[name] = (type(value), value)
        elif not callable(value) and hasattr(value, "__dict__"):
            self._add_object(name, value, shared, fresh)

    def _add_object(self, name: str, value: Any, shared: dict[int, Watch], fresh: set[Watch]) -> None:
        if not value.__dict__:
            self._kept.add_bare(value)
            return
        watch = shared.get(id(value))
        if watch is None or (watch not in fresh and not watch.unchanged()):
            watch = shared[id(value)] = Watch(value)
        fresh.add(watch)
        self._watches.append(watch)
        self.picture[name] = watch.state

    def unchanged(self, fresh: set[Watch]) -> bool:
        """Whether a new picture would be the same for certain."""
        attributes, (names, values) = _attributes_of(self._module), self._attributes
        if len(attributes) != len(names) or not all(map(is_, attributes.values(), values)):
            return False
        if not (all(map(is_, attributes, names)) and self._kept.unchanged()):
            return False
        if any(len(container) != length for container, length in self._long):
            return False
        for watch in self._watches:
            if watch not in fresh:
                if not watch.unchanged():
                    return False
                fresh.add(watch)
        return True


def _attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    # Past the recorder, which hears what is read from modules.
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found
