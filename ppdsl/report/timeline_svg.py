"""Timelines as a small SVG for papers and web pages: every action a box, its micro-batch's number where it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ppdsl.report.figures import KIND_NAMES, format_time
from ppdsl.report.palette import hex_color, line_color
from ppdsl.schedule.action import ActionKind
from ppdsl.simulation.transfers import Transfer
from ppdsl.timeline import Event, Timeline

__all__ = ["to_svg"]

_ROW, _BAR, _LEFT, _TOP, _BOTTOM = 26, 22, 64, 30, 40


def to_svg(
    timelines: Sequence[Timeline],
    *,
    title: str = "",
    unit: str | None = None,
    width: int = 960,
    messages: Sequence[Sequence[Transfer]] = (),
) -> str:
    """Return timelines, one above the other on one scale, readable on light and dark pages.

    Args:
        timelines: Predicted, measured or both.
        title: Said above each.
        unit: What times are counted in; None for seconds.
        width: Pixels.
        messages: For each timeline its messages, drawn as lines from rank to rank; shorter or empty: without.
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
    for position, (timeline, height) in enumerate(zip(timelines, heights, strict=True)):
        parts += _panel(timeline, top, per_second, title, unit)
        if position < len(messages):
            parts += _wires(timeline, messages[position], top, per_second)
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
    return parts + _axis(timeline, top + _TOP + timeline.ranks * _ROW, per_second, unit)


def _axis(timeline: Timeline, y: int, per_second: float, unit: str | None) -> list[str]:
    """Return a line with ticks at round times, at least 60 pixels apart, and the end."""
    span = timeline.makespan
    right = _LEFT + span * per_second
    parts = [f'<path d="M{_LEFT} {y}H{right:.1f}" stroke="currentColor" stroke-opacity="0.5" fill="none"/>']
    last = format_time(span, unit)
    room = right - 7 * len(last) - 24
    step = _round_up(60 / per_second) if span else 0.0
    moments = [i * step for i in range(int(span / step) + 1) if _LEFT + i * step * per_second < room] if step else []
    labels = [(moment, f"{moment:.6g}" if unit else format_time(moment)) for moment in moments]
    for moment, text in [*labels, (span, last)]:
        x = _LEFT + moment * per_second
        parts.append(f'<path d="M{x:.1f} {y}v4" stroke="currentColor" stroke-opacity="0.5"/>')
        anchor = "middle" if moment < span else "end"
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="{anchor}" fill-opacity="0.7">{text}</text>')
    return parts


def _round_up(time: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(time))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= time * (1 - 1e-9))


def _wires(timeline: Timeline, messages: Sequence[Transfer], top: int, per_second: float) -> list[str]:
    origin = min((e.start for e in timeline.events), default=0.0)
    parts = []
    for message in messages:
        down = message.target > message.source
        x, other = (_LEFT + (moment - origin) * per_second for moment in (message.start, message.end))
        y = top + _TOP + message.source * _ROW + (_BAR if down else 0)
        end = top + _TOP + message.target * _ROW + (0 if down else _BAR)
        color = line_color(message.made.kind)
        parts.append(f'<path d="M{x:.2f} {y}L{other:.2f} {end}" stroke="{color}" stroke-width="1" fill="none"/>')
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
        parts.append(f'<text x="{x + 20}" y="{top + 2}">{KIND_NAMES[kind]}</text>')
    return parts
