"""The errors of a recording, worded once: what is wrong, the user's line, what to do."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch

from ppdsl import annotate
from ppdsl.diagnostics import Diagnostic, Label, RecordingError
from ppdsl.source import Place, Span

__all__ = ["INNER_FILES", "DataDependence", "data_dependence", "error_at", "is_inner", "labels_of", "unseen"]


# Code that is not the user's: a finding points at the innermost line outside of it.
INNER_FILES = (
    f"{Path(torch.__file__).parent}{os.sep}",
    str(Path(annotate.__file__).parent.parent / "recording"),
    f"{Path(annotate.__file__).parent}{os.sep}",
    contextlib.__file__,
)


@functools.lru_cache(4096)
def is_inner(file: str) -> bool:
    """Whether code of this file is torch's or the recorder's, not the user's."""
    return file.startswith((*INNER_FILES, "<"))


class DataDependence(RecordingError):
    """Code cannot run on fakes; if it is a module that lies in one stage, it is tried on real tensors."""


def labels_of(*places: Place | Span | None, text: str = "") -> tuple[Label, ...]:
    """Return labels for the places that are known; `text` goes to the first."""
    spans = [place.span if isinstance(place, Place) else place for place in places if place is not None]
    return tuple(Label(span, text if position == 0 else "") for position, span in enumerate(spans))


def error_at(
    code: str,
    message: str,
    place: Place | Span | None,
    help: str | None = None,  # noqa: A002 - what a diagnostic calls it
    text: str = "",
) -> RecordingError:
    """Return a recording error with one place."""
    return RecordingError(Diagnostic(code, message, labels_of(place, text=text), help))


_NAMES = {
    "__bool__": "bool()", "is_nonzero": "bool()", "__int__": "int()", "__float__": "float()", "__index__": "an index",
    "item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()", "__array__": ".numpy()", "__contains__": "`in`",
    "equal": "torch.equal()", "allclose": "torch.allclose()", "__complex__": "complex()",
}  # fmt: skip


def data_dependence(name: str, place: Place | None, frame: Any, random: bool = False) -> DataDependence:
    """Return the error for `name`, which needs numbers that are not there while recording."""
    what = "a random number" if random else "a tensor"
    where = frame.name if frame.module is None else f"forward of {type(frame.module).__name__}"
    if frame.name == "loss":
        where = "the loss"
    return DataDependence(
        Diagnostic(
            "data-dependent",
            f"{_NAMES.get(name, name)} of {what} decides what runs next, in code that belongs to no single stage "
            f"({where}).",
            labels_of(place),
            "move it into a submodule that lies in one stage, or use torch.where",
        )
    )


def unseen(place: Place | None, what: str) -> DataDependence:
    """Return the error for a tensor whose origin was not recorded; a module in one stage may still be called whole."""
    return DataDependence(
        Diagnostic(
            "unseen-call",
            f"This uses {what}.",
            labels_of(place),
            "wrap that call in a module that lies in one stage, or register it with torch.library.custom_op",
        )
    )
