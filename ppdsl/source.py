"""Where text or a Python call stands: spans, and the caller's span at no cost until it is asked for."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from types import CodeType

__all__ = ["Place", "Span", "caller_place"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one file; lines and columns count from 1, the end column is exclusive.

    >>> str(Span("net.py", 7, 14, 7, 22))
    'net.py:7:14'
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def short(self) -> str:
        """File and line, as an editor opens them."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Place:
    """An instruction of a code object: a `Span` not yet worked out.

    A mark takes one at every call, also outside a recording, so it has to be cheap: it keeps the code
    object and the offset, never the frame (which would keep the caller's tensors alive).
    """

    code: CodeType
    offset: int

    @property
    def span(self) -> Span:
        """The exact text of the call, from the code object's position table."""
        positions = next(itertools.islice(self.code.co_positions(), self.offset // 2, None), None)
        line, end_line, column, end_column = positions or (None, None, None, None)
        first = line or self.code.co_firstlineno
        return Span(
            self.code.co_filename,
            first,
            1 if column is None else column + 1,
            end_line or first,
            (1 if column is None else column + 1) if end_column is None else end_column + 1,
        )


def caller_place(depth: int = 1) -> Place:
    """Return the place of the call `depth` frames above the caller of this function."""
    frame = sys._getframe(depth + 1)
    return Place(frame.f_code, frame.f_lasti)
