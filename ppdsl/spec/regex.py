r"""Regular expressions on module names, matched in linear time: no pattern can hang the tool.

The pattern becomes a machine that is in several states at once and reads each letter once. It knows letters, `.`,
`[classes]`, `\d \w \s` and their capitals, groups, `|`, `* + ?` and `{m,n}`. What such a machine cannot do
(backreferences, looking ahead or behind) and what means nothing for a whole name (anchors, flags, lazy repeats) is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["MAX_STATES", "Pattern", "RegexError", "compile_regex"]

MAX_STATES = 400
_MAX_LENGTH = 1000
_MAX_GROUPS = 40
_CACHE = 20_000

_Test = Callable[[str], bool]


class RegexError(ValueError):
    """The pattern is none, or uses what is not allowed; `offset` says where in it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(slots=True)
class _State:
    test: _Test | None = None  # reads one letter
    out: list[int] = field(default_factory=list)  # where to go after it, or at once


@dataclass(slots=True)
class Pattern:
    """A pattern that is ready to match."""

    states: list[_State]
    first: frozenset[int]
    last: int
    _known: dict[tuple[frozenset[int], str], frozenset[int]] = field(default_factory=dict)

    def fullmatch(self, text: str) -> bool:
        r"""Return whether the whole text matches.

        >>> compile_regex(r"layers\.[0-3]\.(mlp|attn)").fullmatch("layers.2.mlp")
        True
        """
        now = self.first
        for letter in text:
            now = self._after(now, letter)
            if not now:
                return False
        return self.last in now

    def search(self, text: str) -> bool:
        """Return whether some part of the text matches."""
        now = self.first
        for letter in text:
            if self.last in now:
                return True
            now = self._after(now, letter) | self.first
        return self.last in now

    def _after(self, now: frozenset[int], letter: str) -> frozenset[int]:
        known = self._known.get((now, letter))
        if known is not None:
            return known
        reached: list[int] = []
        for number in now:
            state = self.states[number]
            if state.test is not None and state.test(letter):
                reached += state.out
        found = _closure(self.states, reached)
        if len(self._known) < _CACHE:
            self._known[now, letter] = found
        return found


def compile_regex(pattern: str) -> Pattern:
    """Return a pattern that is ready to match.

    Raises:
        RegexError: It is no pattern of the kind that is allowed.
    """
    if len(pattern) > _MAX_LENGTH:
        raise RegexError(f"The pattern has {len(pattern)} letters, but at most {_MAX_LENGTH} are allowed.", 0)
    reader = _Reader(pattern)
    first, last = reader.choice(0)
    if reader.position < len(pattern):
        raise RegexError("This `)` closes no group.", reader.position)
    return Pattern(reader.states, _closure(reader.states, [first]), last)


def _closure(states: list[_State], numbers: list[int]) -> frozenset[int]:
    seen: set[int] = set()
    while numbers:
        number = numbers.pop()
        if number not in seen:
            seen.add(number)
            if states[number].test is None:
                numbers += states[number].out
    return frozenset(seen)


_CLASSES: dict[str, _Test] = {
    "d": str.isdigit,
    "w": lambda letter: letter.isalnum() or letter == "_",
    "s": str.isspace,
    "D": lambda letter: not letter.isdigit(),
    "W": lambda letter: not (letter.isalnum() or letter == "_"),
    "S": lambda letter: not letter.isspace(),
}

_Piece = tuple[int, int]


class _Reader:
    """Reads a pattern, and makes states as it goes; a piece is its first and its last state."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.position, self.states = pattern, 0, list[_State]()

    def state(self, test: _Test | None = None, *out: int) -> int:
        if len(self.states) >= MAX_STATES:
            raise RegexError("The pattern is too large: its repeats unfold to too many letters.", self.position)
        self.states.append(_State(test, list(out)))
        return len(self.states) - 1

    def letter(self) -> str:
        return self.pattern[self.position] if self.position < len(self.pattern) else ""

    def choice(self, depth: int) -> _Piece:
        if depth > _MAX_GROUPS:
            raise RegexError(f"Groups are nested more than {_MAX_GROUPS} deep.", self.position)
        pieces = [self.sequence(depth)]
        while self.letter() == "|":
            self.position += 1
            pieces.append(self.sequence(depth))
        if len(pieces) == 1:
            return pieces[0]
        last = self.state()
        for piece in pieces:
            self.states[piece[1]].out.append(last)
        return self.state(None, *(piece[0] for piece in pieces)), last

    def sequence(self, depth: int) -> _Piece:
        first = last = self.state()
        while self.letter() not in {"", "|", ")"}:
            start = self.position
            begin, end = self.atom(depth)
            begin, end = self.repeated(start, (begin, end), depth)
            self.states[last].out.append(begin)
            last = end
        return first, last

    def atom(self, depth: int) -> _Piece:
        letter = self.letter()
        if letter == "(":
            return self.group(depth)
        if letter in "*+?{":
            raise RegexError(f"There is nothing before `{letter}` to repeat.", self.position)
        if letter in "^$":
            raise RegexError("A pattern always matches the whole name: leave `^` and `$` out.", self.position)
        test = self.one()
        last = self.state()
        return self.state(test, last), last

    def one(self) -> _Test:
        letter = self.letter()
        if letter == "[":
            return self.letters()
        self.position += 1
        if letter == ".":
            return lambda _: True
        if letter == "\\":
            return self.escaped()
        return letter.__eq__

    def group(self, depth: int) -> _Piece:
        start = self.position
        self.position += 1
        if self.letter() == "?":
            if not self.pattern.startswith("?:", self.position):
                raise RegexError("Only plain groups `(...)` and `(?:...)` are allowed.", start)
            self.position += 2
        piece = self.choice(depth + 1)
        if self.letter() != ")":
            raise RegexError("This group is never closed.", start)
        self.position += 1
        return piece

    def escaped(self) -> _Test:
        letter = self.letter()
        if letter in _CLASSES and letter:
            self.position += 1
            return _CLASSES[letter]
        if not letter or letter.isalnum():
            raise RegexError(f"`\\{letter}` is not allowed; `\\d`, `\\w`, `\\s` and signs are.", self.position - 1)
        self.position += 1
        return letter.__eq__

    def letters(self) -> _Test:
        start = self.position
        self.position += 1
        negated = self.letter() == "^"
        self.position += negated
        tests: list[_Test] = []
        while self.letter() != "]" or not tests:
            if not self.letter():
                raise RegexError("This `[` is never closed.", start)
            tests.append(self.interval())
        self.position += 1
        return lambda letter: any(test(letter) for test in tests) is not negated

    def interval(self) -> _Test:
        low = self.letter()
        self.position += 1
        if low == "\\":
            return self.escaped()
        if self.letter() == "-" and self.pattern[self.position + 1 : self.position + 2] not in {"]", "", "\\"}:
            high = self.pattern[self.position + 1]
            if high < low:
                raise RegexError(f"`{low}-{high}` runs backwards.", self.position - 1)
            self.position += 2
            return lambda letter: low <= letter <= high
        return low.__eq__

    def repeated(self, start: int, piece: _Piece, depth: int) -> _Piece:
        sign, after = self.letter(), self.position
        if sign not in {"*", "+", "?", "{"}:
            return piece
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self.counts()
        self.position += sign != "{"
        if self.letter() in {"*", "+", "?", "{"}:
            raise RegexError("A repeat cannot be repeated; lazy and possessive repeats are not allowed.", self.position)
        end = self.position
        copies = [piece]
        for _ in range(max(low, high or 1) - 1):
            self.position = start
            copies.append(self.atom(depth))
        self.position = end
        del after
        return self.chained(copies, low, endless=high is None, never=high == 0)

    def chained(self, copies: list[_Piece], low: int, *, endless: bool, never: bool) -> _Piece:
        first, last = self.state(), self.state()
        if never:
            return self.state(None, last), last
        here = first
        for number, (begin, end) in enumerate(copies):
            if number >= low:
                self.states[here].out.append(last)
            self.states[here].out.append(begin)
            here = end
        if endless:
            self.states[here].out.append(copies[-1][0])
        self.states[here].out.append(last)
        return first, last

    def counts(self) -> tuple[int, int | None]:
        start = self.position
        end = self.pattern.find("}", start)
        low, comma, high = self.pattern[start + 1 : max(end, start + 1)].partition(",")
        numbers = [text for text in (low, high) if text]
        if end < 0 or not numbers or not all(n.isascii() and n.isdigit() and len(n) < 4 for n in numbers):
            raise RegexError("A repeat is written `{2}`, `{2,}` or `{2,4}`, up to 999.", start)
        self.position = end + 1
        least = int(low or 0)
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            raise RegexError(f"`{{{least},{most}}}` runs backwards.", start)
        return least, most
