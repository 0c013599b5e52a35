"""The time axis under a Gantt chart: its line, its ticks, its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from ppdsl.report.chart import Glyphs
from ppdsl.report.figures import four_digits
from ppdsl.report.palette import AXIS
from ppdsl.report.scale import FOLD_COLUMNS, Scale

__all__ = ["draw_axis"]


def draw_axis(
    scale: Scale, start: float, total: float, *, margin: int, tail: int, unit: str | None, glyphs: Glyphs
) -> list[Text]:
    """Return the line under the rows, and the numbers under it.

    Args:
        scale: Seconds to columns.
        start: The first moment, which counts as 0.
        total: Length of the whole step, in seconds; gives the unit.
        margin: Columns in front of the rows' left wall.
        tail: Columns behind the axis that its last number may use.
        unit: What times are counted in; None for seconds.
        glyphs: Characters to draw with.
    """
    columns = scale.columns
    factor, suffix = _axis_unit(total, unit)
    line = [glyphs.line] * columns
    numbers = [" "] * (columns + tail)
    last = f"{four_digits((scale.segments[-1].end - start) * factor)} {suffix}"
    _write(numbers, max(0, min(columns - len(last) // 2, columns + tail - len(last))), last)
    for fold in scale.folds:
        line[fold.column : fold.column + FOLD_COLUMNS] = glyphs.fold
        periods = f"{glyphs.times}{fold.periods}"
        place = fold.column + 1 - len(periods) // 2
        if place >= 0 and _free(numbers, place, len(periods)):
            _write(numbers, place, periods)
    for value in _ticks(total * factor, factor, scale):
        place_of = scale.column(start + value / factor)
        text = f"{value:.6g}"
        if place_of is None or not _free(numbers, round(place_of), len(text)):
            continue
        line[min(round(place_of), columns - 1)] = glyphs.tick
        _write(numbers, round(place_of), text)
    for fold in scale.folds:
        line[fold.column : fold.column + FOLD_COLUMNS] = glyphs.fold
    rule = " " * margin + glyphs.corner + "".join(line) + glyphs.end
    return [Text(rule, style=AXIS, no_wrap=True), Text(" " * (margin + 1) + "".join(numbers), style=AXIS, no_wrap=True)]


def _write(cells: list[str], column: int, text: str) -> None:
    cells[column : column + len(text)] = text


def _free(cells: Sequence[str], column: int, length: int) -> bool:
    return column + length < len(cells) and not "".join(cells[max(column - 2, 0) : column + length + 2]).strip()


def _axis_unit(total: float, unit: str | None) -> tuple[float, str]:
    if unit is not None:
        return 1.0, unit
    if total < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if total < 1 else (1.0, "s")


def _ticks(total: float, factor: float, scale: Scale) -> list[float]:
    """Return round numbers, at least ten columns apart."""
    if total <= 0:
        return []
    shown = sum(s.end - s.start for s in scale.segments) or total / factor
    rough = shown * factor / max(1, scale.columns // 10)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(total / step) + 1)]
