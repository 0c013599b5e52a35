"""Where items begin and end in a text that does not parse: what lets the parser go on at the next item.

Items are told apart by their first words, at the bracket depth of the items around them; a word that can only begin an
item ends whatever is open before it, so that a missing brace costs one item and not the rest of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppdsl.spec.keywords import ITEM_WORDS, OTHER_WORDS
from ppdsl.spec.scan import Word

__all__ = ["Chunk", "chunks_of"]

_ITEMS = frozenset(ITEM_WORDS)
_OTHERS = frozenset(OTHER_WORDS)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Words from `first` to `last`, without it.

    Attributes:
        kind: `version`, `item`, `pipeline` (its head), `end` (its brace), or `stray` (a brace that closes nothing).
        first, last: Positions in the scan's words.
    """

    kind: str
    first: int
    last: int


def chunks_of(words: Sequence[Word]) -> Iterator[Chunk]:
    """Return the chunks of a text in order; every word is in one of them."""
    position, inside = 0, False
    if words and words[0].text == "ppspec":
        position = min(2, len(words))
        yield Chunk("version", 0, position)
    while position < len(words):
        text = words[position].text
        if text == "}":
            yield Chunk("end" if inside else "stray", position, position + 1)
            inside, position = False, position + 1
        elif text == "pipeline" and position + 2 < len(words) and words[position + 2].text == "{":
            yield Chunk("pipeline", position, position + 3)
            inside, position = True, position + 3
        else:
            last = _end(words, position)
            yield Chunk("item", position, last)
            position = last


def _end(words: Sequence[Word], first: int) -> int:
    depth = 0
    for position in range(first, len(words)):
        word = words[position]
        if position > first and _begins(words, position, depth):
            return position
        if word.kind == "sign":
            if word.text == "}" and depth == 0:
                return max(position, first + 1)
            depth = max(0, depth + (word.text in "{[(") - (word.text in "}])"))
    return len(words)


def _begins(words: Sequence[Word], position: int, depth: int) -> bool:
    word = words[position]
    if word.kind != "word" or position + 1 >= len(words):
        return False
    following, before = words[position + 1], words[position - 1]
    if word.text in _ITEMS:
        if word.first_in_line and before.text not in _OTHERS and following.kind in {"word", "string"}:
            return True
        return (
            depth == 0 and before.text not in _ITEMS | _OTHERS and before.text not in ".=," and following.kind == "word"
        )
    if depth > 0 or not word.first_in_line or word.text in _OTHERS or not word.text[0].isalpha():
        return False
    if following.text in {"=", "{"}:
        return before.kind != "sign" or before.text in {"}", "]", ")", "%", "*"}
    return (
        following.kind == "word" and following.text not in _OTHERS and (before.kind != "sign" or before.text in "}])")
    )
