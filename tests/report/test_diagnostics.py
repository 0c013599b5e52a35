"""Findings in colour say the same as in plain text."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from ppdsl.diagnostics import Diagnostic, Label, Severity, render_plain
from ppdsl.report.diagnostics import render_diagnostics
from ppdsl.source import Span

HERE = str(Path(__file__).resolve())
words = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs", "M")), max_size=20)
diagnostics = st.builds(
    Diagnostic,
    code=st.sampled_from(["unknown-rank", "deadlock"]),
    message=words,
    labels=st.lists(
        st.builds(
            Label,
            st.builds(
                lambda line, column: Span(HERE, line, column, line, column + 3), st.integers(1, 9), st.integers(1, 5)
            ),
            words,
        ),
        max_size=2,
    ).map(tuple),
    help=st.none() | words,
    severity=st.sampled_from(Severity),
    excerpt=st.sampled_from([None, "rank 0 | 0F0 0B0\nrank 1 | 1B0 1F0\n       | ^^^"]),
)


@given(st.lists(diagnostics, max_size=3))
def test_the_plain_form_is_the_plain_rendering(found: list[Diagnostic]) -> None:
    assert render_diagnostics(found).plain == render_plain(found)


@given(st.lists(diagnostics, min_size=1, max_size=3))
def test_colour_stripped_is_the_plain_rendering(found: list[Diagnostic]) -> None:
    console = Console(file=StringIO(), width=300, color_system="truecolor", force_terminal=True)
    console.print(render_diagnostics(found), no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    stripped = Text.from_ansi(console.file.getvalue()).plain  # type: ignore[attr-defined]
    assert [line.rstrip() for line in stripped.splitlines()] == [
        line.rstrip() for line in render_plain(found).splitlines()
    ]


def test_severity_help_and_carets_are_coloured() -> None:
    found = Diagnostic("x", "Wrong.", labels=(Label(Span(HERE, 1, 1, 1, 4), "here"),), help="do it right")
    text = render_diagnostics([found])
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["error[x]"] == "bold bright_red"
    assert styles["help"] == "bold cyan"
    assert any("^^^ here" in part and style == "bold bright_red" for part, style in styles.items())
