"""Run a forward pass once on fake tensors and write down every call, with the module it was made in.

Everything is recorded inline, in one flat list with a tree of module calls over it. Which calls of modules can stay
whole is decided afterwards (see `collapse`): only then is it known what is used outside of them.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ppdsl.annotate import Key, listen, marks_of
from ppdsl.recording import compat
from ppdsl.recording.fakes import FakeState
from ppdsl.recording.findings import INNER_FILES, DataDependence, data_dependence, unseen
from ppdsl.recording.marking import MarkState
from ppdsl.recording.naming import EFFECTS, PLAIN_METHODS, PLAIN_PROPERTIES, TO_PYTHON, writes_in_place
from ppdsl.recording.patches import intercepting
from ppdsl.recording.snapshot import random_fingerprint
from ppdsl.recording.structure import Unpacked, fill, holds_iterator, unpack
from ppdsl.recording.tape import (
    Ambient,
    Frame,
    Message,
    Record,
    RecordKind,
    Value,
    ValueKind,
    ambient_now,
    meta_of,
)
from ppdsl.source import Place

__all__ = ["Recorder"]

class Recorder(TorchFunctionMode):
    """Hears every torch call, module call, attribute write and mark of one thread.

    Args:
        model: The user's model.
        fakes: Fakes of its parameters and buffers.
        examples: The caller's tensors, as given.
        fake_inputs: Their fakes, in the same order.
        names: Paths of the caller's tensors.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fakes: FakeState,
        examples: Sequence[torch.Tensor],
        fake_inputs: Sequence[torch.Tensor],
        names: Sequence[str],
        holders: dict[int, tuple[Any, str]],
    ) -> None:
        super().__init__()
        self.model = model
        self.fakes = fakes
        self.examples = tuple(examples)
        self.records: list[Record] = []
        self.current: dict[int, Value] = dict(fakes.values)
        self.alive: list[Any] = []
        self.storages: dict[int, list[torch.Tensor]] = {}
        # Tensors met under the identity of a real one, to be replaced by its fake: parameters reached through a list
        # of the user's, and constants that were written with something fake.
        self.stand_ins: dict[int, torch.Tensor] = dict(fakes.fakes)
        self.poisoned: dict[int, str] = {}
        self.saved_constants: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.paused = False
        self.substituting = True
        self.spied: dict[int, torch.Tensor] | None = None
        self.thread = get_ident()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.holders = holders
        self.messages: list[Message] = []
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.region = self.nesting = 0
        self.stream = random_fingerprint()
        self.calls: dict[int, int] = {}
        self.root = Frame(None, type(model).__name__, None, 0, unpack(()), (), ambient_now(), None)
        self.frame = self.root
        self.marking = MarkState(self)
        self.meter = _Meter()
        self.inputs: tuple[Value, ...] = ()
        for index, (tensor, example) in enumerate(zip(fake_inputs, examples, strict=True)):
            known = not compat.is_fake(example) and example.device.type != "meta"
            value = Value(ValueKind.INPUT, meta_of(tensor), names[index], index=index, known=known)
            self.inputs += (value,)
            self._track(tensor, value)
        for fake in fakes.fakes.values():
            self._remember_storage(fake)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function` and hear what it does."""
        modules = list(self.model.modules())
        with listen(self.marking), intercepting(self, modules), self.meter, self:
            result = function(*args, **kwargs)
        self._note_randomness(self.root)
        self.root.end = len(self.records)
        return result

    def restore_constants(self) -> None:
        """Undo what real calls did to the user's tensors and generators that are neither parameters nor buffers."""
        for generator, state in self.generators.values():
            generator.set_state(state)
        for tensor, copy in reversed(self.saved_constants):
            with torch.no_grad():
                tensor.detach().copy_(copy)

    @contextmanager
    def quiet(self) -> Iterator[dict[int, torch.Tensor]]:
        """Record nothing inside; yields the tensors that calls meet, by id."""
        outer = self.paused, self.spied
        self.paused, self.spied = True, {}
        try:
            yield self.spied
        finally:
            self.paused, self.spied = outer

    # -- torch calls ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return self._run_paused(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name in PLAIN_PROPERTIES:
                return func(self.stand_ins.get(id(args[0]), args[0]))
            return self._call(getattr, "__get__", (args[0], name), {})
        if name == "__set__":
            return self._call(setattr, name, (args[0], func.__self__.__name__, args[1]), {})
        if name in PLAIN_METHODS:
            return func(*args, **kwargs)
        return self._call(func, name, args, kwargs)

    def _run_paused(self, func: Any, args: Any, kwargs: Any) -> Any:
        parts = unpack((args, kwargs))
        if self.spied is not None:
            for tensor in parts.tensors:
                self.spied[id(tensor)] = tensor
        if self.substituting:
            tensors = [self.stand_ins.get(id(t), t) for t in parts.tensors]
            if any(a is not b for a, b in zip(tensors, parts.tensors, strict=True)):
                args, kwargs = fill(parts.template, tensors)
        return func(*args, **kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        parts = unpack((args, kwargs))
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self.generators:
            self.generators[id(generator)] = (generator, generator.get_state())
        tensors = [self.stand_ins.get(id(t), t) for t in parts.tensors]
        fake = any(map(compat.is_fake, tensors))
        if writes_in_place(name) or "out" in kwargs:
            self._before_write(tensors, args, kwargs, fake)
            tensors = [self.stand_ins.get(id(t), t) for t in tensors]
        values = tuple(self.value_of(tensor) for tensor in tensors)
        if any(a is not b for a, b in zip(tensors, parts.tensors, strict=True)):
            args, kwargs = fill(parts.template, tensors)
        if name in TO_PYTHON:
            return self._to_python(func, name, args, kwargs, parts, values, fake)
        versions = [compat.version_of(tensor) for tensor in tensors]
        self.meter.reset()
        try:
            result = func(*args, **kwargs)
        except (*compat.DATA_ERRORS, RuntimeError, NotImplementedError) as error:
            if not fake or isinstance(error, torch.OutOfMemoryError):
                raise
            result = self._without_fake_kernel(func, name, parts, values, tensors, error)
        written = [i for i, t in enumerate(tensors) if compat.version_of(t) != versions[i]]
        if written and fake and any(not compat.is_fake(tensors[i]) for i in written):
            raise unseen(self.place_now(), f"`{name}` writes a real tensor with values that are being recorded")
        return self._note(func, name, parts, values, tensors, written, result)

    def _note(
        self,
        func: Any,
        name: str,
        parts: Unpacked,
        values: tuple[Value, ...],
        tensors: list[torch.Tensor],
        written: list[int],
        result: Any,
        parameters: tuple[Value, ...] = (),
    ) -> Any:
        """Write the call down, and return its result with new identities where it needs them."""
        effect = name in EFFECTS
        outs = unpack(result)
        if not outs.tensors and not written and not effect:
            return result
        random = self.meter.random
        known = all(value.known for value in values) and not effect and not parameters
        record = self._append(RecordKind.CALL, func, parts.template, values)
        record.effect, record.random, record.flops, record.parameters = effect, random, self.meter.flops, parameters
        tainted = random or any(value.random for value in values)
        if effect and name in ("requires_grad_", "__set__", "detach_") and not written:
            written = [0]
        for index in dict.fromkeys(written):
            self._write(record, tensors[index], known, tainted)
        by_id = {id(tensor): position for position, tensor in enumerate(tensors)}
        replaced = list(outs.tensors)
        for position, (tensor, path) in enumerate(zip(outs.tensors, outs.paths, strict=True)):
            if id(tensor) in by_id:
                if by_id[id(tensor)] in written or effect:
                    continue  # an in-place call returns what it wrote
                with compat.no_torch_function():
                    tensor = tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()
                replaced[position] = tensor
            elif id(tensor) in self.current:
                continue
            value = Value(ValueKind.RESULT, meta_of(tensor), name, record=record.index, path=path)
            value.known, value.random = known, tainted
            value.base = self._base(tensor, tensors)
            record.outputs.append((path, value))
            self._track(tensor, value)
        if any(a is not b for a, b in zip(replaced, outs.tensors, strict=True)):
            return fill(outs.template, replaced)
        return result

    def _append(self, kind: RecordKind, target: Any, template: Any, values: tuple[Value, ...]) -> Record:
        record = Record(
            len(self.records), kind, target, template, values, self.marking.stage, self.ambient(), self.place_now(), self.frame
        )
        self.records.append(record)
        self.frame.parts.append(record)
        return record

    # -- values -----------------------------------------------------------------------------------------------------

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the present value of a tensor; a real one never met before is a constant of the user's."""
        value = self.current.get(id(tensor))
        if value is None:
            if id(tensor) in self.poisoned:
                raise unseen(self.place_now(), self.poisoned[id(tensor)])
            if compat.is_fake(tensor):
                raise unseen(self.place_now(), "a tensor made by a call the recorder cannot see")
            value = Value(ValueKind.CONSTANT, meta_of(tensor), known=True, tensor=tensor)
            value.holder = self.holders.get(id(tensor))
            value.name = value.holder[1] if value.holder else "constant"
            self._track(tensor, value)
        elif value.kind is ValueKind.RESULT and tensor.requires_grad != value.meta.requires_grad:
            raise unseen(self.place_now(), "a tensor whose gradient was set up by a call the recorder cannot see")
        return value

    def _track(self, tensor: torch.Tensor, value: Value) -> None:
        self.current[id(tensor)] = value
        self.alive.append(tensor)
        self._remember_storage(tensor)

    def _remember_storage(self, tensor: torch.Tensor) -> None:
        key = compat.same_storage_key(tensor)
        if key is not None:
            self.storages.setdefault(key, []).append(tensor)

    def _base(self, tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Value | None:
        key = compat.same_storage_key(tensor)
        if key is not None:
            for argument in arguments:
                if compat.same_storage_key(argument) == key:
                    return self.current.get(id(argument))
            for other in self.storages.get(key, ()):
                if other is not tensor and id(other) in self.current:
                    return self.current[id(other)]
        return None

    def _write(self, record: Record, tensor: torch.Tensor, known: bool, random: bool) -> None:
        """Give new values to a written tensor and to all that share its memory."""
        key = compat.same_storage_key(tensor)
        sharing = list(self.storages.get(key, ())) if key is not None else []
        if not any(other is tensor for other in sharing):
            sharing.append(tensor)
        for other in sharing:
            before = self.current.get(id(other))
            if before is None or (before.record == record.index and before.before is not None):
                continue
            after = Value(before.kind, meta_of(other), before.name, before.index, record.index, (("written", None),), before)
            after.base, after.tensor, after.holder = before.base, before.tensor, before.holder
            after.known, after.random = known and before.known, random or before.random
            # The order matters to readers: the tensor that the call was given comes first.
            record.writes.insert(0, (before, after)) if other is tensor else record.writes.append((before, after))
            self.current[id(other)] = after

    def _before_write(self, tensors: list[torch.Tensor], args: Any, kwargs: Any, fake: bool) -> None:
        targets = list(unpack(kwargs["out"]).tensors) if "out" in kwargs else list(unpack(args[:1]).tensors)
        for target in targets:
            target = self.stand_ins.get(id(target), target)
            if compat.is_fake(target):
                continue
            value = self.value_of(target)
            if fake:
                self._become_fake(target)
            elif value.kind is ValueKind.CONSTANT and all(target is not saved for saved, _ in self.saved_constants):
                self.saved_constants.append((target, target.detach().clone()))

    def _become_fake(self, tensor: torch.Tensor) -> None:
        """From now on a fake stands for this constant and for every tensor that shares its memory."""
        key = compat.same_storage_key(tensor)
        sharing = self.storages.get(key, [tensor]) if key is not None else [tensor]
        mode = self.fakes.mode
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
            self._remember_storage(fake)

    # -- python values ----------------------------------------------------------------------------------------------

    def _to_python(
        self, func: Any, name: str, args: Any, kwargs: Any, parts: Unpacked, values: tuple[Value, ...], fake: bool
    ) -> Any:
        from ppdsl.recording.steering import python_of_constant, python_of_input

        if name == "__format__" and fake:
            return object.__format__(args[0], "") if not args[1:] or not args[1] else "?"
        if not fake:
            return python_of_constant(self, func, name, args, kwargs, values)
        if all(value.known for value in values):
            return python_of_input(self, func, name, parts, values)
        raise data_dependence(name, self.place_now(), self.frame, any(value.random for value in values))

    def _without_fake_kernel(
        self, func: Any, name: str, parts: Unpacked, values: tuple[Value, ...], tensors: list[torch.Tensor], error: Exception
    ) -> Any:
        from ppdsl.recording.probe import probe_call
        from ppdsl.recording.steering import shape_of_input

        if all(value.known for value in values) and isinstance(error, compat.DATA_ERRORS):
            return shape_of_input(self, func, parts, values)
        return probe_call(self, func, name, parts, values, tensors, error)

    # -- module calls -----------------------------------------------------------------------------------------------

    def on_module_call(self, original: Any, owner: type, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open a frame around a module's call, at the outermost `__call__` of its class."""
        if self.paused:
            return original(module, *args, **kwargs)
        depth = type(module).__mro__.index(owner)
        top = self.frame
        if top.module is module and depth > top.depth:
            top.depth = depth  # super().__call__() of the call that is open already
            return original(module, *args, **kwargs)
        self._note_randomness(top)
        count = self.calls.get(id(module), 0)
        self.calls[id(module)] = count + 1
        with self.marking.around(module, marks_of(module), count):
            frame = self._open(module, self.names.get(id(module), type(module).__name__), args, kwargs)
            if id(module) not in self.names:
                frame.registered = False
                if not any(True for _ in module.parameters(recurse=False)) and any(True for _ in module.children()):
                    frame.keep_open = frame.keep_open or "it is a container that forward itself made"
            frame.call, frame.depth = count, depth
            frame.marked = self.marking.inside(module)
            return self._inside(frame, functools.partial(original, module), args, kwargs)

    def on_function(self, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record functions that torch does not announce: custom autograd Functions, checkpoint, vmap, grad, cond."""
        if self.paused:
            return original(*args, **kwargs)
        if name in ("autocast_enter", "autocast_exit", "saved_hooks"):
            self._note_block(name)
            return original(*args, **kwargs)
        from ppdsl.recording.specials import call_special

        return call_special(self, name, original, args, kwargs)

    def _open(self, module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        with compat.no_torch_function():
            arguments = unpack((args, kwargs))
            values = tuple(self.value_of(self.stand_ins.get(id(t), t)) for t in arguments.tensors)
            place = self.place_now()
        frame = Frame(module, name, self.frame, len(self.records), arguments, values, self.ambient(), place, self.marking.stage)
        if holds_iterator((args, kwargs)):
            frame.keep_open = "an argument is an iterator, which can be read only once"
        self.frame.parts.append(frame)
        self.frame = frame
        return frame

    def _inside(self, frame: Frame, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _fingerprint((args, kwargs))
        try:
            try:
                if isinstance(frame.module, torch.jit.ScriptModule):
                    raise data_dependence("compiled code", frame.place, frame)
                return self._leave(frame, args, kwargs, function(*args, **kwargs), before)
            except (DataDependence, *compat.DATA_ERRORS, RuntimeError, NotImplementedError) as error:
                from ppdsl.recording.probe import probe_frame

                return self._leave(frame, args, kwargs, probe_frame(self, frame, function, args, kwargs, error), before)
        finally:
            self._note_randomness(frame)
            frame.end = len(self.records)
            self.frame = frame.parent if frame.parent is not None else self.root

    def _leave(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any) -> Any:
        """Note the outputs; what the module passes on unchanged gets a new identity, as if the module had made it."""
        if before != _fingerprint((args, kwargs)) and not frame.keep_open:
            frame.keep_open = "it changes an object among its arguments"
        with compat.no_torch_function():
            return self._note_outputs(frame, args, kwargs, result)

    def _note_outputs(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        outs = unpack(result)
        replaced, values = list(outs.tensors), []
        shared = _container_ids((args, kwargs))
        for position, tensor in enumerate(outs.tensors):
            tensor = self.stand_ins.get(id(tensor), tensor)
            value = self.value_of(tensor)
            if value.record < frame.start:
                if _rebuildable(result, outs.paths[position], shared):
                    tensor = self._pass_on(tensor, value)
                    replaced[position] = tensor
                    value = self.current[id(tensor)]
                elif not frame.keep_open:
                    frame.keep_open = "it returns an object that others hold too"
            values.append(value)
        frame.outputs = tuple(values)
        if any(a is not b for a, b in zip(replaced, outs.tensors, strict=True)):
            result = fill(outs.template, replaced)
            outs = unpack(result)
        frame.result = outs
        return result

    def _pass_on(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        alias = tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()
        record = self._append(RecordKind.IDENTITY, _identity, unpack(((tensor,), {})).template, (value,))
        out = Value(ValueKind.RESULT, meta_of(alias), value.name, record=record.index, known=value.known, random=value.random)
        out.base = value
        record.outputs.append(((), out))
        self._track(alias, out)
        return alias

    def on_attribute(self, module: Any, name: str, value: Any, before: Any) -> None:
        """Record `module.name = tensor`, alone or in a container; note plain values that another stage may read."""
        if self.paused or isinstance(value, torch.nn.Module):
            return
        if isinstance(value, (bool, int, float, str)):
            if type(before) is not type(value) or before != value:
                self.messages.append(Message(module, name, self.marking.stage, self.place_now()))
            return
        if not isinstance(value, (torch.Tensor, list, tuple, dict)):
            return
        with compat.no_torch_function():
            parts = unpack(value)
            if not parts.tensors:
                return
            values = tuple(self.value_of(self.stand_ins.get(id(t), t)) for t in parts.tensors)
        record = self._append(RecordKind.ATTRIBUTE, (module, name), parts.template, values)
        record.effect = True
        if isinstance(value, torch.Tensor):
            self.frame.attributes.append((module, name, values[0]))

    # -- surroundings -----------------------------------------------------------------------------------------------

    def ambient(self) -> Ambient:
        """Return the global switches as they stand."""
        return ambient_now(self.region if self.nesting else 0)

    def _note_block(self, name: str) -> None:
        if name == "saved_hooks":
            self.frame.saved_hooks = self.place_now()
        elif name == "autocast_enter":
            self.region += self.nesting == 0
            self.nesting += 1
        else:
            self.nesting -= 1

    def _note_randomness(self, frame: Frame) -> None:
        """Whether Python's or numpy's random numbers were drawn since the last look, by code of `frame` itself."""
        stream = random_fingerprint()
        if stream != self.stream:
            self.stream = stream
            frame.drew = True

    # -- places -----------------------------------------------------------------------------------------------------

    def place_now(self) -> Place | None:
        """Return the innermost line of code that is neither torch's nor the recorder's."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if not frame.f_code.co_filename.startswith(INNER_FILES) and not frame.f_code.co_filename.startswith("<"):
                return Place(frame.f_code, frame.f_lasti)
            frame = frame.f_back
        return None


class _Meter(TorchDispatchMode):
    """Counts floating-point operations and notices random numbers, operator by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.random = False

    def reset(self) -> None:
        self.flops, self.random = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


_ATOMIC = (torch.Tensor, torch.nn.Module, str, bytes, int, float, type(None), type, types.FunctionType, torch.dtype, torch.device)


def _fingerprint(value: Any, depth: int = 3) -> Any:
    """Identity of what an object holds, three levels deep; equal before and after a call that changed nothing."""
    if depth == 0 or isinstance(value, _ATOMIC):
        return id(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        return (id(value) if not isinstance(value, tuple) else 0, *(_fingerprint(item, depth - 1) for item in value))
    if isinstance(value, dict):
        return (0, *((id(key), _fingerprint(item, depth - 1)) for key, item in value.items()))
    attributes = getattr(value, "__dict__", None)
    if not attributes:
        return id(value)
    return (id(value), *((name, _fingerprint(item, depth - 1)) for name, item in attributes.items()))


def _container_ids(value: Any, depth: int = 0) -> set[int]:
    found: set[int] = set()
    if isinstance(value, (list, dict)) and depth > 1:
        found.add(id(value))
    if depth < 4 and isinstance(value, (tuple, list)):
        for item in value:
            found |= _container_ids(item, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for item in value.values():
            found |= _container_ids(item, depth + 1)
    return found


def _rebuildable(result: Any, path: Any, shared: set[int]) -> bool:
    """Whether the containers on the way to a leaf are this call's own, so that they may be built again."""
    for kind, key in path:
        if kind == "node" or id(result) in shared:
            return False
        if kind == "attr" and not hasattr(type(result), "__dataclass_fields__"):
            return False
        result = result[key] if kind == "item" else getattr(result, key)
    return True


def stage_key(value: Key | None) -> str:
    """Return a key as people read it."""
    return "no stage" if value is None else f"stage {value}"
