"""Tables: stages with their cost, the values between them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from ppdsl.graph.ir import StageGraph
from ppdsl.report.names import fold_names, shorten
from ppdsl.report.palette import AXIS, LABEL
from ppdsl.units import format_bytes, format_flops

__all__ = ["edge_table", "format_table", "stage_table"]


def stage_table(graph: StageGraph, *, width: int = 80, placement: Sequence[int] | None = None) -> Text:
    """Return stages with rank, modules, parameters, FLOPs of one forward, and their share of the model's.

    Args:
        graph: What is listed.
        width: Columns; the list of modules is shortened to fit.
        placement: For each stage its rank, if known.

    >>> from ppdsl.graph.ir import Stage
    >>> print(stage_table(StageGraph((Stage(0, "enc", modules=("conv",)),), ()), placement=[0]).plain)
    stage  rank  modules  tensors  bytes  forward  share
    enc       0  conv           0    0 B   0 FLOP      -
    """
    total = sum(s.flops for s in graph.stages)
    header = ("stage", "rank", "modules", "tensors", "bytes", "forward", "share")
    rows = [
        (
            s.label,
            "-" if placement is None else str(placement[s.index]),
            ", ".join(fold_names(s.modules)) or "-",
            str(len(s.parameters)),
            format_bytes(s.parameter_bytes),
            format_flops(s.flops),
            f"{100 * s.flops / total:.1f} %" if total else "-",
        )
        for s in graph.stages
    ]
    return format_table(header, rows, align="<><>>>>", width=width, elastic=2)


def edge_table(graph: StageGraph, *, width: int = 80) -> Text:
    """Return the values between stages: from, to, name, type and shape, bytes, whether a gradient flows back.

    Args:
        graph: What is listed.
        width: Columns; names are shortened to fit.
    """
    rows = [
        (
            graph.stages[e.producer].label,
            ", ".join(graph.stages[c].label for c in e.consumers),
            e.value,
            str(e.meta),
            format_bytes(e.bytes),
            "yes" if e.gradient_from else "no",
        )
        for e in graph.edges
    ]
    header = ("from", "to", "value", "tensor", "bytes", "gradient")
    return format_table(header, rows, align="<<<<><", width=width, elastic=2)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, width: int, elastic: int) -> Text:
    """Return rows in columns, two blanks apart.

    Args:
        header: One word a column.
        rows: As many cells as the header.
        align: One of `<` and `>` a column.
        width: Columns of the terminal.
        elastic: The column that is shortened when the table is too wide.
    """
    widths = [max(cell_len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    widths[elastic] = max(min(widths[elastic], len(header[elastic])), widths[elastic] - max(0, excess))
    lines = []
    for number, row in enumerate((header, *rows)):
        cells = [_cell(cell, widths[i], align[i]) for i, cell in enumerate(row)]
        lines.append(Text("  ".join(cells).rstrip(), style=LABEL if number == 0 else "", no_wrap=True))
    return Text("\n", no_wrap=True).join(lines) if rows else Text("none", style=AXIS)


def _cell(text: str, width: int, side: str) -> str:
    text = shorten(text, width)
    blanks = " " * (width - cell_len(text))
    return text + blanks if side == "<" else blanks + text
