"""The stage graph as a drawing in the terminal: boxes from top to bottom, skip edges beside, branches side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from ppdsl.graph.ir import Stage, StageGraph
from ppdsl.report.canvas import Canvas
from ppdsl.report.layers import Net, arrange, group_nets
from ppdsl.report.names import join_names
from ppdsl.report.palette import AXIS, LABEL, rank_color
from ppdsl.report.routing import Drawing, Wire, route
from ppdsl.units import format_bytes, format_flops

__all__ = ["Plate", "draw_graph", "layout_graph", "net_label", "render_dag"]

_WIDEST = 44
_DETAIL_WIDTHS = (_WIDEST, 30, 22, 16, 12)
_LEAST_WIDTH = 5


@dataclass(frozen=True, slots=True)
class Plate:
    """What stands in a stage's box: its lines, the first one is its name."""

    lines: tuple[str, ...]

    @property
    def width(self) -> int:
        """Columns with border and one blank on each side."""
        return max(map(cell_len, self.lines)) + 4

    @property
    def height(self) -> int:
        """Rows with border."""
        return len(self.lines) + 2


def render_dag(
    graph: StageGraph, *, width: int = 80, placement: Sequence[int] | None = None, ascii_only: bool = False
) -> Text:
    """Draw a stage graph.

    Boxes say as much as fits in the width; a graph that is too wide even with bare names is listed instead.

    Args:
        graph: What is drawn.
        width: Columns; no line is longer.
        placement: For each stage its rank, if known; gives the boxes their colour.
        ascii_only: Whether to draw without box characters.
    """
    found = layout_graph(graph, width=width, placement=placement)
    if found is None:
        return _listing(graph, width)
    drawing, plates = found
    return draw_graph(graph, drawing, plates, width=width, placement=placement, ascii_only=ascii_only)


def layout_graph(
    graph: StageGraph, *, width: int = 80, placement: Sequence[int] | None = None
) -> tuple[Drawing, tuple[Plate, ...]] | None:
    """Return boxes, wires and the text of the boxes, as detailed as the width allows, or None when nothing fits."""
    if not graph.stages:
        return None
    nets = group_nets(graph)
    ports = _port_counts(graph, nets)
    rooms = [[cell_len(net_label(net)) + 1 for net in nets], [0] * len(nets)]
    candidates = [tuple(_plate(graph, s, placement, detail) for s in graph.stages) for detail in _DETAIL_WIDTHS]
    candidates.append(tuple(Plate((_fit(s.label, _LEAST_WIDTH - 4),)) for s in graph.stages))
    for plates in candidates:
        own = [max(p.width, 2 * count + 1, _LEAST_WIDTH) for p, count in zip(plates, ports, strict=True)]
        for room in rooms:
            for widths in ([max(own)] * len(own), own):
                skeleton = arrange(graph, widths, room, width)
                if skeleton is not None:
                    return route(skeleton, widths, [plate.height for plate in plates]), plates
    return None


def draw_graph(
    graph: StageGraph,
    drawing: Drawing,
    plates: Sequence[Plate],
    *,
    width: int,
    placement: Sequence[int] | None = None,
    ascii_only: bool = False,
) -> Text:
    """Paint boxes and wires with characters."""
    canvas = Canvas(width, drawing.height, ascii_only=ascii_only)
    owners = len(drawing.boxes)
    for position, wire in enumerate(drawing.wires):
        dashed = not any(edge.gradient_from for edge in wire.net.edges)
        for line in wire.lines:
            canvas.line(line, owners + position, AXIS, dashed=dashed)
    for box in drawing.boxes:
        style = Style(color=rank_color(_hue(graph, box.stage, placement)))
        right, bottom = box.left + box.width - 1, box.top + box.height - 1
        for line in (
            (box.left, box.top, right, box.top),
            (box.left, bottom, right, bottom),
            (box.left, box.top, box.left, bottom),
            (right, box.top, right, bottom),
        ):
            canvas.line(line, box.stage, style)
        for row, text in enumerate(plates[box.stage].lines):
            canvas.write(box.left + 2, box.top + 1 + row, text, LABEL if row == 0 else Style())
    for wire in drawing.wires:
        for x, y in wire.arrows:
            canvas.write(x, y, "v" if ascii_only else "▼", AXIS)
    for wire in drawing.wires:
        _write_label(canvas, wire)
    return canvas.render()


def net_label(net: Net) -> str:
    """Return what a wire carries: the value's name, or how many there are, and bytes for one micro-batch."""
    total = format_bytes(sum(edge.bytes for edge in net.edges))
    return f"{net.edges[0].value} {total}" if len(net.edges) == 1 else f"{len(net.edges)} values {total}"


def _hue(graph: StageGraph, stage: int, placement: Sequence[int] | None) -> int:
    """Return what gives a box its colour: its rank, or which of the user's keys it is."""
    if placement is not None:
        return placement[stage]
    keys = list(dict.fromkeys(s.key for s in graph.stages))
    return keys.index(graph.stages[stage].key)


def _port_counts(graph: StageGraph, nets: Sequence[Net]) -> list[int]:
    """Return for each stage the most wires on one side of its box."""
    return [
        max(sum(n.producer == s.index for n in nets), sum(s.index in n.consumers for n in nets)) for s in graph.stages
    ]


def _plate(graph: StageGraph, stage: Stage, placement: Sequence[int] | None, columns: int) -> Plate:
    name = f"stage {stage.label}" if columns > _DETAIL_WIDTHS[-1] else stage.label
    if placement is not None:
        name += f"  rank {placement[stage.index]}" if columns > _DETAIL_WIDTHS[-2] else f" r{placement[stage.index]}"
    lines = [name]
    if stage.modules:
        lines.append(join_names(stage.modules, columns - 4))
    elif stage.operations:
        lines.append(f"{stage.operations} operations")
    figures = [format_bytes(stage.parameter_bytes)] if stage.parameters else []
    figures += [format_flops(stage.flops)] if stage.flops else []
    if figures:
        both = "  ".join(figures)
        lines.append(both if len(both) <= columns - 4 else figures[0])
    taken = [route.name for route in graph.inputs if stage.index in route.consumers]
    made = [route.name for route in graph.outputs if route.producer == stage.index]
    made = ["loss"] if graph.loss == stage.index else made
    if taken:
        lines.append("in: " + ", ".join(taken))
    if made:
        lines.append("out: " + ", ".join(made))
    return Plate(tuple(_fit(line, columns - 4) for line in lines))


def _fit(text: str, columns: int) -> str:
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1).rstrip() + "…"


def _write_label(canvas: Canvas, wire: Wire) -> None:
    """Write what a wire carries beside one of its upright lines, where the canvas is blank."""
    full = net_label(wire.net)
    for text in (full, full.rsplit(" ", 2)[-2] + " " + full.rsplit(" ", 1)[-1]):
        for x, y, last_x, last_y in sorted(wire.lines, key=lambda line: line[1]):
            if x != last_x:
                continue
            for row in range(y, last_y + 1):
                if canvas.is_free(x + 1, row, cell_len(text) + 2):
                    canvas.write(x + 2, row, text, AXIS)
                    return
                if canvas.is_free(x - cell_len(text) - 2, row, cell_len(text) + 2):
                    canvas.write(x - cell_len(text) - 1, row, text, AXIS)
                    return


def _listing(graph: StageGraph, width: int) -> Text:
    """Say who sends to whom, for graphs with too many stages side by side."""
    targets: Mapping[int, list[str]] = {
        s.index: [graph.stages[c].label for c in graph.successors(s.index)] for s in graph.stages
    }
    lines = [f"{graph.name}: too many stages side by side to draw in {width} columns; who sends to whom:"]
    lines += [f"  {s.label} -> {', '.join(targets[s.index]) or 'nobody'}" for s in graph.stages]
    return Text("\n".join(_fit(line, width) for line in lines), no_wrap=True)
