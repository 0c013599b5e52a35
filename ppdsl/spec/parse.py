"""Text to syntax tree. Any text gives a tree; what is wrong with it comes beside the tree, as findings.

The whole text is parsed at once. Only when that fails is it parsed item by item, so that each item shows its own
mistake. This is the only module that imports lark, and nothing here loads torch.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from ppdsl.diagnostics import Diagnostic, Label, Severity
from ppdsl.source import Span
from ppdsl.spec.build import Builder, Version
from ppdsl.spec.chunks import Chunk, chunks_of
from ppdsl.spec.grammar_file import grammar_text
from ppdsl.spec.nodes import Item, PipelineNode, SpecFile
from ppdsl.spec.notes import attach
from ppdsl.spec.scan import Scan, decode, scan
from ppdsl.spec.syntax import syntax_error

if TYPE_CHECKING:
    from lark import Lark

__all__ = ["MAX_FINDINGS", "VERSION", "Parsed", "limited", "parse"]

VERSION = 1
"""The version of the language that this package reads; it also reads all before it."""

MAX_FINDINGS = 50

_BUSY = Lock()


@dataclass(frozen=True)
class Parsed:
    """What a text says, and what is wrong with how it says it.

    Attributes:
        tree: All items that could be read.
        diagnostics: In the order of the text.
        digest_text: The text, as it was read.
    """

    tree: SpecFile
    diagnostics: tuple[Diagnostic, ...] = ()
    text: str = ""

    @property
    def complete(self) -> bool:
        """Whether the tree holds all that the text says."""
        return not self.diagnostics


def parse(text: str | bytes, file: str = "<spec>") -> Parsed:
    """Return the syntax tree of a text.

    Args:
        text: What a file holds; bytes are decoded as UTF-8.
        file: Its name, for findings.

    >>> parse("pipeline net { stage a { left } }").tree.items[0].name
    'net'
    >>> [found.message for found in parse("pipeline net { stage a { left right } }").diagnostics]
    ['Modules are separated by commas. Found `right`.']
    """
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    read, findings = decode(data, file)
    looked = scan(read, file)
    findings += looked.findings
    _remember(file, read)
    if findings:
        return Parsed(SpecFile(None, (), span=Span(file, 1, 1, 1, 1)), findings, read)
    with _BUSY:
        run = _run(looked.text, "file", file, 0, 0)
        if not isinstance(run, _Mistake):
            version, items = run.made
            return _finished(looked, version, items, run.findings)
        return _recovered(looked)


def limited(findings: Collection[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the first findings, and one that says how many more there are."""
    found = tuple(findings)
    if len(found) <= MAX_FINDINGS:
        return found
    more = len(found) - MAX_FINDINGS
    message = f"There are {more} more findings after these {MAX_FINDINGS}."
    return (*found[:MAX_FINDINGS], Diagnostic("more-findings", message, severity=Severity.NOTE))


def _remember(file: str, text: str) -> None:
    # Excerpts are cut from this cache: it must hold what was parsed, also for texts that are no files.
    linecache.cache[file] = (len(text), None, text.split("\n"), file)


# ---------------------------------------------------------------- lark


class _Made(NamedTuple):
    made: Any  # what the start rule's method returns
    findings: tuple[Diagnostic, ...]


class _Mistake(NamedTuple):
    found: str
    span: Span | None  # None: at the end
    expected: frozenset[str]


@lru_cache(maxsize=1)
def _parser() -> tuple[Lark, Builder]:
    from lark import Lark

    builder = Builder()
    starts = ["file", "item", "pipeline_head", "version"]
    lark = Lark(
        grammar_text(), parser="lalr", lexer="contextual", start=starts, keep_all_tokens=True, maybe_placeholders=True,
        transformer=builder,
    )  # fmt: skip
    return lark, builder


def _run(text: str, start: str, file: str, line: int, column: int) -> _Made | _Mistake:
    from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

    lark, builder = _parser()
    builder.begin(file, line, column)
    try:
        made = lark.parse(text, start=start)
    except UnexpectedToken as mistake:
        expected = mistake.accepts or mistake.expected
        if mistake.token.type == "$END":
            return _Mistake("", None, frozenset(expected))
        return _Mistake(str(mistake.token), builder.spot(mistake.token), frozenset(expected))
    except UnexpectedCharacters as mistake:
        right = column if mistake.line == 1 else 0
        where = (mistake.line + line, mistake.column + right)
        span = Span(file, *where, where[0], where[1] + 1)
        return _Mistake(mistake.char, span, frozenset(mistake.allowed or ()))
    except UnexpectedInput:
        return _Mistake("", None, frozenset())
    return _Made(made, tuple(builder.findings))


# ---------------------------------------------------------------- one text, item by item


class _Recovery:
    def __init__(self, looked: Scan) -> None:
        self.looked = looked
        self.findings: list[Diagnostic] = []
        self.version: Version | None = None
        self.outer: list[Item] = []
        self.inner: list[Item] = []
        self.head: PipelineNode | None = None

    def read(self, chunk: Chunk) -> None:
        made: Any = None
        match chunk.kind:
            case "stray":
                self.findings.append(syntax_error("}", ["STAGE", "PARAM", "$END"], self.place(chunk.first)))
            case "end":
                self.close()
            case "version":
                self.version = self.made(chunk, "version")
            case "pipeline":
                self.close()
                self.head = self.made(chunk, "pipeline_head")
            case _:
                made = self.made(chunk, "item")
        if made is not None:
            (self.outer if self.head is None else self.inner).append(made)

    def close(self) -> None:
        if self.head is not None:
            head = self.head
            self.outer.append(PipelineNode(head.name, tuple(self.inner), span=head.span, head=head.head))
        self.head, self.inner = None, []

    def made(self, chunk: Chunk, start: str) -> Any:
        words = self.looked.words
        first, last = words[chunk.first], words[chunk.last - 1]
        line, column = self.looked.position(first.start)
        run = _run(self.looked.text[first.start : last.end], start, self.looked.file, line - 1, column - 1)
        if isinstance(run, _Made):
            self.findings += run.findings
            return run.made
        at = chunk.last
        if run.span is not None:
            wanted = (run.span.line, run.span.column)
            at = next(i for i in range(chunk.first, chunk.last + 1) if i == chunk.last or self.where(i) >= wanted)
        found = run.found or (words[at].text if at < len(words) else "")
        before = words[at - 1].text if at > chunk.first else ""
        options = any(word.text == "with" for word in words[chunk.first : at])
        self.findings.append(
            syntax_error(
                found,
                run.expected,
                run.span or self.place(at),
                before,
                first.text,
                options=options,
                start=self.place(chunk.first),
            )
        )
        return None

    def where(self, word: int) -> tuple[int, int]:
        return self.looked.position(self.looked.words[word].start)

    def place(self, word: int) -> Span:
        words = self.looked.words
        if word < len(words):
            return self.looked.span(words[word].start, words[word].end)
        end = words[-1].end if words else 0
        return self.looked.span(end, end)


def _recovered(looked: Scan) -> Parsed:
    recovery = _Recovery(looked)
    for chunk in chunks_of(looked.words):
        recovery.read(chunk)
        if len(recovery.findings) > MAX_FINDINGS:
            break
    else:
        if recovery.head is not None:
            message = f"The braces of pipeline `{recovery.head.name}` are never closed."
            end = recovery.place(len(looked.words))
            labels = (Label(end), Label(recovery.head.head, "opened here"))
            recovery.findings.append(Diagnostic("unclosed-pipeline", message, labels, help="end the file with `}`"))
    recovery.close()
    if not recovery.findings:  # the whole text does not parse, though all of its items do
        recovery.findings.append(syntax_error("", [], recovery.place(len(looked.words))))
    return _finished(looked, recovery.version, tuple(recovery.outer), tuple(recovery.findings))


def _finished(
    looked: Scan, version: Version | None, items: tuple[Item, ...], findings: tuple[Diagnostic, ...]
) -> Parsed:
    whole = looked.span(0, len(looked.text))
    tree = SpecFile(None if version is None else version.number, items, span=whole)
    if version is not None and not 1 <= version.number <= VERSION:
        message = (
            f"The file is written in version {version.number} of the language, but this ppdsl reads up to {VERSION}."
        )
        label = Label(version.span)
        findings = (Diagnostic("unknown-version", message, (label,), help="install a newer ppdsl"), *findings)
    return Parsed(attach(tree, looked, None if version is None else version.span), findings, looked.text)
