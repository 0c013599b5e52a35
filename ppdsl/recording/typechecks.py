"""`type(x) is torch.Tensor` in code between modules: never true while recording, where tensors are fakes."""

from __future__ import annotations

import dis
import itertools
from types import CodeType

from ppdsl.diagnostics import Diagnostic
from ppdsl.recording.findings import labels_of
from ppdsl.recording.items import Collapsed
from ppdsl.source import Place

__all__ = ["type_warnings"]

_COMPARISONS = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_REACH = 12  # instructions from `type` to the comparison


def type_warnings(collapsed: Collapsed) -> tuple[Diagnostic, ...]:
    """Return a warning for each function between modules that compares the type of something with a tensor class.

    The comparison itself can't be heard, and what it compares is not known: hence no error.
    """
    places = (item.place for item in collapsed.items)
    codes = dict.fromkeys(place.code for place in places if place is not None)
    return tuple(
        Diagnostic(
            "type-compare",
            "While recording, no tensor is of exactly this type: the comparison may go another way.",
            labels_of(place),
            "use isinstance(x, torch.Tensor)",
        )
        for place in map(_comparison, codes)
        if place is not None
    )


def _comparison(code: CodeType) -> Place | None:
    if "type" not in code.co_names:
        return None
    instructions = list(dis.get_instructions(code))
    for start, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "type":
            near = list(itertools.islice(instructions, start, start + _REACH))
            compares = any(other.opname in _COMPARISONS for other in near)
            if compares and any(other.argval in ("Tensor", "Parameter") for other in near):
                return Place(code, instruction.offset)
    return None
