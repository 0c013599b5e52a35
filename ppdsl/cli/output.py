"""Where commands write: results to the standard output, findings to the standard error, both with or without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

from rich.console import Console
from rich.text import Text

from ppdsl.diagnostics import Diagnostic, PpdslError
from ppdsl.report.diagnostics import render_diagnostics
from ppdsl.report.palette import AXIS, make_console

__all__ = ["Exit", "Output", "WrongUseError"]


class Exit(IntEnum):
    """What a command's exit code says."""

    FINE = 0
    FINDINGS = 1
    WRONG_USE = 2
    RUN_FAILED = 3


class WrongUseError(PpdslError):
    """The command was given something that it cannot work with."""


@dataclass(frozen=True)
class Output:
    """Two consoles and how to use them.

    Attributes:
        json: Whether findings are JSON, one object a line.
        columns: Width asked for, or None for the terminal's.
        results: Standard output.
        findings: Standard error.
    """

    json: bool = False
    columns: int | None = None
    results: Console = field(default_factory=make_console)
    findings: Console = field(default_factory=lambda: make_console(stderr=True))

    @property
    def width(self) -> int:
        """Columns of a drawing."""
        return self.columns or self.results.width

    @property
    def ascii_only(self) -> bool:
        """Whether box characters cannot be written."""
        return not self.results.encoding.lower().startswith("utf")

    def show(self, *texts: Text) -> None:
        """Write drawings, a blank line between them."""
        for position, text in enumerate(texts):
            if position:
                self.results.print()
            self.results.print(self._writable(text, self.results), no_wrap=True, overflow="ignore", crop=False)

    @contextmanager
    def busy(self, words: str) -> Iterator[None]:
        """Say on a terminal what takes a while (importing torch, recording a large model)."""
        if not self.findings.is_terminal:
            yield
            return
        with self.findings.status(words):
            yield

    def note(self, words: str) -> None:
        """Write a remark, wrapped to the width."""
        self.results.print()
        text = self._writable(Text("\n".join(textwrap.wrap(words, self.width)), style=AXIS), self.results)
        self.results.print(text, no_wrap=True, overflow="ignore", crop=False)

    def write(self, text: str) -> None:
        """Write text for another program, as it is."""
        print(text, end="" if text.endswith("\n") else "\n", file=self.results.file)

    def report(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Write findings."""
        diagnostics = tuple(diagnostics)
        if not diagnostics:
            return
        if self.json:
            for diagnostic in diagnostics:
                print(diagnostic.to_json(), file=self.findings.file)
        else:
            text = self._writable(render_diagnostics(diagnostics), self.findings)
            self.findings.print(text, no_wrap=True, overflow="ignore", crop=False)

    @staticmethod
    def _writable(text: Text, console: Console) -> Text:
        """Replace what the console's encoding does not have: a name in another script must not end the command."""
        text.plain = text.plain.encode(console.encoding, "replace").decode(console.encoding)
        return text
