"""Messages in a Gantt chart: a line under each rank, an arrow where a message leaves, a wire while it is under way.

An arrow points to the rank that gets the message, further down or further up::

    rank 0 │F0F1········B0══│
     sends │  ↓╌↓╌          │
    rank 1 │····F0B0══F1B1══│
     sends │        ↑╌    ↑╌│
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style

from ppdsl.report.chart import Glyphs
from ppdsl.report.palette import AXIS, line_color
from ppdsl.report.scale import FOLD_COLUMNS, Scale
from ppdsl.simulation.transfers import Transfer

__all__ = ["SendRow", "draw_sends"]

_EMPTY = (" ", Style())


@dataclass(frozen=True, slots=True)
class SendRow:
    """What one rank sends.

    Attributes:
        cells: For each column its character and style.
        hidden: Number of messages that found no column of their own.
        folded: Number of messages in the folds, or in other lines of the chart.
    """

    cells: tuple[tuple[str, Style], ...]
    hidden: int
    folded: int


def draw_sends(sent: Sequence[Transfer], scale: Scale, glyphs: Glyphs) -> SendRow:
    """Return the line under a rank.

    Args:
        sent: The rank's messages, sorted by start.
        scale: Seconds to columns, as in the rank's own row.
        glyphs: Characters to draw with.
    """
    cells = [_EMPTY] * scale.columns
    hidden = folded = 0
    for transfer in sent:
        place = scale.column(transfer.start)
        if place is None or place > scale.columns - 1e-6:  # in a fold, or first of the next line
            folded += 1
            continue
        first = math.floor(place + 1e-6)
        if cells[first] is not _EMPTY:
            hidden += 1
            continue
        arrival = scale.column(transfer.end)
        last = first + 1 if arrival is None else max(first + 1, math.ceil(arrival - 1e-6))
        style = Style(color=line_color(transfer.made.kind))
        arrow = glyphs.down if transfer.target > transfer.source else glyphs.up
        for column in range(first, min(last, scale.columns)):
            if column == first:
                cells[column] = (arrow, style)
            elif cells[column] is _EMPTY:
                cells[column] = (glyphs.wire, style)
    for fold in scale.folds:
        for offset, character in enumerate(glyphs.fold[:FOLD_COLUMNS]):
            cells[fold.column + offset] = (character, AXIS)
    return SendRow(tuple(cells), hidden, folded)
