"""Module calls while recording: a frame opens at the outermost `__call__`, before hooks, and closes after them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ppdsl.annotate import marks_of
from ppdsl.recording import compat
from ppdsl.recording.findings import DataDependence, data_dependence
from ppdsl.recording.ledger import Ledger
from ppdsl.recording.objects import container_ids, fingerprint, rebuildable
from ppdsl.recording.probe import probe_frame
from ppdsl.recording.sameness import state_of
from ppdsl.recording.structure import Atom, Branch, Template, fill, held_tensors, hides_tensor, holds_iterator, unpack
from ppdsl.recording.tape import Frame, RecordKind, Value, ValueKind, ambient_now, meta_of, origin

__all__ = ["Frames"]


class Frames:
    """The tree of calls of one recording.

    Attributes:
        root: The frame around everything.
        current: The innermost open frame.
    """

    def __init__(self, recorder: Any, ledger: Ledger, model: torch.nn.Module) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._names = {id(module): name for name, module in model.named_modules()}
        self._calls: dict[int, int] = {}
        self._pictures: list[tuple[Frame, list[Any]]] = []
        self.root = Frame(None, type(model).__name__, None, 0, unpack(()), (), ambient_now(), None)
        self.current = self.root

    def call(self, original: Any, owner: type, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open a frame around a module's call, at the outermost `__call__` of its class."""
        depth = type(module).__mro__.index(owner)
        top = self.current
        if top.module is module and depth > top.depth:
            top.depth = depth  # super().__call__() of the call that is open already
            return original(module, *args, **kwargs)
        self._recorder.streams.look(top)
        count = self._calls.get(id(module), 0)
        self._calls[id(module)] = count + 1
        with self._recorder.marking.around(module, marks_of(module), count):
            frame = self.open(module, self._names.get(id(module), type(module).__name__), args, kwargs)
            if id(module) not in self._names:
                frame.registered = False
                if not any(True for _ in module.parameters(recurse=False)) and any(True for _ in module.children()):
                    frame.keep_open = frame.keep_open or "it is a container that forward itself made"
            frame.call, frame.depth = count, depth
            frame.marked = self._recorder.marking.inside(module)
            return self.inside(frame, functools.partial(original, module), args, kwargs)

    def open(self, module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """Begin a frame for a call with these arguments."""
        with compat.no_torch_function():
            arguments = unpack((args, kwargs))
            values = tuple(self._ledger.value_of(self._ledger.stand_in(t)) for t in arguments.tensors)
            place = self._recorder.place_now()
        frame = Frame(
            module,
            name,
            self.current,
            len(self._recorder.records),
            arguments,
            values,
            self._recorder.ambient(),
            place,
            self._recorder.marking.stage,
        )
        if holds_iterator((args, kwargs)):
            frame.keep_open = "an argument is an iterator, which can be read only once"
        elif hides_tensor(arguments.template) is not None:
            frame.keep_open = "a function or an object among its arguments holds a tensor of its own"
        elif compat.mode_depths()[0] > self._recorder.depths[0]:
            frame.keep_open = "it runs inside a TorchFunctionMode that forward entered"
        elif any(map(compat.own_attributes, self._activations(frame))):
            frame.keep_open = "an argument is a tensor with an attribute of its own"
        self._note_held(frame)
        if module is not None and not isinstance(module, torch.jit.ScriptModule):
            self._recorder.upkeep.look(module, self.current)
        self._pictures.append((frame, _picture(frame.arguments.template)))
        self.current.parts.append(frame)
        self.current = frame
        return frame

    def settle(self) -> None:
        """At the end: an object that a call was given and that has changed since cannot be handed over again."""
        upkeep = self._recorder.upkeep
        upkeep.look(self._recorder.model, self.root)
        for frame in (self.root, *(frame for frame, _ in self._pictures)):
            frame.kept = upkeep.lasting(frame)
        for frame, picture in self._pictures:
            if picture and picture != _picture(frame.arguments.template) and not frame.keep_open:
                frame.keep_open = "an object among its arguments is changed afterwards"

    def _activations(self, frame: Frame) -> list[torch.Tensor]:
        """The tensors among the arguments that this forward pass made."""
        pairs = zip(frame.arguments.tensors, frame.inputs, strict=True)
        return [tensor for tensor, value in pairs if origin(value).kind in (ValueKind.RESULT, ValueKind.INPUT)]

    def _note_held(self, frame: Frame) -> None:
        """Note what the module reaches without being given it: such a way ends at the recorded tensor."""
        if frame.module is None:
            return
        held = {id(self._ledger.current[id(t)]) for t in held_tensors(frame.module) if id(t) in self._ledger.current}
        inner: Frame | None = frame
        while held and inner is not None:
            inner.held |= held
            inner = inner.parent

    def inside(self, frame: Frame, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call in its frame; where fakes do not get through, on real tensors alone. Then close the frame."""
        before = fingerprint((args, kwargs))
        refused = len(self._recorder.refusals)
        try:
            try:
                if isinstance(frame.module, torch.jit.ScriptModule):
                    raise data_dependence("compiled code", frame.place, frame)
                return self._leave(frame, args, kwargs, function(*args, **kwargs), before)
            except (DataDependence, *compat.DATA_ERRORS, RuntimeError, NotImplementedError) as error:
                result = probe_frame(self._recorder, frame, function, args, kwargs, error)
                del self._recorder.refusals[refused:]
                return self._leave(frame, args, kwargs, result, before)
        finally:
            self._recorder.streams.look(frame)
            if frame.module is not None:
                self._recorder.upkeep.look(frame.module, frame)
            frame.end = len(self._recorder.records)
            self.current = frame.parent if frame.parent is not None else self.root

    def _leave(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any) -> Any:
        """Note the outputs; what the module passes on unchanged gets a new identity, as if the module had made it."""
        if before != fingerprint((args, kwargs)) and not frame.keep_open:
            frame.keep_open = "it changes an object among its arguments"
        with compat.no_torch_function():
            return self._note_outputs(frame, args, kwargs, result)

    def _note_outputs(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        outs = unpack(result)
        replaced, values = list(outs.tensors), []
        shared = container_ids((args, kwargs))
        for position, tensor in enumerate(outs.tensors):
            tensor = self._ledger.stand_in(tensor)
            value = self._ledger.value_of(tensor)
            if value.record < frame.start:
                if rebuildable(result, outs.paths[position], shared):
                    tensor = self._pass_on(tensor, value)
                    replaced[position] = tensor
                    value = self._ledger.current[id(tensor)]
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
        record = self._recorder.append(RecordKind.IDENTITY, _identity, unpack(((tensor,), {})).template, (value,))
        out = Value(
            ValueKind.RESULT, meta_of(alias), value.name, record=record.index, known=value.known, random=value.random
        )
        out.base = value
        record.outputs.append(((), out))
        self._ledger.track(alias, out)
        return alias


def _picture(template: Template) -> list[Any]:
    """What the objects and functions among some arguments say at the moment."""
    if isinstance(template, Branch):
        return [state for child in template.children for state in _picture(child)]
    if isinstance(template, Atom) and not isinstance(template.value, (bool, int, float, str, type(None), torch.Size)):
        return [state_of(template.value)]
    return []


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
