"""Collectives of torch.distributed that forward or the loss calls: a module called whole repeats its own.

Between modules, torch calls are written down one by one. A collective is no call that could be: it returns nothing, or
a handle, and takes part in what other ranks do. There it would be left out of the stage programs, or refused by torch's
kernels for fakes, as chance and the version of torch have it; so it is refused here.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ppdsl.diagnostics import RecordingError
from ppdsl.recording import specials
from ppdsl.recording.findings import error_at, is_inner
from ppdsl.recording.probe import place_of
from ppdsl.recording.tape import Frame
from ppdsl.source import Place

__all__ = ["Collective", "check_collectives", "explained", "forced_call", "note_collective"]

_DISTRIBUTED = f"{Path(torch.__file__).parent / 'distributed'}{os.sep}"
_COMMUNICATING = ("distributed_c10d.py", "_functional_collectives.py", f"nn{os.sep}functional.py")
_WRAPPERS = ("wrapper", "inner")  # around each function of torch.distributed, to log it


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, or a message to another rank, that was heard.

    Attributes:
        name: The function of torch.distributed that the user called.
        place: The user's line.
        repeated: It was called inside a function that is recorded as one call, and so is run again with it.
    """

    name: str
    place: Place | None
    repeated: bool


def note_collective(recorder: Any, operator: Any) -> None:
    """Remember that code of the open frame calls a collective."""
    name, direct = _function_called()
    found = Collective(name or str(operator.overloadpacket), recorder.place_now(), recorder.paused and not direct)
    recorder.frames.current.collectives.append(found)


def check_collectives(root: Frame, open_frames: Iterable[Frame]) -> None:
    """Refuse collectives in code that is taken apart.

    Args:
        root: The frame around everything; what it calls directly is the loss function.
        open_frames: Calls of modules that are taken apart.

    Raises:
        RecordingError: There is one.
    """
    for frame in (root, *open_frames):
        for found in frame.collectives:
            # Torch's kernels for fakes draw Python's random numbers: then not even the call as a whole is kept.
            if not found.repeated or frame.drew:
                raise _refused(frame, found)


def explained(error: BaseException, root: Frame) -> RecordingError | None:
    """Return the better error when it was a collective that could not run on fakes, else None."""
    places = [place_of(error), None if error.__cause__ is None else place_of(error.__cause__)]
    pending = [root]
    while pending:
        frame = pending.pop()
        for found in frame.collectives:
            if found.place is not None and found.place in places:
                return _refused(frame, found)
        pending += [part for part in frame.parts if isinstance(part, Frame)]
    return None


def forced_call(frame: Frame, reason: str) -> RecordingError:
    """Return the error for a module that can only be called whole, and cannot be.

    Args:
        frame: The module's call.
        reason: Why it cannot.
    """
    if frame.collectives:
        return _refused(frame, frame.collectives[0])
    return error_at(
        "forced-call",
        f"Module `{frame.name}` decides by numbers what it does, so it can only be called whole, but {reason}.",
        frame.place,
        "pass what it needs as arguments, and return what others need",
    )


def _refused(frame: Frame, found: Collective) -> RecordingError:
    where = "the loss function" if frame.parent is None else f"forward of {type(frame.module).__name__}"
    if frame.parent is not None and frame.module is None:
        where = f"`{frame.name}`"
    after = "after the step, on the loss it returns" if frame.parent is None else "before or after the step"
    return error_at(
        "collective-between-modules",
        f"`{found.name}` of torch.distributed is called in {where}, in code that is taken apart, where no stage "
        "program would repeat it.",
        found.place,
        f"call it {after}, or inside a module that lies in one stage; replicas are averaged by mesh=",
    )


def _function_called() -> tuple[str | None, bool]:
    """Return the outermost function of torch.distributed on the stack, above the user's code.

    Returns:
        Its name, and whether the user called a collective as such. Torch may differentiate one by an autograd Function,
        and records of both would then be made; a DTensor that is redistributed is one call.
    """
    frame: types.FrameType | None = sys._getframe(1)
    name, special, direct = None, False, False
    while frame is not None and is_inner(frame.f_code.co_filename):
        code = frame.f_code
        if code.co_filename.startswith(_DISTRIBUTED) and code.co_name not in _WRAPPERS:
            name, direct = code.co_name, special and code.co_filename.endswith(_COMMUNICATING)
        special = special or code.co_filename == specials.__file__
        frame = frame.f_back
    return name, direct
