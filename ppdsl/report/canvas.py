"""A grid of characters in which lines join: the paper of the drawings in the terminal."""

from __future__ import annotations

from enum import IntFlag

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

__all__ = ["Canvas"]


class _Way(IntFlag):
    """The sides on which a line leaves a cell."""

    NORTH = 1
    EAST = 2
    SOUTH = 4
    WEST = 8


_BOX = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"
_ASCII = " |-+||++-+-+++++"
_NONE = Style()


class Canvas:
    """Cells with text or with lines.

    Lines of one owner join where they meet; lines of two owners cross without a joint.

    Args:
        width: Columns.
        height: Rows.
        ascii_only: Whether to draw without box characters.
    """

    def __init__(self, width: int, height: int, *, ascii_only: bool = False) -> None:
        self.width, self.height = width, height
        self._ascii = ascii_only
        self._text: dict[tuple[int, int], tuple[str, Style]] = {}
        self._lines: dict[tuple[int, int], dict[int, _Way]] = {}
        self._styles: dict[int, tuple[Style, bool]] = {}

    def line(self, ends: tuple[int, int, int, int], owner: int, style: Style = _NONE, *, dashed: bool = False) -> None:
        """Draw a line from the left or upper end to the other, both included."""
        x, y, last_x, last_y = ends
        self._styles[owner] = (style, dashed)
        for column in range(x, last_x + 1):
            for row in range(y, last_y + 1):
                ways = _Way(0)
                ways |= _Way.WEST if column > x else _Way(0)
                ways |= _Way.EAST if column < last_x else _Way(0)
                ways |= _Way.NORTH if row > y else _Way(0)
                ways |= _Way.SOUTH if row < last_y else _Way(0)
                mine = self._lines.setdefault((column, row), {})
                mine[owner] = mine.get(owner, _Way(0)) | ways

    def write(self, x: int, y: int, text: str, style: Style = _NONE) -> None:
        """Write text over whatever is there; wide characters take two cells."""
        text = text.replace("…", "~").encode("ascii", "replace").decode() if self._ascii else text
        for character in text:
            size = cell_len(character)
            if size == 0:
                continue
            self._text[x, y] = (character, style)
            if size == 2:
                self._text[x + 1, y] = ("", style)
            x += size

    def is_free(self, x: int, y: int, length: int) -> bool:
        """Return whether cells of a row are inside and blank."""
        if x < 0 or x + length > self.width or not 0 <= y < self.height:
            return False
        return all((c, y) not in self._text and (c, y) not in self._lines for c in range(x, x + length))

    def render(self) -> Text:
        """Return the rows as text, without blanks at their ends."""
        rows = []
        for y in range(self.height):
            row = Text(no_wrap=True)
            for x in range(self.width):
                row.append(*self._cell(x, y))
            row.rstrip()
            rows.append(row)
        return Text("\n", no_wrap=True).join(rows)

    def _cell(self, x: int, y: int) -> tuple[str, Style]:
        if (x, y) in self._text:
            return self._text[x, y]
        owners = self._lines.get((x, y))
        if not owners:
            return " ", _NONE
        ways = _Way(0)
        for mine in owners.values():
            ways |= mine
        style, dashed = self._styles[min(owners)]
        symbol = (_ASCII if self._ascii else _BOX)[ways]
        if dashed and len(owners) == 1:
            symbol = {"│": "┆", "─": "┄", "|": ":"}.get(symbol, symbol)
        return symbol, style
