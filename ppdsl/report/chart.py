"""The rows of a Gantt chart: which action owns which column, and what is written there.

A row is a tuple of pieces; a piece is some columns of one action, of idle time, of a fold, or (when the actions are
too many to be told apart) one column of dense work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.style import Style

from ppdsl.report.palette import AXIS, IDLE, action_style, blend_style
from ppdsl.report.scale import Scale, Segment
from ppdsl.schedule.action import ActionKind
from ppdsl.timeline import Event, Timeline

__all__ = ["ASCII", "UNICODE", "Chart", "Glyphs", "Piece", "draw_chart"]

_MOST_ROWS = 64
_DENSE_SHARE = 0.75
_SHADES = (0.4, 0.7, 0.95)
_VISIBLE_SHARE = 0.85
_FULL_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a drawing.

    Attributes:
        fills: For each kind what follows its label.
        idle: A column in which the rank waits.
        fold: The mark of a cut, `FOLD_COLUMNS` wide.
        wall: Left and right border of a row.
        corner: Corner of the axis.
        line: Line of the axis.
        tick: A tick of the axis.
        end: Where the axis ends.
        shades: Several kinds in one column, from hardly busy to always busy.
        times: In front of the number of periods in a fold.
        down: A message to a rank further down.
        up: A message to a rank further up.
        wire: A message under way.
        gap: Ranks that are not shown.
    """

    fills: Mapping[ActionKind, str]
    idle: str
    fold: str
    wall: str
    corner: str
    line: str
    tick: str
    end: str
    shades: str
    times: str
    down: str
    up: str
    wire: str
    gap: str


UNICODE = Glyphs(
    {
        ActionKind.FORWARD: "─",
        ActionKind.BACKWARD: "═",
        ActionKind.INPUT_GRAD: "╌",
        ActionKind.WEIGHT_GRAD: "~",
    },
    idle="·", fold=" ⋯ ", wall="│", corner="└", line="─", tick="┴", end="┘", shades="░▒▓█",
    times="×", down="↓", up="↑", wire="╌", gap="┆",
)  # fmt: skip
ASCII = Glyphs(
    {
        ActionKind.FORWARD: "-",
        ActionKind.BACKWARD: "=",
        ActionKind.INPUT_GRAD: "-",
        ActionKind.WEIGHT_GRAD: "~",
    },
    idle=".", fold=" / ", wall="|", corner="+", line="-", tick="+", end="+", shades=".:x#",
    times="x", down="v", up="^", wire="-", gap=":",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring columns.

    Attributes:
        label: Text that is always seen.
        fill: Text that colour replaces.
        style: Of the label.
        fill_style: Of the fill.
        event: The action drawn here, or None.
    """

    label: str
    fill: str
    style: Style
    fill_style: Style
    event: Event | None = None

    @property
    def text(self) -> str:
        """What is printed."""
        return self.label + self.fill


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn timeline.

    Attributes:
        rows: For each row its pieces; together as wide as the scale.
        ranks: For each row the ranks it stands for, one unless there are very many.
        scale: Seconds to columns.
        dense: Whether columns show the mixture of many actions instead of single ones.
        folded: Number of actions in the folds.
        hidden: Number of actions shorter than what a column can show.
        chunks: Most stages of one rank; from 2 on, lower-case letters are used for every second one.
        full: Whether labels are whole actions (`2F0`).
    """

    rows: tuple[tuple[Piece, ...], ...]
    ranks: tuple[range, ...]
    scale: Scale
    dense: bool
    folded: int
    hidden: int
    chunks: int
    full: bool = False


def draw_chart(
    timeline: Timeline,
    scale: Scale,
    glyphs: Glyphs = UNICODE,
    *,
    ranks: Sequence[int] | None = None,
    full: bool | None = None,
) -> Chart:
    """Return the rows of a chart on a given scale.

    Args:
        timeline: What is drawn.
        scale: Seconds to columns.
        glyphs: Characters to draw with.
        ranks: Ranks to draw, ascending; None: all.
        full: Whether labels are whole actions (`2F0`); None: where ranks have several stages and there is room.
    """
    chosen = range(timeline.ranks) if ranks is None else ranks
    by_rank: dict[int, list[Event]] = {rank: [] for rank in chosen}
    for event in timeline.events:
        if event.rank in by_rank:
            by_rank[event.rank].append(event)
    chunks = _chunks(event for row in by_rank.values() for event in row)
    start, end = scale.segments[0].start, scale.segments[-1].end
    if end - start < timeline.makespan * (1 - 1e-9):  # a part of the step
        by_rank = {rank: [e for e in row if e.end > start and e.start < end] for rank, row in by_rank.items()}
    events = [event for row in by_rank.values() for event in row]
    many = max((count for _, count in chunks.values()), default=1)
    folds = sum(_in_fold(e, scale) for e in events) if scale.folds else 0
    crowded = (len(events) - folds) * _VISIBLE_SHARE > scale.columns * len(by_rank)
    if len(by_rank) <= _MOST_ROWS and not crowded:
        owned = [[_owners(row, segment) for segment in scale.segments] for row in by_rank.values()]
        full = many > 1 and _all_labels_fit(owned) if full is None else full
        drawn = [_row(owners, scale, chunks, glyphs, full=full) for owners in owned]
        shown = {id(p.event) for pieces in drawn for p in pieces if p.event is not None}
        folded = sum(id(e) not in shown and _in_fold(e, scale) for e in events)
        hidden = len(events) - folded - len(shown)
        if len(shown) >= _VISIBLE_SHARE * (len(events) - folded):
            single = tuple(range(rank, rank + 1) for rank in by_rank)
            return Chart(tuple(drawn), single, scale, False, folded, hidden, many, full)
    return _dense_chart(by_rank, scale, glyphs, many)


def _chunks(events: Iterable[Event]) -> dict[int, tuple[int, int]]:
    """Return for each stage which of its rank's stages it is, and how many the rank has."""
    stages: dict[int, set[int]] = {}
    for event in events:
        stages.setdefault(event.rank, set()).add(event.action.stage)
    return {stage: (position, len(found)) for found in stages.values() for position, stage in enumerate(sorted(found))}


def _in_fold(event: Event, scale: Scale) -> bool:
    return any(fold.start <= event.start and event.end <= fold.end for fold in scale.folds)


def _all_labels_fit(owned: Sequence[Sequence[Sequence[Event | None]]]) -> bool:
    """Tell whether nearly every drawn action has room for stage, kind and micro-batch: all are labelled alike."""
    runs = [(event, stop - start) for row in owned for owners in row for event, start, stop in _runs(owners)]
    fitting = sum(event is not None and len(str(event.action)) < columns for event, columns in runs)
    return fitting >= _FULL_SHARE * sum(event is not None for event, _ in runs)


def _runs(owners: Sequence[Event | None]) -> Iterable[tuple[Event | None, int, int]]:
    """Return neighbouring columns of one owner, as (owner, first, after the last)."""
    column = 0
    while column < len(owners):
        stop = column
        while stop < len(owners) and owners[stop] is owners[column]:
            stop += 1
        yield owners[column], column, stop
        column = stop


def _row(
    owned: Sequence[Sequence[Event | None]],
    scale: Scale,
    chunks: Mapping[int, tuple[int, int]],
    glyphs: Glyphs,
    *,
    full: bool,
) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for position, owners in enumerate(owned):
        for event, start, stop in _runs(owners):
            pieces.append(_piece(event, stop - start, chunks, glyphs, full=full))
        if position < len(scale.folds):
            pieces.append(Piece(glyphs.fold, "", AXIS, AXIS))
    return tuple(pieces)


def _owners(events: Sequence[Event], segment: Segment) -> list[Event | None]:
    """Return for each column the action that has most of it; idle where none has half."""
    owners: list[Event | None] = [None] * segment.columns
    covered = [0.0] * segment.columns
    small: list[tuple[Event, int]] = []
    for event in events:
        shares = _shares(event, segment)
        won = False
        for column, share in shares:
            if share >= 0.5 - 1e-9 and share > covered[column] + 1e-9:
                owners[column], covered[column], won = event, share, True
        if shares and not won:
            small.append((event, max(shares, key=lambda pair: pair[1])[0]))
    for event, column in small:
        if owners[column] is None:
            owners[column] = event
    return owners


def _shares(event: Event, segment: Segment) -> list[tuple[int, float]]:
    """Return the columns an action touches, with the share of each that it covers."""
    span = segment.end - segment.start
    if span <= 0 or event.end <= segment.start or event.start >= segment.end:
        return []
    per_second = segment.columns / span
    left = max(0.0, (event.start - segment.start) * per_second)
    right = min(float(segment.columns), (event.end - segment.start) * per_second)
    first, last = math.floor(left + 1e-6), math.ceil(right - 1e-6)
    return [(c, min(right, c + 1) - max(left, c)) for c in range(first, min(max(last, first + 1), segment.columns))]


def _piece(
    event: Event | None, width: int, chunks: Mapping[int, tuple[int, int]], glyphs: Glyphs, *, full: bool
) -> Piece:
    if event is None:
        return Piece("", glyphs.idle * width, IDLE, IDLE)
    action = event.action
    chunk, count = chunks[action.stage]
    style, fill_style = action_style(action.kind, chunk=chunk, chunks=count, odd=action.microbatch % 2 == 1)
    letter = action.kind.value.lower() if chunk % 2 else action.kind.value
    names = [str(action)] if full else []
    names += [f"{letter}{action.microbatch}", letter]
    label = next(name for name in names if len(name) <= width)
    return Piece(label, glyphs.fills[action.kind] * (width - len(label)), style, fill_style, event)


def _dense_chart(by_rank: Mapping[int, Sequence[Event]], scale: Scale, glyphs: Glyphs, many: int) -> Chart:
    """Show in each column what share of the time goes to what."""
    groups = _groups(list(by_rank))
    rows: list[tuple[Piece, ...]] = []
    for group in groups:
        pieces: list[Piece] = []
        for position, segment in enumerate(scale.segments):
            totals: list[dict[ActionKind, float]] = [{} for _ in range(segment.columns)]
            for rank in group:
                for event in by_rank[rank]:
                    for column, share in _shares(event, segment):
                        total = totals[column]
                        total[event.action.kind] = total.get(event.action.kind, 0.0) + share / len(group)
            pieces += [_dense_piece(total, glyphs) for total in totals]
            if position < len(scale.folds):
                pieces.append(Piece(glyphs.fold, "", AXIS, AXIS))
        rows.append(tuple(pieces))
    return Chart(tuple(rows), tuple(groups), scale, dense=True, folded=0, hidden=0, chunks=many)


def _groups(ranks: Sequence[int]) -> list[range]:
    """Return so many neighbouring ranks in a row that the rows are not too many."""
    together = math.ceil(len(ranks) / _MOST_ROWS)
    groups: list[range] = []
    for rank in ranks:
        if groups and groups[-1].stop == rank and len(groups[-1]) < together:
            groups[-1] = range(groups[-1].start, rank + 1)
        else:
            groups.append(range(rank, rank + 1))
    return groups


def _dense_piece(shares: Mapping[ActionKind, float], glyphs: Glyphs) -> Piece:
    busy = sum(shares.values())
    if busy < 0.05:
        return Piece("", glyphs.idle, IDLE, IDLE)
    kind, most = max(shares.items(), key=lambda pair: pair[1])
    letter, shade = blend_style(shares)
    if most < _DENSE_SHARE * busy:
        return Piece("", glyphs.shades[sum(busy >= step for step in _SHADES)], shade, shade)
    return Piece("", kind.value if busy >= 0.5 else kind.value.lower(), letter, letter)
