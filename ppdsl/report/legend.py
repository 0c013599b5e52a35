"""What the letters and marks of a Gantt chart mean, what it leaves out, and which stages a rank has."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from ppdsl.report.chart import Chart, Glyphs
from ppdsl.report.figures import KIND_NAMES, flow_text, format_time
from ppdsl.report.palette import IDLE, action_style, blend_style, rank_color
from ppdsl.report.sends import SendRow
from ppdsl.schedule.action import ActionKind
from ppdsl.timeline import Timeline

__all__ = ["draw_legend"]

_MOST_RANKS = 16


def draw_legend(
    timeline: Timeline, chart: Chart, sends: Sequence[SendRow], width: int, unit: str | None, glyphs: Glyphs
) -> list[Text]:
    """Return the lines of the legend.

    Args:
        timeline: What is drawn.
        chart: Its rows.
        sends: The lines of messages, when they are drawn.
        width: Columns.
        unit: What times are counted in; None for seconds.
        glyphs: The characters of the drawing.
    """
    kinds = sorted({e.action.kind for e in timeline.events}, key=list(ActionKind).index)
    entries = [Text.assemble((kind.value, action_style(kind)[0]), f" {KIND_NAMES[kind]}") for kind in kinds]
    if chart.dense:
        mixed = blend_style({kind: 1 / len(kinds) for kind in kinds})[0]
        entries.append(Text.assemble((glyphs.shades, mixed), " several kinds, by time in use"))
        entries.append(Text("lower case: used less than half"))
    elif chart.full:
        entries.append(Text("numbers: stage and micro-batch"))
    elif any(len(p.label) > 1 for row in chart.rows for p in row):
        entries.append(Text("numbers: micro-batches"))
    entries.append(Text.assemble((glyphs.idle, IDLE), " idle"))
    entries.append(Text("%: time in use"))
    if unit == "F":
        entries.append(Text(f"1 {unit}: one forward of one stage"))
    if chart.chunks > 1 and not chart.dense and not chart.full:
        more = "second stage" if chart.chunks == 2 else "2nd, 4th, ... stage"
        entries.append(Text(f"lower case: a rank's {more}"))
    if sends:
        entries.append(Text(f"{glyphs.down}{glyphs.up}{glyphs.wire} a message to a rank below, above, under way"))
    notes = _notes(timeline, chart, sends, unit, glyphs)
    return [*flow_text(entries, width), *flow_text(notes, width), *_stage_lines(timeline, chart, width)]


def _notes(timeline: Timeline, chart: Chart, sends: Sequence[SendRow], unit: str | None, glyphs: Glyphs) -> list[Text]:
    """Say what the drawing leaves out."""
    notes = [
        Text(f"{fold.periods} equal periods of {format_time(fold.period, unit)} are left out at {glyphs.fold.strip()}")
        for fold in chart.scale.folds
    ]
    if chart.folded:
        notes.append(Text(f"{chart.folded} actions are in the folds"))
    if chart.hidden:
        are = "action is" if chart.hidden == 1 else "actions are"
        notes.append(Text(f"{chart.hidden} {are} shorter than a column and not drawn"))
    if chart.dense:
        shown = sum(segment.end - segment.start for segment in chart.scale.segments)
        columns = sum(segment.columns for segment in chart.scale.segments)
        each = format_time(shown / max(1, columns), unit)
        notes.append(Text(f"{len(timeline.events)} actions; a column is {each} and shows what takes most of it"))
    lost = sum(row.hidden for row in sends)
    if lost:
        notes.append(Text(f"{lost} {'message shares' if lost == 1 else 'messages share'} another's column"))
    shown_ranks = sum(map(len, chart.ranks))
    if shown_ranks < timeline.ranks:
        notes.append(Text(f"{shown_ranks} of {timeline.ranks} ranks are shown"))
    return notes


def _stage_lines(timeline: Timeline, chart: Chart, width: int) -> list[Text]:
    """Say which stages a rank has, when its number does not say it."""
    drawn = {rank for ranks in chart.ranks for rank in ranks}
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        if event.rank in drawn:
            stages.setdefault(event.rank, set()).add(event.action.stage)
    if all(found == {rank} and _stage_name(timeline, rank) == str(rank) for rank, found in stages.items()):
        return []
    listed = sorted(stages.items())
    if len(listed) > _MOST_RANKS:
        listed = [*listed[:2], *listed[-2:]]
    entries = [Text("stages")]
    for position, (rank, found) in enumerate(listed):
        names = " ".join(_stage_name(timeline, s) for s in sorted(found))
        entries.append(Text.assemble((f"rank {rank}:", Style(color=rank_color(rank))), f" {names}"))
        if len(listed) < len(stages) and position == 1:
            entries.append(Text("..."))
    return [*flow_text(entries, width)]


def _stage_name(timeline: Timeline, stage: int) -> str:
    label = timeline.stage_labels[stage] if stage < len(timeline.stage_labels) else str(stage)
    return label if label == str(stage) else f"{stage}={label}"
