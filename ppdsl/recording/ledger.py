"""Which value each tensor object holds at the moment, and which tensors share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ppdsl.recording import compat
from ppdsl.recording.fakes import FakeState
from ppdsl.recording.findings import unseen
from ppdsl.recording.structure import unpack
from ppdsl.recording.tape import Record, Value, ValueKind, memory_of, meta_of
from ppdsl.source import Place

__all__ = ["Ledger"]


class Ledger:
    """The books of one recording.

    Attributes:
        current: The present value of each tensor, by the tensor's id.
        alive: Everything whose id is used as a name: kept, so that no id is given twice.
        stand_ins: Fakes for tensors met under the identity of a real one: parameters reached through a list of the
            user's, and constants that were written with something fake.
        poisoned: Why a tensor must not be used, by its id.
        saved_constants: (tensor, copy) of tensors of the user's that real calls write.
        nodes: The autograd node of each value that has one when it is made, by the value's id.
    """

    def __init__(
        self, fakes: FakeState, holders: dict[int, tuple[Any, str]], place: Callable[[], Place | None]
    ) -> None:
        self.current: dict[int, Value] = dict(fakes.values)
        self.alive: list[Any] = []
        self.stand_ins: dict[int, torch.Tensor] = dict(fakes.fakes)
        self.poisoned: dict[int, str] = {}
        self.saved_constants: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.nodes: dict[int, tuple[Any, int]] = {}
        self._storages: dict[int, list[torch.Tensor]] = {}
        self._holders = holders
        self._mode = fakes.mode
        self._place = place
        for fake in fakes.fakes.values():
            self.remember_storage(fake)

    def inherit(self, name: str, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Know a tensor that an earlier recording left on the model; `fake` stands for it."""
        value = Value(ValueKind.CONSTANT, meta_of(fake), name)
        self.stand_ins[id(tensor)] = fake
        self.alive.append(tensor)
        self.current[id(tensor)] = value
        self.track(fake, value)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake that stands for `tensor`, or `tensor` itself."""
        return self.stand_ins.get(id(tensor), tensor)

    def restore(self) -> None:
        """Undo what real calls wrote to the user's tensors."""
        for tensor, copy in reversed(self.saved_constants):
            with torch.no_grad():
                tensor.detach().copy_(copy)

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the present value of a tensor; a real one never met before is a constant of the user's."""
        value = self.current.get(id(tensor))
        if value is None:
            if id(tensor) in self.poisoned:
                raise unseen(self._place(), self.poisoned[id(tensor)])
            if compat.is_fake(tensor):
                raise unseen(self._place(), "a tensor made by a call the recorder cannot see")
            value = Value(ValueKind.CONSTANT, meta_of(tensor), known=True, tensor=tensor)
            value.holder = self._holders.get(id(tensor))
            value.name = value.holder[1] if value.holder else "constant"
            self.track(tensor, value)
        elif value.kind is ValueKind.RESULT and tensor.requires_grad != value.meta.requires_grad:
            raise unseen(self._place(), "a tensor whose gradient was set up by a call the recorder cannot see")
        return value

    def track(self, tensor: torch.Tensor, value: Value) -> None:
        """Note what a tensor holds, and keep it alive."""
        self.current[id(tensor)] = value
        self.alive.append(tensor)
        self.remember_storage(tensor)
        self._note_node(tensor, value)

    def _note_node(self, tensor: torch.Tensor, value: Value) -> None:
        node = compat.gradient_node(tensor) if value.meta.requires_grad else None
        self.nodes.pop(id(value), None)
        if node is not None:
            self.nodes[id(value)] = node

    def remember_storage(self, tensor: torch.Tensor) -> None:
        """Note whose memory a tensor shares."""
        key = compat.same_storage_key(tensor)
        if key is not None:
            self._storages.setdefault(key, []).append(tensor)

    def base(self, tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Value | None:
        """Return the value whose memory a new tensor shares, an argument of the call first."""
        key = compat.same_storage_key(tensor)
        if key is not None:
            for argument in arguments:
                if compat.same_storage_key(argument) == key:
                    return self.current.get(id(argument))
            for other in self._storages.get(key, ()):
                if other is not tensor and id(other) in self.current:
                    return self.current[id(other)]
        return None

    def write(self, record: Record, tensor: torch.Tensor, known: bool, random: bool) -> None:
        """Give new values to a written tensor and to all that share its memory."""
        key = compat.same_storage_key(tensor)
        sharing = list(self._storages.get(key, ())) if key is not None else []
        if not any(other is tensor for other in sharing):
            sharing.append(tensor)
        for other in sharing:
            before = self.current.get(id(other))
            if before is None or (before.record == record.index and before.before is not None):
                continue
            after = Value(
                before.kind, meta_of(other), before.name, before.index, record.index, (("written", None),), before
            )
            after.base, after.tensor, after.holder = before.base, before.tensor, before.holder
            after.known, after.random = known and before.known, random or before.random
            # The order matters to readers: the tensor that the call was given comes first.
            record.writes.insert(0, (before, after)) if other is tensor else record.writes.append((before, after))
            self.current[id(other)] = after
            self._note_node(other, after)

    def before_write(self, args: Any, kwargs: Any, *, fake: bool) -> None:
        """Prepare for a call that writes: keep a copy of a real tensor, or let a fake stand for it."""
        targets = list(unpack(kwargs["out"]).tensors) if "out" in kwargs else list(unpack(args[:1]).tensors)
        for target in targets:
            target = self.stand_in(target)
            if compat.is_fake(target):
                continue
            value = self.value_of(target)
            if fake:
                self._become_fake(target)
            else:
                self._save(memory_of(value).tensor)

    def _save(self, tensor: torch.Tensor | None) -> None:
        """Keep a copy of a constant that is about to be written, by itself or through a view of it."""
        if tensor is not None and not compat.is_fake(tensor) and all(tensor is not t for t, _ in self.saved_constants):
            with torch.no_grad():
                self.saved_constants.append((tensor, tensor.detach().clone()))

    def _become_fake(self, tensor: torch.Tensor) -> None:
        """From now on a fake stands for this constant and for every tensor that shares its memory."""
        key = compat.same_storage_key(tensor)
        sharing = self._storages.get(key, [tensor]) if key is not None else [tensor]
        mode = self._mode
        with mode, torch.no_grad():
            size = max((t.storage_offset() + _span(t) for t in sharing), default=0)
            memory = torch.empty(size, dtype=tensor.dtype, device="cpu")
        for other in list(sharing):
            if compat.is_fake(other) or other.dtype != tensor.dtype:
                continue
            with torch.enable_grad():  # a view made without would not accept a write that has a gradient
                fake = memory.as_strided(other.size(), other.stride(), other.storage_offset())
            self.stand_ins[id(other)] = fake
            self.alive.append(fake)
            self.current[id(fake)] = self.current[id(other)]
            self.remember_storage(fake)


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
