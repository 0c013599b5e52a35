"""Lines of a `.ppspec` in the terminal's colours."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

__all__ = ["spec_text"]

# By the beginning of the token's name; colour only repeats what the words say.
_STYLES = (
    ("Token.Comment", Style(dim=True)),
    ("Token.Keyword", Style(color="magenta")),
    ("Token.Name.Attribute", Style(color="blue")),
    ("Token.Name.Builtin", Style(color="blue")),
    ("Token.Name.Class", Style(bold=True)),
    ("Token.Name.Function", Style(color="magenta")),
    ("Token.Literal.Number", Style(color="cyan")),
    ("Token.Literal.String", Style(color="green")),
)


def spec_text(line: str) -> Text:
    """Return a line in colour, letter for letter the same.

    >>> spec_text("stage a @ 0 { b }  # first").plain
    'stage a @ 0 { b }  # first'
    """
    from ppdsl.report.lexer import PpspecLexer  # loads Pygments: only when a spec is shown

    text = Text()
    for token, piece in PpspecLexer(stripnl=False, ensurenl=False).get_tokens(line):
        name = str(token)
        text.append(piece, next((style for prefix, style in _STYLES if name.startswith(prefix)), Style()))
    return text if text.plain == line else Text(line)
