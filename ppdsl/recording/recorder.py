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
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ppdsl.annotate import hear, listen
from ppdsl.diagnostics import RecordingError
from ppdsl.recording import compat
from ppdsl.recording.collectives import note_collective
from ppdsl.recording.fakes import FakeState
from ppdsl.recording.findings import is_inner, unseen
from ppdsl.recording.frames import Frames
from ppdsl.recording.ledger import Ledger
from ppdsl.recording.marking import MarkState
from ppdsl.recording.meter import Meter
from ppdsl.recording.naming import EFFECTS, TO_PYTHON, writes_in_place
from ppdsl.recording.norms import statistics_written
from ppdsl.recording.patches import intercepting
from ppdsl.recording.questions import answer, is_question
from ppdsl.recording.randomness import Generators, Streams
from ppdsl.recording.settings import Reads
from ppdsl.recording.side import SideRecorder
from ppdsl.recording.specials import call_special, opened_closure
from ppdsl.recording.steering import python_value, without_fake_kernel
from ppdsl.recording.structure import Unpacked, fill, unpack
from ppdsl.recording.tape import Ambient, Message, Record, RecordKind, Value, ValueKind, ambient_now, meta_of
from ppdsl.recording.unknown import Unknown, restore_numbers
from ppdsl.recording.upkeep import Upkeep
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
        holders: Where plain tensor attributes of the model live, by id.
        generators: The user's generators met so far.
        heed_marks: Whether stage marks have their effect; False when a spec divides the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fakes: FakeState,
        examples: Sequence[torch.Tensor],
        fake_inputs: Sequence[torch.Tensor],
        names: Sequence[str],
        holders: dict[int, tuple[Any, str]],
        generators: Generators,
        *,
        heed_marks: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.fakes = fakes
        self.examples = tuple(examples)
        self.records: list[Record] = []
        self.ledger = Ledger(fakes, holders, self.place_now)
        self.frames = Frames(self, self.ledger, model)
        self.paused = False
        self.substituting = True
        self.spied: dict[int, torch.Tensor] | None = None
        self.refusals: list[RecordingError] = []
        self.unknowns: list[tuple[torch.nn.Module, str, Unknown, bool]] = []
        self.assigned: set[tuple[int, str]] = set()
        self.depths = (0, 0)
        self.messages: list[Message] = []
        self.reads: Reads = {}
        self.generators = generators
        self.region = self.nesting = 0
        self.streams = Streams()
        self.marking = MarkState(self, heeded=heed_marks)
        self.meter = Meter(functools.partial(note_collective, self))
        self.inputs: tuple[Value, ...] = ()
        for index, (tensor, example) in enumerate(zip(fake_inputs, examples, strict=True)):
            known = not compat.is_fake(example) and example.device.type != "meta"
            value = Value(ValueKind.INPUT, meta_of(tensor), names[index], index=index, known=known)
            self.inputs += (value,)
            if id(tensor) not in self.ledger.current:
                self.ledger.track(tensor, value)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function` and hear what it does."""
        modules = list(self.model.modules())
        with listen(self.marking), hear(SideRecorder(self)), intercepting(self, modules), self.meter, self:
            self.depths = compat.mode_depths()
            self.upkeep = Upkeep(self.model)
            result = function(*args, **kwargs)
        if self.refusals:
            raise self.refusals[0]
        self.frames.settle()
        self.streams.look(self.frames.root)
        self.frames.root.end = len(self.records)
        return result

    def restore_constants(self) -> None:
        """Undo what real calls did to the user's tensors and generators that are neither parameters nor buffers."""
        restore_numbers(self)
        self.ledger.restore()

    @contextmanager
    def quiet(self) -> Iterator[dict[int, torch.Tensor]]:
        """Record nothing inside; yields the tensors that calls meet, by id."""
        outer = self.paused, self.spied
        self.paused, self.spied = True, {}
        try:
            yield self.spied
        finally:
            self.paused, self.spied = outer

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember an error raised inside: code around that catches it must not go on as if nothing had been said."""
        try:
            yield
        except RecordingError as error:
            self._refuse(error)
            raise

    def _refuse(self, error: RecordingError) -> None:
        if not any(error is other for other in self.refusals):
            self.refusals.append(error)

    # -- torch calls ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._hear(func, args, kwargs or {})
        except RecordingError as error:
            self._refuse(error)
            raise

    def _hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.paused:
            return self._run_paused(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if is_question(name):
            return answer(self, func, name, args, kwargs)
        return self.call(func, name, args, kwargs)

    def _run_paused(self, func: Any, args: Any, kwargs: Any) -> Any:
        parts = unpack((args, kwargs))
        if self.spied is not None:
            for tensor in parts.tensors:
                self.spied[id(tensor)] = tensor
        if self.substituting:
            tensors = [self.ledger.stand_in(t) for t in parts.tensors]
            if any(a is not b for a, b in zip(tensors, parts.tensors, strict=True)):
                args, kwargs = fill(parts.template, tensors)
        return self.meter.call(func, args, kwargs)

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run one torch call and write it down."""
        if name in EFFECTS:
            args = tuple(map(opened_closure, args))
        parts = unpack((args, kwargs))
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self.generators.use(generator, self.frames.current, self.place_now())
        tensors = [self.ledger.stand_in(t) for t in parts.tensors]
        fake = any(map(compat.is_fake, tensors))
        if writes_in_place(name) or "out" in kwargs:
            self.ledger.before_write(args, kwargs, fake=fake)
            tensors = [self.ledger.stand_in(t) for t in tensors]
        values = tuple(self.ledger.value_of(tensor) for tensor in tensors)
        if any(a is not b for a, b in zip(tensors, parts.tensors, strict=True)):
            args, kwargs = fill(parts.template, tensors)
        if name in TO_PYTHON:
            return python_value(self, func, name, args, kwargs, parts, values, fake=fake)
        if compat.mode_depths()[1] > self.depths[1]:
            self.frames.current.foreign_mode = self.place_now()
        versions = [compat.version_of(tensor) for tensor in tensors]
        self.meter.reset()
        try:
            result = func(*args, **kwargs)
        except (*compat.DATA_ERRORS, RuntimeError, NotImplementedError) as error:
            if not fake or isinstance(error, torch.OutOfMemoryError):
                raise
            result = without_fake_kernel(self, func, name, parts, values, tensors, error)
        statistics = set(map(id, statistics_written(func, args, kwargs)))
        written = [i for i, t in enumerate(tensors) if compat.version_of(t) != versions[i] or id(t) in statistics]
        if written and fake and any(not compat.is_fake(tensors[i]) for i in written):
            raise unseen(self.place_now(), f"`{name}` writes a real tensor with values that are being recorded")
        return self.note(func, name, parts, values, tensors, written, result)

    def note(
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
        record = self.append(RecordKind.CALL, func, parts.template, values)
        record.effect, record.random, record.flops, record.parameters = effect, random, self.meter.flops, parameters
        record.drawing = self.meter.drawing or ((func,) if random else ())
        tainted = random or any(value.random for value in values)
        if effect and name in ("requires_grad_", "__set__", "detach_") and not written:
            written = [0]
        for index in dict.fromkeys(written):
            self.ledger.write(record, tensors[index], known, tainted)
        by_id = {id(tensor): position for position, tensor in enumerate(tensors)}
        replaced = list(outs.tensors)
        for position, (tensor, path) in enumerate(zip(outs.tensors, outs.paths, strict=True)):
            if id(tensor) in by_id:
                if by_id[id(tensor)] in written or effect:
                    continue  # an in-place call returns what it wrote
                with compat.no_torch_function():
                    tensor = tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()
                replaced[position] = tensor
            elif id(tensor) in self.ledger.current:
                continue
            value = Value(ValueKind.RESULT, meta_of(tensor), name, record=record.index, path=path)
            value.known, value.random = known, tainted
            value.base = self.ledger.base(tensor, tensors)
            record.outputs.append((path, value))
            self.ledger.track(tensor, value)
        if any(a is not b for a, b in zip(replaced, outs.tensors, strict=True)):
            return fill(outs.template, replaced)
        return result

    def append(self, kind: RecordKind, target: Any, template: Any, values: tuple[Value, ...]) -> Record:
        """Write a record down in the open frame."""
        record = Record(
            len(self.records),
            kind,
            target,
            template,
            values,
            self.marking.stage,
            self.ambient(),
            self.place_now(),
            self.frames.current,
        )
        self.records.append(record)
        self.frames.current.parts.append(record)
        return record

    # -- module calls -----------------------------------------------------------------------------------------------

    def on_module_call(
        self, original: Any, owner: type, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module is called."""
        if self.paused:
            return original(module, *args, **kwargs)
        with self.noting():
            return self.frames.call(original, owner, module, args, kwargs)

    def on_function(self, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record functions that torch does not announce: custom autograd Functions, checkpoint, vmap, grad, cond."""
        if self.paused:
            return original(*args, **kwargs)
        if name in ("manual_seed", "set_rng_state", "seed"):
            self.frames.current.seeded = self.place_now()
            return original(*args, **kwargs)
        if name in ("autocast_enter", "autocast_exit", "saved_hooks"):
            self._note_block(name)
            return original(*args, **kwargs)
        with self.noting():
            return call_special(self, name, original, args, kwargs)

    def on_read(self, module: Any, name: str) -> None:
        """A number, flag or text is read from a module."""
        if not self.paused:
            frame = self.frames.current
            self.reads[id(frame), id(module), name] = (frame, module, name)

    def on_attribute(self, module: Any, name: str, value: Any, before: Any) -> None:
        """Record `module.name = tensor`, alone or in a container; note plain values that another stage may read."""
        self.upkeep.wrote(module, name, self.frames.current, recorded=False)
        if self.paused and name != "training":
            self.assigned.add((id(module), name))
        if self.paused or isinstance(value, torch.nn.Module):
            return
        if isinstance(value, (bool, int, float, str)):
            if type(before) is not type(value) or before != value:
                frame, place = self.frames.current, self.place_now()
                self.messages.append(Message(module, name, self.marking.stage, place, frame, len(self.records)))
            return
        if not isinstance(value, (torch.Tensor, list, tuple, dict)):
            return
        with compat.no_torch_function():
            parts = unpack(value)
            if not parts.tensors:
                return
            values = tuple(self.ledger.value_of(self.ledger.stand_in(t)) for t in parts.tensors)
        self.upkeep.wrote(module, name, self.frames.current, recorded=True)
        record = self.append(RecordKind.ATTRIBUTE, (module, name), parts.template, values)
        record.effect = True
        if isinstance(value, torch.Tensor):
            self.frames.current.attributes.append((module, name, values[0]))

    # -- surroundings -----------------------------------------------------------------------------------------------

    def ambient(self) -> Ambient:
        """Return the global switches as they stand."""
        return ambient_now(self.region if self.nesting else 0)

    def _note_block(self, name: str) -> None:
        if name == "saved_hooks":
            self.frames.current.saved_hooks = self.place_now()
        elif name == "autocast_enter":
            self.region += self.nesting == 0
            self.nesting += 1
        else:
            self.nesting -= 1

    # -- places -----------------------------------------------------------------------------------------------------

    def place_now(self) -> Place | None:
        """Return the innermost line of code that is neither torch's nor the recorder's."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if not is_inner(frame.f_code.co_filename):
                return Place(frame.f_code, frame.f_lasti)
            frame = frame.f_back
        return None
