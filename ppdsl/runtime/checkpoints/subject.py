"""What is filled, saved and loaded: a plain model, or this process's part of a pipeline's, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ppdsl.runtime.checkpoints.ownership import owners_of
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.runtime.processes.distributed import DistributedWorld, writes_shared
from ppdsl.runtime.replicas.shards import is_shard
from ppdsl.runtime.world import World
from ppdsl.runtime.xla.hosts import HostsWorld
from ppdsl.spec.partition import Partition

__all__ = ["Slot", "Subject", "canonical", "make_subject"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One tensor of a model: a parameter or a buffer, with all places that hold it.

    Attributes:
        names: The plain model's names of it, the first one first; a tied parameter has several.
        places: Module and attribute for each name.
        parameter: Whether it is a parameter, not a buffer.
        persistent: Whether it belongs to the model's state dictionary.
        mine: Whether it belongs to this process.
        saves: Whether it is this process that saves it; for each tensor exactly one process does.
        first: The rank that saves it.
        device: Where this process wants it; None: where it is.
    """

    names: tuple[str, ...]
    places: tuple[tuple[torch.nn.Module, str], ...]
    parameter: bool
    persistent: bool
    mine: bool = True
    saves: bool = True
    first: int = 0
    device: torch.device | None = None

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def tensor(self) -> torch.Tensor:
        """What the model holds now."""
        module, attribute = self.places[0]
        found: torch.Tensor = getattr(module, attribute)
        return found

    @property
    def goal(self) -> torch.device:
        """Where this process wants the values."""
        if self.device is not None:
            return self.device
        return _CPU if self.tensor.is_meta else self.tensor.device

    def put(self, tensor: torch.Tensor) -> None:
        """Let the model hold `tensor`, under all names; a parameter stays one, and stays frozen or not."""
        if self.parameter and not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor.detach(), requires_grad=self.tensor.requires_grad)
        for module, attribute in self.places:
            setattr(module, attribute, tensor)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its tensors.

    Attributes:
        model: The user's model.
        slots: Its tensors, in the model's order.
        world: The ranks that act together.
        compiled: The stages; None for a plain model.
        spec: What divided the model into stages, or None.
    """

    model: torch.nn.Module
    slots: tuple[Slot, ...]
    world: World
    compiled: Compiled | None = None
    spec: Partition | None = None

    @property
    def rank(self) -> int:
        """The number of this process, among those of all replicas."""
        processes = _processes(self.world)
        return 0 if processes is None else processes.board.rank

    @property
    def ranks(self) -> int:
        """How many processes there are, those of all replicas."""
        processes = _processes(self.world)
        return 1 if processes is None else processes.board.ranks

    @property
    def leads(self) -> bool:
        """Whether this process has the first rank of the first replica."""
        return self.world.holds(0) and writes_shared(self.world)

    def extras(self) -> dict[str, str]:
        """Return the names of this process's state that is no tensor (`get_extra_state`), with the model's own."""
        keys = [key for key, value in self.model.state_dict().items() if not isinstance(value, torch.Tensor)]
        owners = {} if self.compiled is None else owners_of(self.compiled, keys)
        return {canonical(key): key for key in keys if key not in owners or self.world.holds(owners[key][0])}


def _processes(world: World) -> DistributedWorld | None:
    """Return the processes of a world; None when there is one alone."""
    if isinstance(world, HostsWorld):
        return world.processes
    return world if isinstance(world, DistributedWorld) else None


def make_subject(model: torch.nn.Module, compiled: Compiled | None = None, world: World | None = None) -> Subject:
    """Return a model with its tensors.

    Args:
        model: The user's model.
        compiled: The stages; None for a plain model.
        world: The ranks; None for a plain model.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return make_subject(inner, compiled, world)
    world = world or InProcessWorld()
    return Subject(model, tuple(_slots(model, compiled, world)), world, compiled)


def canonical(name: str) -> str:
    """Return a name without what torch.compile and checkpoint wrappers put into it.

    >>> canonical("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _places(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + attribute, module, attribute, parameter
        for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield prefix + attribute, module, attribute, buffer


def _slots(model: torch.nn.Module, compiled: Compiled | None, world: World) -> Iterator[Slot]:
    found: dict[int, list[tuple[str, torch.nn.Module, str, torch.Tensor]]] = {}
    for place in _places(model):
        found.setdefault(id(place[3]), []).append(place)
    state = model.state_dict().keys()
    owners = {} if compiled is None else owners_of(compiled, [p[0] for places in found.values() for p in places])
    for places in found.values():
        keys = [key for key, _, _, _ in places]
        names = tuple(dict.fromkeys(canonical(key) for key in keys))
        where = tuple(dict.fromkeys((module, attribute) for _, module, attribute, _ in places))
        parameter = isinstance(places[0][3], torch.nn.Parameter)
        slot = Slot(names, where, parameter, any(key in state for key in keys))
        if compiled is not None:
            ranks = sorted({rank for key in keys for rank in owners[key]})
            held = [rank for rank in ranks if world.holds(rank)]
            device = world.device(held[0]) if held else None
            writes = writes_shared(world) or is_shard(slot.tensor)
            saves = world.holds(ranks[0]) and writes
            slot = replace(slot, mine=bool(held), saves=saves, first=ranks[0], device=device)
        yield slot
