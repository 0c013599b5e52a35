"""From a tape to the outline that a spec is resolved against: modules, calls, steps, without torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppdsl.graph.outline import Cutpoint, ModelOutline, ModuleCall, ModuleInfo, ParameterInfo, Step
from ppdsl.recording.tape import Frame, Record, Tape, Value, ValueKind, origin
from ppdsl.units import Bytes, Flops

__all__ = ["module_frames", "outline_of"]


def outline_of(tape: Tape, model: torch.nn.Module) -> ModelOutline:
    """Return what a spec can speak of in a recording.

    There is one step for each record of the tape, and one call for each call of a registered module, so that an
    assignment made for the outline can be applied to the tape.

    Args:
        tape: The recording.
        model: The recorded model.
    """
    first_names = _first_names(model)
    frames = list(module_frames(tape))
    index_of = {id(frame): index for index, frame in enumerate(frames)}
    calls = tuple(
        ModuleCall(index, frame.name, frame.call, _around(frame.parent, index_of), frame.start, frame.end)
        for index, frame in enumerate(frames)
    )
    return ModelOutline(
        type(model).__name__,
        _modules(model, first_names),
        _parameters(model),
        calls,
        tuple(_step(record, index_of, first_names) for record in tape.records),
        tuple(Cutpoint(cut.name, cut.records, cut.optional, cut.place.span) for cut in tape.cutpoints),
    )


def module_frames(tape: Tape) -> Iterator[Frame]:
    """Yield the calls of the model's own modules, in the order in which they began."""
    pending = [tape.root]
    while pending:
        frame = pending.pop()
        if frame.module is not None and frame.registered:
            yield frame
        pending += [part for part in reversed(frame.parts) if isinstance(part, Frame)]


def _first_names(model: torch.nn.Module) -> dict[int, str]:
    """The first name of each parameter, by its id."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def _modules(model: torch.nn.Module, first_names: dict[int, str]) -> tuple[ModuleInfo, ...]:
    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), (module, []))[1].append(name)
    plain = (torch.nn.Module, object)
    return tuple(
        ModuleInfo(
            names[0],
            tuple(kind.__name__ for kind in type(module).__mro__ if kind not in plain),
            tuple(dict.fromkeys(first_names[id(p)] for p in module.parameters(recurse=False))),
            tuple(names[1:]),
        )
        for module, names in found.values()
    )


def _parameters(model: torch.nn.Module) -> tuple[ParameterInfo, ...]:
    found: dict[int, tuple[torch.nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return tuple(
        ParameterInfo(tuple(names), p.numel(), Bytes(p.numel() * p.element_size()), p.requires_grad)
        for p, names in found.values()
    )


def _around(frame: Frame | None, index_of: dict[int, int]) -> int | None:
    """Index of the call that a frame belongs to: calls of functions and of unregistered modules are looked through."""
    while frame is not None and id(frame) not in index_of:
        frame = frame.parent
    return None if frame is None else index_of[id(frame)]


def _step(record: Record, index_of: dict[int, int], first_names: dict[int, str]) -> Step:
    made = (*(value for _, value in record.outputs), *(after for _, after in record.writes))
    return Step(
        record.index,
        _around(record.frame, index_of),
        _name(record),
        tuple(sorted({value.record for value in record.inputs if value.record >= 0})),
        _used_parameters((*record.inputs, *record.parameters), first_names),
        Flops(record.flops),
        Bytes(sum(value.meta.bytes for value in made)),
        None if record.place is None else record.place.span,
    )


def _used_parameters(values: tuple[Value, ...], first_names: dict[int, str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for value in values:
        start = origin(value)
        if start.kind is ValueKind.PARAMETER:
            found[first_names.get(id(start.tensor), start.name)] = None
    return tuple(found)


def _name(record: Record) -> str:
    target = record.target[1] if isinstance(record.target, tuple) else record.target
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", type(target).__name__))
