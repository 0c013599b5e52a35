"""A line that shows how far the writing of a checkpoint is."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from ppdsl.units import format_bytes

__all__ = ["saving_bar"]

_WIDTH = 32


def saving_bar(label: str = "saving", console: Console | None = None) -> Callable[[int, int], None]:
    """Return a function for `pp.save(..., progress=)` that draws one line, again and again in the same place.

    Nothing is drawn where the console is no terminal. Under several processes give it to one of them.

    Args:
        label: What stands before the bar.
        console: Where to draw; None: standard error.

    >>> saving_bar("checkpoint", Console(no_color=True))(1, 2)  # no terminal: draws nothing
    """
    target = console or Console(stderr=True)

    def draw(written: int, total: int) -> None:
        if not target.is_terminal:
            return
        done = _WIDTH if written >= total else _WIDTH * written // total
        full, empty = ("#", "-") if target.options.ascii_only else ("━", "╌")
        line = Text.assemble(
            f"{label} ", (full * done, "green"), (empty * (_WIDTH - done), "dim"), _amount(written, total)
        )
        target.print(line, end="\n" if written >= total else "\r", soft_wrap=True)

    return draw


def _amount(written: int, total: int) -> str:
    return f" {format_bytes(written)} of {format_bytes(total)}"
