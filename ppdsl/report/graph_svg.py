"""The drawing of a stage graph as a small SVG: the same boxes and wires as in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ppdsl.graph.ir import StageGraph
from ppdsl.report.dag import layout_graph, net_label
from ppdsl.report.palette import rank_color
from ppdsl.report.routing import Box, Wire

__all__ = ["to_svg"]

_X, _Y = 9, 18  # pixels of a character cell
_MARGIN = 16
_COLUMNS = (120, 240, 960)


def to_svg(graph: StageGraph, *, placement: Sequence[int] | None = None) -> str:
    """Return a picture of a stage graph, readable on light and dark pages.

    Args:
        graph: What is drawn.
        placement: For each stage its rank, if known; gives the boxes their colour.
    """
    found = next((f for c in _COLUMNS if (f := layout_graph(graph, width=c, placement=placement)) is not None), None)
    if found is None:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="0" height="0"></svg>'
    drawing, plates = found
    keys = list(dict.fromkeys(s.key for s in graph.stages))
    labels = max((len(net_label(wire.net)) for wire in drawing.wires), default=0)
    width, height = (drawing.width + labels + 2) * _X + 2 * _MARGIN, drawing.height * _Y + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">',
        f"<title>{escape(graph.name)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#888"/></marker></defs>',
    ]
    for wire in drawing.wires:
        parts += _wire(wire)
    for box in drawing.boxes:
        stage = graph.stages[box.stage]
        hue = keys.index(stage.key) if placement is None else placement[box.stage]
        parts += _box(box, plates[box.stage].lines, rank_color(hue))
    return "\n".join([*parts, "</svg>"])


def _wire(wire: Wire) -> list[str]:
    dashed = "" if any(edge.gradient_from for edge in wire.net.edges) else ' stroke-dasharray="4 4"'
    parts = []
    for x, y, last_x, last_y in wire.lines:
        marker = ' marker-end="url(#arrow)"' if (last_x, last_y) in wire.arrows and x == last_x else ""
        parts.append(
            f'<path d="M{_px(x)} {_py(y)} L{_px(last_x)} {_py(last_y)}" stroke="#888" fill="none"{dashed}{marker}/>'
        )
    upright = max((line for line in wire.lines if line[0] == line[2]), key=lambda line: line[3] - line[1])
    middle = (_py(upright[1]) + _py(upright[3])) / 2 + 4
    text = escape(net_label(wire.net))
    parts.append(f'<text x="{_px(upright[0]) + 5}" y="{middle:g}" fill="#888" font-size="11">{text}</text>')
    return parts


def _box(box: Box, lines: Sequence[str], color: str) -> list[str]:
    x, y = _px(box.left), _py(box.top)
    width, height = (box.width - 1) * _X, (box.height - 1) * _Y
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" fill-opacity="0.18" '
        f'stroke="{color}" stroke-width="1.5"/>'
    ]
    for row, text in enumerate(lines):
        weight = ' font-weight="bold"' if row == 0 else ""
        parts.append(
            f'<text x="{x + 2 * _X}" y="{y + _Y * (row + 1) + 4}" fill="currentColor"{weight}>{escape(text)}</text>'
        )
    return parts


def _px(column: int) -> int:
    return _MARGIN + column * _X


def _py(row: int) -> int:
    return _MARGIN + row * _Y
