"""What a split would silently change: refused, or said as a warning."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording.collectives import check_collectives
from ppdsl.recording.findings import error_at, labels_of
from ppdsl.recording.items import Collapsed, Item, collapse
from ppdsl.recording.tape import Frame, Tape, Value
from ppdsl.recording.visits import Visit

__all__ = ["check_borders", "check_kept", "check_open_frames", "check_strict", "order_warnings", "warnings_of"]


def check_open_frames(tape: Tape, collapsed: Collapsed) -> None:
    """Refuse modules that were taken apart although something hangs on their being called as one.

    Raises:
        RecordingError: Full backward hooks on such a module, or collectives, or random numbers of Python or numpy,
            between modules.
    """
    check_collectives(tape.root, collapsed.open_frames)
    for frame in collapsed.open_frames:
        module = frame.module
        if module is not None and (module._backward_hooks or module._backward_pre_hooks):
            raise error_at(
                "backward-hooks",
                f"Module `{frame.name or type(module).__name__}` has full backward hooks, but {frame.keep_open}, so "
                "its backward is no single step.",
                frame.place,
                "hook the modules inside its stages instead",
            )
    for frame in (tape.root, *collapsed.open_frames):
        for place, code, what in (
            (frame.foreign_mode, "dispatch-mode", "A TorchDispatchMode is entered around"),
            (frame.seeded, "torch-seed", "Torch's random numbers are seeded, or their state is set, in"),
            (frame.read_grad, "grad-read", "`.grad` of a parameter is read, and is None while recording, in"),
        ):
            if place is not None:
                raise error_at(
                    code,
                    f"{what} code that is taken apart, where it is not carried over.",
                    place,
                    "do it inside a module that lies in one stage, or around the whole step",
                )
        if frame.drew:
            raise error_at(
                "python-random",
                f"forward of {type(frame.module).__name__ if frame.module is not None else frame.name} draws random "
                "numbers from Python or numpy between modules: a recording would fix them for ever.",
                frame.place,
                "draw them with torch, or inside a module that lies in one stage",
            )


def check_kept(tape: Tape, collapsed: Collapsed) -> None:
    """Refuse a forward that leaves tensors or submodules on modules in a way that no stage program repeats.

    Raises:
        RecordingError: Code between modules registered or exchanged a buffer; any code added a submodule or parameter.
    """
    taken_apart = {id(frame) for frame in (tape.root, *collapsed.open_frames)}
    pending = [tape.root]
    while pending:
        frame = pending.pop()
        pending += [part for part in frame.parts if isinstance(part, Frame)]
        for module, entry in frame.kept:
            table, _, name = entry.rpartition(".")
            if id(frame) in taken_apart or table in ("_parameters", "_modules"):
                raise error_at(
                    "module-state",
                    f"forward leaves another `{name}` on a {type(module).__name__} than it found there, in a way that "
                    "no stage program would repeat.",
                    frame.place,
                    "make modules, parameters and buffers in __init__ (or run the model once before), and assign new "
                    "buffers as `self.name = ...`",
                )


def check_borders(visits: list[Visit], collapsed: Collapsed) -> None:
    """Refuse `torch.autograd.grad`, `backward` and hooks when the way back leaves their stage.

    Raises:
        RecordingError: A gradient would have to cross a border while forward runs.
    """
    home = {id(item): visit for visit in visits for item in visit.items}
    makers = {id(value): item for item in collapsed.items for _, value in (*item.outputs, *item.writes)}
    for item in collapsed.items:
        name = getattr(item.target, "__name__", "")
        if name == "register_hook" and item.inputs:
            maker = makers.get(id(collapsed.resolve(item.inputs[0])))
            if maker is not None and home.get(id(maker)) is not home.get(id(item)):
                raise error_at(
                    "hook-over-border",
                    f"A hook on a tensor of stage {home[id(maker)].key} needs tensors of stage {home[id(item)].key}: "
                    "there, it would get a part of the gradient.",
                    item.place,
                    "compute what the hook needs in the stage that makes the tensor",
                )
        if item.target is torch.autograd.grad:
            ends = [value for value in item.inputs if value.meta.requires_grad]
        elif name == "backward" and item.effect:
            ends = list(item.inputs)
        else:
            continue
        for other in _ancestors(ends, makers, collapsed):
            if home.get(id(other)) is not home.get(id(item)) and _makes_gradients(other):
                raise error_at(
                    "grad-over-border",
                    f"`{name}` inside forward needs gradients through stage {home[id(other)].key}, another stage "
                    "than its own.",
                    item.place,
                    "put all that it differentiates into one stage",
                )


def warnings_of(tape: Tape, collapsed: Collapsed) -> tuple[Diagnostic, ...]:
    """Return what a split does not carry over, and what it cannot see."""
    found = [
        Diagnostic(
            "saved-tensors-hooks",
            "Saved-tensor hooks around code that is taken apart are not carried over.",
            labels_of(frame.saved_hooks),
            "enter them inside a module that lies in one stage",
        )
        for frame in (tape.root, *collapsed.open_frames)
        if frame.saved_hooks is not None
    ]
    stages: dict[int, set[Any]] = {}
    if tape.messages:
        for item in collapsed.items:
            if isinstance(item.target, torch.nn.Module):
                for module in item.target.modules():
                    stages.setdefault(id(module), set()).add(item.stage)
    messages = {(id(message.module), message.attribute, message.place): message for message in tape.messages}
    for message in messages.values():
        others = stages.get(id(message.module), set()) - {message.stage, None}
        if others and message.stage is not None:
            found.append(
                Diagnostic(
                    "python-message",
                    f"Stage {message.stage} writes attribute `{message.attribute}` of a module of stage "
                    f"{', '.join(map(str, sorted(others, key=str)))}: Python values do not travel between ranks.",
                    labels_of(message.place),
                    "pass it as a tensor, through an argument",
                )
            )
    return tuple(found)


def order_warnings(visits: list[Visit]) -> tuple[Diagnostic, ...]:
    """Tell when stage after stage draws torch's random numbers in another order than the model alone."""
    drawing = [item for visit in visits for item in visit.items if item.random]
    late = next((b for a, b in itertools.pairwise(drawing) if b.order < a.order), None)
    if late is None:
        return ()
    return (
        Diagnostic(
            "random-order",
            f"`{late.name}` draws random numbers after a stage that the model alone runs later: with one seed, dropout "
            "and noise come out otherwise than without stages.",
            labels_of(late.place),
            "draw in the order of the stages, if the same numbers matter",
        ),
    )


def check_strict(tape: Tape) -> None:
    """Refuse torch calls and modules outside every stage.

    Raises:
        RecordingError: There is one.
    """
    for item in collapse(tape).items:
        if item.stage is None:
            raise RecordingError(
                Diagnostic(
                    "unmarked-operation",
                    f"`{item.name}` runs outside every stage.",
                    labels_of(item.place),
                    "put it into a `with pp.stage(...)` block, or record without strict=True",
                )
            )


def _ancestors(values: list[Value], makers: dict[int, Item], collapsed: Collapsed) -> list[Item]:
    found: dict[int, Item] = {}
    pending = [collapsed.resolve(value) for value in values]
    while pending:
        item = makers.get(id(pending.pop()))
        if item is not None and id(item) not in found:
            found[id(item)] = item
            pending.extend(collapsed.resolve(value) for value in item.inputs if value.meta.requires_grad)
    return list(found.values())


def _makes_gradients(item: Item) -> bool:
    return any(value.meta.requires_grad for _, value in item.outputs)
