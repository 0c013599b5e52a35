"""Colours of the drawings, and the console they are printed on.

Every drawing is readable without colour: colour only repeats what letters and line styles say. The fill characters
of an action are painted in the colour of its background, so they vanish on a terminal and remain in a file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import IO

from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.style import Style

from ppdsl.schedule.action import ActionKind

__all__ = [
    "AXIS",
    "IDLE",
    "LABEL",
    "TITLE",
    "action_style",
    "blend_style",
    "hex_color",
    "line_color",
    "make_console",
    "rank_color",
]

Triple = tuple[float, float, float]

TITLE = Style(bold=True)
LABEL = Style(bold=True)
AXIS = Style(dim=True)
IDLE = Style(color="grey50", dim=True)

# Okabe and Ito's palette: told apart by people who see fewer colours.
_KINDS: dict[ActionKind, Triple] = {
    ActionKind.FORWARD: (0x1F, 0x77, 0xC4),
    ActionKind.BACKWARD: (0xE6, 0x9F, 0x00),
    ActionKind.INPUT_GRAD: (0xCC, 0x79, 0xA7),
    ActionKind.WEIGHT_GRAD: (0x00, 0x9E, 0x73),
}
_EMPTY: Triple = (0x26, 0x26, 0x2A)
# Of middle brightness: read on dark and on light terminals.
_RANKS = ("#3a9bd9", "#d98c00", "#1aa179", "#c06ba0", "#a89a00", "#d55e00", "#7a8cff", "#8c8c8c")


_LINES = {
    ActionKind.FORWARD: "#3a9bd9",
    ActionKind.BACKWARD: "#d98c00",
    ActionKind.INPUT_GRAD: "#c06ba0",
    ActionKind.WEIGHT_GRAD: "#1aa179",
}


def action_style(kind: ActionKind, *, chunk: int = 0, chunks: int = 1, odd: bool = False) -> tuple[Style, Style]:
    """Return the styles of an action's label and of its fill.

    Args:
        kind: Gives the hue.
        chunk: Which of the rank's stages; later ones are lighter.
        chunks: Number of stages of the rank.
        odd: Whether the micro-batch is odd: a little darker, so that neighbours can be told apart.
    """
    back = _shade(kind, chunk, chunks, odd=odd)
    front: Triple = (0, 0, 0) if _luminance(back) > 130 else (255, 255, 255)
    background = _color(back)
    return Style(color=_color(front), bgcolor=background), Style(color=background, bgcolor=background)


def blend_style(shares: Mapping[ActionKind, float]) -> tuple[Style, Style]:
    """Return the styles of a letter and of a shade in a cell that many actions share; what is left to 1 is idle.

    Colours mix as light does (in squares): blue and orange give sand, not mud.
    """
    idle = max(0.0, 1.0 - sum(shares.values()))
    red, green, blue = (
        math.sqrt(_EMPTY[c] ** 2 * idle + sum(_KINDS[kind][c] ** 2 * share for kind, share in shares.items()))
        for c in range(3)
    )
    back: Triple = (red, green, blue)
    front = _mix(back, (0, 0, 0) if _luminance(back) > 110 else (255, 255, 255), 0.3)
    return Style(color=_color(front), bgcolor=_color(back)), Style(color=_color(back), bgcolor=_color(back))


def rank_color(rank: int) -> str:
    """Return the colour of a rank's boxes and rows, as `#rrggbb`."""
    return _RANKS[rank % len(_RANKS)]


def line_color(kind: ActionKind) -> str:
    """Return the colour of lines and arrows of a kind, as `#rrggbb`: seen on dark and on light terminals."""
    return _LINES[kind]


def hex_color(kind: ActionKind, *, chunk: int = 0, chunks: int = 1, odd: bool = False) -> str:
    """Return an action's colour as `#rrggbb`.

    >>> hex_color(ActionKind.FORWARD)
    '#1f77c4'
    """
    red, green, blue = (round(channel) for channel in _shade(kind, chunk, chunks, odd=odd))
    return f"#{red:02x}{green:02x}{blue:02x}"


def make_console(file: IO[str] | None = None, *, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that is colourless when `NO_COLOR` is set or the output is no terminal.

    `FORCE_COLOR` overrides the second rule, never the first.
    """
    probe = Console(file=file, stderr=stderr, width=width, highlight=False)
    colored = not os.environ.get("NO_COLOR") and (probe.is_terminal or bool(os.environ.get("FORCE_COLOR")))
    if colored:
        return probe
    return Console(file=file, stderr=stderr, width=width, highlight=False, color_system=None)


def _shade(kind: ActionKind, chunk: int, chunks: int, *, odd: bool) -> Triple:
    light = 0.5 * chunk / (chunks - 1) if chunks > 1 else 0.0
    color = _mix(_KINDS[kind], (255, 255, 255), light)
    return _mix(color, (0, 0, 0), 0.16) if odd else color


def _mix(first: Triple, second: Triple, share: float) -> Triple:
    red, green, blue = (a + (b - a) * share for a, b in zip(first, second, strict=True))
    return red, green, blue


def _luminance(color: Triple) -> float:
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _color(color: Triple) -> Color:
    red, green, blue = (min(255, max(0, round(channel))) for channel in color)
    return Color.from_triplet(ColorTriplet(red, green, blue))
