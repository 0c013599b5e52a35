"""Findings and errors: what is wrong, where, and what to type instead.

The exceptions a user can meet, all children of `PpdslError`, each carrying its diagnostics::

    PpdslError
    ├── MarkError        a mark is misplaced, never reached, or means two things
    ├── SpecError        a .ppspec is wrong, does not fit the model, or a contract in it is broken
    ├── RecordingError   the forward pass cannot become a graph of stages
    ├── GraphError       the stages cannot be built or placed
    ├── ScheduleError    a schedule is impossible, breaks a law or would deadlock
    ├── CallError        a call does not fit the plan (shape, dtype, argument, batch)
    └── RunError         a step failed while it ran; names rank, stage, micro-batch
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ppdsl.source import Span

__all__ = [
    "CallError",
    "Diagnostic",
    "GraphError",
    "Label",
    "MarkError",
    "PpdslError",
    "PpdslWarning",
    "RecordingError",
    "RunError",
    "ScheduleError",
    "Severity",
    "SpecError",
    "render_plain",
]


class Severity(StrEnum):
    """How bad a finding is; only errors stop a run."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Label:
    """A place in a file with a few words about it."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding.

    Attributes:
        code: Names the problem in lower case with hyphens (`unknown-rank`).
        message: One whole sentence, understandable without the excerpt.
        labels: Places, the most important one first.
        help: What to type instead, or None when there is nothing to type.
        severity: Error, warning or note.
        excerpt: A drawn excerpt (a schedule's grid, a waiting cycle) for findings that have no file.
    """

    code: str
    message: str
    labels: tuple[Label, ...] = ()
    help: str | None = None
    severity: Severity = Severity.ERROR
    excerpt: str | None = None

    def to_json(self) -> str:
        """Return the finding as one JSON object on one line."""
        places = [
            {
                "file": label.span.file,
                "line": label.span.line,
                "column": label.span.column,
                "end_line": label.span.end_line,
                "end_column": label.span.end_column,
                "text": label.text,
            }
            for label in self.labels
        ]
        return json.dumps(
            {
                "severity": self.severity.value,
                "code": self.code,
                "message": self.message,
                "labels": places,
                "help": self.help,
                "excerpt": self.excerpt,
            }
        )


class PpdslError(Exception):
    """One or more findings that stop the work; its text is the rendered findings."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return render_plain(self.diagnostics)


class MarkError(PpdslError):
    """A mark is misplaced, never reached, or means two things."""


class RecordingError(PpdslError):
    """The forward pass cannot become a graph of stages."""


class SpecError(PpdslError):
    """A `.ppspec` is wrong, does not fit the model, or a contract in it is broken."""


class GraphError(PpdslError):
    """The stages cannot be built or placed."""


class ScheduleError(PpdslError):
    """A schedule is impossible, breaks a law or would deadlock."""


class CallError(PpdslError):
    """A call does not fit the plan."""


class RunError(PpdslError):
    """A step failed while it ran."""


class PpdslWarning(UserWarning):
    """A finding that does not stop the work."""


def render_plain(diagnostics: Iterable[Diagnostic]) -> str:
    """Return findings as plain text, one blank line between them.

    >>> print(render_plain([Diagnostic("unknown-rank", "Stage 0 is on rank 4, but there are 4 ranks.",
    ...                                help="use a rank from 0 to 3")]))
    error[unknown-rank]: Stage 0 is on rank 4, but there are 4 ranks.
    help: use a rank from 0 to 3
    """
    return "\n\n".join(_render_one(diagnostic) for diagnostic in diagnostics)


def _render_one(diagnostic: Diagnostic) -> str:
    lines = [f"{diagnostic.severity.value}[{diagnostic.code}]: {diagnostic.message}"]
    for label in diagnostic.labels:
        lines += _render_label(label)
    if diagnostic.excerpt:
        lines += diagnostic.excerpt.splitlines()
    if diagnostic.help:
        lines.append(f"help: {diagnostic.help}")
    return "\n".join(lines)


_WINDOW = 240
"""Columns of a line that are shown at most."""


def _render_label(label: Label) -> list[str]:
    span = label.span
    lines = [f" --> {span}"]
    linecache.checkcache(span.file)  # a file may have been read, and changed, before
    text = linecache.getline(span.file, span.line).rstrip("\n")
    if not text:
        return [lines[0] + (f" {label.text}" if label.text else "")]
    # Of a very long line only a window is shown; what cannot be printed is a dot, so that columns stay right.
    start = max(0, span.column - _WINDOW // 2) if len(text) > _WINDOW else 0
    shown = text.expandtabs(1)[start : start + _WINDOW]
    expanded = shown if shown.isprintable() else "".join(sign if sign.isprintable() else "·" for sign in shown)
    end = span.end_column if span.end_line == span.line else len(text) + 1
    carets = "^" * max(1, min(end - start, len(shown) + 1) - span.column + start)
    gutter = " " * len(str(span.line))
    lines.append(f"{gutter} |")
    lines.append(f"{span.line} | {expanded}")
    lines.append(f"{gutter} | {' ' * (span.column - 1 - start)}{carets} {label.text}".rstrip())
    return lines
