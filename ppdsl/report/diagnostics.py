"""Findings in colour, word for word those of `ppdsl.diagnostics.render_plain`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from ppdsl.diagnostics import Diagnostic, Severity, render_plain
from ppdsl.report.spec_colors import spec_text

__all__ = ["render_diagnostics"]

_SEVERITIES = {
    Severity.ERROR: Style(color="bright_red", bold=True),
    Severity.WARNING: Style(color="yellow", bold=True),
    Severity.NOTE: Style(color="green", bold=True),
}
_PLACE = Style(color="bright_blue")
_MARK = Style(color="bright_red", bold=True)
_HELP = Style(color="cyan", bold=True)
_GUTTER = re.compile(r"^(\s*\d* \|)(.*)$")


def render_diagnostics(diagnostics: Iterable[Diagnostic]) -> Text:
    r"""Return findings in colour.

    Only colour is added: the text's `plain` form is `render_plain(diagnostics)`.

    >>> render_diagnostics([Diagnostic("no-stages", "The model has no marks.", help="mark it")]).plain
    'error[no-stages]: The model has no marks.\nhelp: mark it'
    """
    text = Text(no_wrap=True, overflow="ignore")
    for position, diagnostic in enumerate(diagnostics):
        text.append("\n\n" if position else "")
        lines = render_plain([diagnostic]).split("\n")
        spec = False  # whether the excerpt is one of a spec
        for number, line in enumerate(lines):
            text.append("\n" if number else "")
            spec = ".ppspec:" in line if line.startswith(" --> ") else spec
            text.append_text(_line(line, diagnostic, first=number == 0, spec=spec))
    return text


def _line(line: str, diagnostic: Diagnostic, *, first: bool, spec: bool) -> Text:
    if first:
        head = f"{diagnostic.severity.value}[{diagnostic.code}]"
        return Text.assemble((head, _SEVERITIES[diagnostic.severity]), (line[len(head) :], Style(bold=True)))
    if line.startswith(" --> "):
        return Text.assemble((line, _PLACE))
    if line.startswith("help: "):
        return Text.assemble(("help", _HELP), line[len("help") :])
    gutter = _GUTTER.match(line)
    if gutter is not None:
        marked = bool(gutter[2].strip()) and set(gutter[2].split()[0]) == {"^"}
        if spec and not marked:
            return Text.assemble((gutter[1], _PLACE), spec_text(gutter[2]))
        return Text.assemble((gutter[1], _PLACE), (gutter[2], _MARK if marked else Style()))
    return Text(line)
