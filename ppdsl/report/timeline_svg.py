"""Timelines as a small SVG for papers and web pages: every action a box, its micro-batch's number where it fits."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ppdsl.report.palette import hex_color
from ppdsl.report.timeline import format_time
from ppdsl.schedule.action import ActionKind
from ppdsl.timeline import Event, Timeline

__all__ = ["to_svg"]

_ROW, _BAR, _LEFT, _TOP, _BOTTOM = 26, 22, 64, 30, 40
_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}


def to_svg(timelines: Sequence[Timeline], *, title: str = "", unit: str | None = None, width: int = 960) -> str:
    """Return timelines, one above the other on one scale, readable on light and dark pages.

    Args:
        timelines: Predicted, measured or both.
        title: Said above each.
        unit: What times are counted in; None for seconds.
        width: Pixels.
    """
    span = max((t.makespan for t in timelines), default=0.0) or 1.0
    per_second = (width - _LEFT - 16) / span
    heights = [_TOP + _ROW * t.ranks + _BOTTOM for t in timelines]
    total = sum(heights) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" '
        'font-family="ui-sans-serif, Helvetica, Arial, sans-serif" font-size="12" fill="currentColor">'
    ]
    top = 0
    for timeline, height in zip(timelines, heights, strict=True):
        parts += _panel(timeline, top, per_second, title, unit)
        top += height
    parts += _legend(timelines, top)
    return "\n".join([*parts, "</svg>"])


def _panel(timeline: Timeline, top: int, per_second: float, title: str, unit: str | None) -> list[str]:
    origin = min((e.start for e in timeline.events), default=0.0)
    chunks = _chunks(timeline)
    kind = "measured" if timeline.measured else "predicted"
    words = f"{title}  {kind}: {format_time(timeline.makespan, unit)}, bubble {100 * timeline.bubble:.1f} %".strip()
    parts = [f'<text x="{_LEFT}" y="{top + 18}" font-weight="bold">{escape(words)}</text>']
    right = _LEFT + timeline.makespan * per_second
    for rank in range(timeline.ranks):
        y = top + _TOP + rank * _ROW
        parts.append(f'<text x="8" y="{y + 15}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT:.1f}" height="{_BAR}" fill="#888" fill-opacity="0.12"/>'
        )
    for event in timeline.events:
        parts += _bar(event, top, origin, per_second, chunks[event.action.stage])
    return parts


def _bar(event: Event, top: int, origin: float, per_second: float, chunk: tuple[int, int]) -> list[str]:
    action = event.action
    x = _LEFT + (event.start - origin) * per_second
    y = top + _TOP + event.rank * _ROW
    width = (event.end - event.start) * per_second
    color = hex_color(action.kind, chunk=chunk[0], chunks=chunk[1], odd=action.microbatch % 2 == 1)
    box = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{color}" stroke="#fff" '
    parts = [f'{box}stroke-width="0.5"><title>{action}</title></rect>']
    text = str(action.microbatch)
    if width >= 7 * len(text) + 3:
        parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle" fill="#111">{text}</text>')
    return parts


def _chunks(timeline: Timeline) -> dict[int, tuple[int, int]]:
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        stages.setdefault(event.rank, set()).add(event.action.stage)
    return {s: (i, len(found)) for found in stages.values() for i, s in enumerate(sorted(found))}


def _legend(timelines: Sequence[Timeline], top: int) -> list[str]:
    kinds = sorted({e.action.kind for t in timelines for e in t.events}, key=list(ActionKind).index)
    parts = []
    for position, kind in enumerate(kinds):
        x = _LEFT + 130 * position
        parts.append(f'<rect x="{x}" y="{top - 10}" width="14" height="14" fill="{hex_color(kind)}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + 2}">{_NAMES[kind]}</text>')
    return parts
