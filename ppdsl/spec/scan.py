"""A first look at a text, without its grammar: how long it is, how deep its brackets go, where comments stand.

What is too long or too deep is refused here, before any time is spent on it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_LETTERS", "MAX_WORDS", "Comment", "Scan", "Word", "decode", "scan"]

MAX_BYTES = 1 << 20
MAX_WORDS = 40_000
MAX_LETTERS = {"word": 200, "string": 1000}
MAX_DEPTH = 40

_WORD = re.compile(
    r"""(?P<comment>\#[^\n]*) | (?P<string>"[^"\n]*"?) | (?P<regex>/(?![/*\s])(?:[^/\\\n]|\\[^\n]){1,400}+/)
      | (?P<word>\w+) | (?P<space>\s+) | (?P<sign>//|\*\*|->|[^\w\s])""",
    re.VERBOSE,
)
_OPENING, _CLOSING = frozenset("{[("), frozenset("}])")


@dataclass(frozen=True, slots=True)
class Word:
    """A word or sign of a text: `kind` is the name of a group of the scanner's pattern."""

    kind: str
    text: str
    start: int
    end: int
    first_in_line: bool


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment, from `#` to the end of its line; `alone` when nothing stands before it there."""

    text: str
    line: int
    column: int
    alone: bool


@dataclass(frozen=True)
class Scan:
    """What a first look found.

    Attributes:
        file: Its name, for spans.
        text: The text.
        lines: Where each line begins.
        words: All words and signs but comments.
        comments: In order.
        findings: What makes it senseless to go on.
    """

    file: str
    text: str
    lines: tuple[int, ...]
    words: tuple[Word, ...]
    comments: tuple[Comment, ...]
    findings: tuple[Diagnostic, ...]

    def position(self, offset: int) -> tuple[int, int]:
        """Return line and column, from 1."""
        line = bisect_right(self.lines, offset)
        return line, offset - self.lines[line - 1] + 1

    def span(self, start: int, end: int) -> Span:
        """Return the span from one offset to another."""
        return Span(self.file, *self.position(start), *self.position(end))


def decode(data: bytes, file: str) -> tuple[str, tuple[Diagnostic, ...]]:
    """Return the text of a file, and findings when it is none or is too long."""
    if len(data) > MAX_BYTES:
        message = f"The file has {len(data)} bytes, but a spec has at most {MAX_BYTES}."
        found = Diagnostic("spec-too-long", message, help="split the file, and include its parts")
        return "", (found,)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        message = "The file is UTF-16, but a spec is UTF-8."
        return "", (Diagnostic("not-utf8", message, (Label(Span(file, 1, 1, 1, 2)),), help="save the file as UTF-8"),)
    try:
        return data.decode("utf-8").removeprefix("\ufeff"), ()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8").removeprefix("\ufeff")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"Byte 0x{data[error.start]:02x} is no UTF-8 text."
        span = Span(file, line, column, line, column + 1)
        return "", (Diagnostic("not-utf8", message, (Label(span),), help="save the file as UTF-8"),)


def scan(text: str, file: str) -> Scan:
    """Look a text through once."""
    lines = (0, *accumulate(len(line) + 1 for line in text.split("\n")))
    words: list[Word] = []
    comments: list[Comment] = []
    findings: list[Diagnostic] = []
    fresh, depth, line = True, 0, 0
    for count, found in enumerate(_WORD.finditer(text)):
        kind, start = found.lastgroup or "", found.start()
        if count >= 2 * MAX_WORDS or len(words) + len(comments) >= MAX_WORDS:
            message = f"The file has more than {MAX_WORDS} words and signs, the most that a spec may have."
            place = _span(lines, file, start)
            findings.append(
                Diagnostic("spec-too-long", message, (Label(place),), help="use families, slices and splits")
            )
            break
        if kind == "space":
            fresh = fresh or "\n" in found[0]
            continue
        if kind == "comment":
            line = bisect_right(lines, start)
            comments.append(Comment(found[0].rstrip(), line, start - lines[line - 1] + 1, fresh))
            continue
        if len(found[0]) > MAX_LETTERS.get(kind, MAX_BYTES):
            message = f"A {kind} has {len(found[0])} letters, but at most {MAX_LETTERS[kind]} are allowed."
            findings.append(Diagnostic("word-too-long", message, (Label(_span(lines, file, start)),)))
            break
        words.append(Word(kind, found[0], start, found.end(), fresh))
        fresh = False
        depth = max(0, depth + (found[0] in _OPENING) - (found[0] in _CLOSING)) if kind == "sign" else depth
        if depth > MAX_DEPTH:
            message = f"Brackets are nested {depth} deep, but at most {MAX_DEPTH} are allowed."
            findings.append(Diagnostic("nested-too-deep", message, (Label(_span(lines, file, start)),)))
            break
    return Scan(file, text, lines, tuple(words), tuple(comments), tuple(findings))


def _span(lines: tuple[int, ...], file: str, start: int) -> Span:
    line = bisect_right(lines, start)
    column = start - lines[line - 1] + 1
    return Span(file, line, column, line, column + 1)
