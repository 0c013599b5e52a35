"""What a page of the documentation shows: its links, its headings, and its fenced examples."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "Link", "anchors", "blocks", "console_steps", "links"]

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)[^`]*$")
_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+(?:\([^()\s]*\))?)(?:\s+\"[^\"]*\")?\)")
_NOT_RUN = re.compile(r"<!--\s*not run: \S.*-->")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced example.

    Attributes:
        page: The page's path.
        line: Line of its first line of text, counted from 1.
        language: What stands behind the fence (`python`, `console`).
        text: What stands inside.
        run: False when the line before the fence is ``<!-- not run: reason -->``.
    """

    page: Path
    line: int
    language: str
    text: str
    run: bool = True


@dataclass(frozen=True, slots=True)
class Link:
    """One link, with the line it stands on."""

    line: int
    target: str


def blocks(page: Path) -> tuple[Block, ...]:
    """Return the fenced examples of a page, from top to bottom."""
    found: list[Block] = []
    opening: re.Match[str] | None = None
    start, run, before, inside = 0, True, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if opening is None:
            if match := _FENCE.match(line):
                opening, start, run, inside = match, number + 1, not _NOT_RUN.search(before), []
            elif line.strip():
                before = line
        elif line.strip() == opening["ticks"]:
            found.append(Block(page, start, opening["language"], "".join(f"{text}\n" for text in inside), run))
            opening, before = None, ""
        else:
            inside.append(line.removeprefix(opening["indent"]))
    if opening is not None:
        raise ValueError(f"{page}:{start - 1}: this fence is never closed")
    return tuple(found)


def prose(page: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of a page that stand outside of fences, without code spans."""
    kept: list[tuple[int, str]] = []
    closing: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if closing is not None:
            closing = None if line.strip() == closing else closing
        elif match := _FENCE.match(line):
            closing = match["ticks"]
        else:
            kept.append((number, re.sub(r"`[^`]*`", "``", line)))
    return kept


def links(page: Path) -> tuple[Link, ...]:
    """Return the links of a page; code is left out."""
    return tuple(Link(number, match["target"]) for number, line in prose(page) for match in _LINK.finditer(line))


def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that a forge gives to the headings of a page."""
    found: set[str] = set()
    titles = (line.lstrip("#").strip() for line in _headings(page))
    for title in titles:
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        repeated = next(n for n in range(1000) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{repeated}" if repeated else slug)
    return frozenset(found)


def _headings(page: Path) -> list[str]:
    outside = {number for number, _ in prose(page)}
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line for number, line in enumerate(lines, 1) if number in outside and re.match(r"#{1,6} ", line)]


def console_steps(text: str) -> tuple[tuple[str, str], ...]:
    """Return the commands of a console block, each with the output shown below it.

    A command begins with ``$ `` and goes on over lines that end with a backslash.

    >>> console_steps("$ echo a b\\na b\\n$ true\\n")
    (('echo a b', 'a b\\n'), ('true', ''))
    """
    steps: list[tuple[str, str]] = []
    continued = False
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:], ""))
        elif not steps:
            raise ValueError(f"a console block begins with a command: {line!r}")
        elif continued:
            steps[-1] = (f"{steps[-1][0]}\n{line}", "")
        else:
            steps[-1] = (steps[-1][0], f"{steps[-1][1]}{line}\n")
        continued = line.endswith("\\") and (line.startswith("$ ") or continued)
    return tuple(steps)
