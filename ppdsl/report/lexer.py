"""Colours of `.ppspec` text: a lexer for Pygments, found by its name `ppspec`."""

from __future__ import annotations

from typing import ClassVar

from pygments.lexer import RegexLexer, bygroups, words  # type: ignore[import-untyped]  # pygments has no types
from pygments.token import (  # type: ignore[import-untyped]
    Comment,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
)

from ppdsl.spec.keywords import BALANCES, ITEM_WORDS, MEASURES, OPTIONS, OTHER_WORDS, SCHEDULES, SETTINGS

__all__ = ["PpspecLexer"]

_SELECTORS = ("type", "call", "rest")
_CONNECTING = tuple(word for word in OTHER_WORDS if word not in _SELECTORS)
_BUILTINS = tuple(dict.fromkeys((*SETTINGS, *OPTIONS)))


class PpspecLexer(RegexLexer):  # type: ignore[misc]
    r"""Colours `.ppspec` files.

    >>> from pygments.formatters import NullFormatter
    >>> from pygments import highlight
    >>> highlight("stage a { b }", PpspecLexer(), NullFormatter())
    'stage a { b }\n'
    """

    name = "ppspec"
    aliases: ClassVar = ["ppspec"]
    filenames: ClassVar = ["*.ppspec"]
    url = ""

    tokens: ClassVar = {
        "root": [
            (r"\s+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (r'"[^"\n]*"', String),
            (r"/(?![/*\s])(?:[^/\\\n]|\\[^\n]){1,400}/", String.Regex),
            # Behind a dot every word is a name of the model.
            (r"(\.)([^\W\d]\w*)", bygroups(Punctuation, Name)),
            (r"(stage|pipeline|param|let)(\s+)([^\W\d]\w*)", bygroups(Keyword, Whitespace, Name.Class)),
            (r"(by)(\s+)(" + "|".join(BALANCES) + r")\b", bygroups(Keyword, Whitespace, Name.Builtin)),
            (r"(expect)(\s+)(" + "|".join((*MEASURES, "edges")) + r")\b", bygroups(Keyword, Whitespace, Name.Builtin)),
            (r"(?:" + "|".join(_BUILTINS) + r")(?=\s*[={])", Name.Attribute),
            (words(ITEM_WORDS, prefix=r"\b", suffix=r"\b"), Keyword),
            (words(_CONNECTING, prefix=r"\b", suffix=r"\b"), Keyword),
            (words(_SELECTORS, prefix=r"\b", suffix=r"\b"), Name.Function),
            (words(SCHEDULES, prefix=r"\b", suffix=r"\b"), Name.Constant),
            (r"\d+[FBIW](?:\d+\b|(?=\[))|[FBIW](?=\[)", Name.Label),
            (r"\d+(?:\.\d+)?(?:[A-Za-z]\w*|\s*%(?!\s*[\w(\-]))?", Number),
            (r"[^\W\d]\w*", Name),
            (r"<=|>=|==|!=|->|\.\.<?|\*\*|//|[-+*%<>=@]", Operator),
            (r"[{}\[\](),:.]", Punctuation),
        ]
    }
