"""Where a forward pass draws torch's random numbers, by names that do not depend on where stages are cut.

A draw is one torch call that takes numbers from the global generators. Its name is that of the module whose code makes
it, which call of this module it is in the micro-batch, and which draw of that call::

    encoder.dropout|0|0      the only draw in the first call of `encoder.dropout`
    encoder.dropout|1|0      the same module, called again
    decoder|0|2              the third draw that the code of `decoder` makes by itself

What can never be cut (it was tried on real tensors, it is compiled, or it seeds torch itself) is one draw as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.recording import compat
from ppdsl.recording.items import Collapsed, Item
from ppdsl.recording.structure import fill
from ppdsl.recording.tape import Frame, Record, RecordKind, Tape

__all__ = ["Draw", "Draws"]


@dataclass(frozen=True, slots=True)
class Draw:
    """One torch call that draws random numbers, or code that is never cut and may draw.

    Attributes:
        name: The same for every way to cut the model, and unlike that of every other draw.
        order: Where it comes in the micro-batch.
        function: The torch function; None for code that is never cut.
        module: The module inside whose call nothing else draws; None when there is none.
    """

    name: str
    order: tuple[int, int]
    function: Any
    module: torch.nn.Module | None


class Draws:
    """The draws of a recording.

    Args:
        tape: The recording.
        collapsed: Which calls stay whole.
    """

    def __init__(self, tape: Tape, collapsed: Collapsed) -> None:
        self._tape = tape
        self._open = {id(frame) for frame in (tape.root, *collapsed.open_frames)}
        self._names: dict[tuple[int, int], str] = {}
        made: Counter[int] = Counter()
        taken: Counter[str] = Counter()
        for record in tape.records:
            owner = _owner(record.frame)
            for number, _ in enumerate(_functions(record)):
                self._names[record.index, number] = _unlike(f"{_title(owner)}|{made[id(owner)]}", taken)
                made[id(owner)] += 1

    def of(self, items: Iterable[Item]) -> tuple[Draw, ...]:
        """Return the draws that some items make, in the order in which they run."""
        found: dict[tuple[int, int], Draw] = {}
        for item in items:
            made: list[tuple[tuple[int, int], str, Any, list[Frame]]] = []
            for record in (self._tape.records[index] for index in item.records):
                if not record.random:
                    continue
                chain = self._inside(record.frame)
                depth = max((at for at, frame in enumerate(chain) if _never_cut(frame)), default=None)
                if depth is not None:
                    whole, around = chain[depth], chain[depth:]
                    made.append(((whole.start, -1), f"{_title(whole)}|*", None, around))
                    continue
                for number, function in enumerate(_functions(record)):
                    place = (record.index, number)
                    made.append((place, self._names[place], function, chain))
            inside: dict[int, set[tuple[int, int]]] = {}
            for place, _, _, chain in made:
                for frame in chain:
                    inside.setdefault(id(frame), set()).add(place)
            for place, name, function, chain in made:
                owner = next((frame for frame in chain if frame.module is not None), None)
                alone = owner is not None and len(inside[id(owner)]) == 1
                found[place] = Draw(name, place, function, owner.module if owner is not None and alone else None)
        return tuple(found[place] for place in sorted(found))

    def _inside(self, frame: Frame) -> list[Frame]:
        """Return the calls around a record that stay whole, the innermost first."""
        chain: list[Frame] = []
        inner: Frame | None = frame
        while inner is not None and id(inner) not in self._open:
            chain.append(inner)
            inner = inner.parent
        return chain


def _functions(record: Record) -> tuple[Any, ...]:
    """Return what draws in a record; what is given a generator of the user's draws from that."""
    if not record.random or record.kind is not RecordKind.CALL:
        return ()
    _, kwargs = fill(record.template, [None] * len(record.inputs))
    return () if isinstance(kwargs.get("generator"), torch.Generator) else record.drawing


def _owner(frame: Frame) -> Frame:
    """Return the innermost call of a module around; the outermost frame for a loss function."""
    while frame.module is None and frame.parent is not None:
        frame = frame.parent
    return frame


def _title(frame: Frame) -> str:
    if frame.module is None:
        return "|loss"
    # A module that forward makes has no name of its own; how often its memory was used before says nothing.
    return f"{frame.name}|{frame.call if frame.registered else '+'}"


def _unlike(name: str, taken: Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}|{taken[name] - 1}"


def _never_cut(frame: Frame) -> bool:
    return frame.module is not None and (frame.forced or frame.seeded is not None or compat.is_compiled(frame.module))
