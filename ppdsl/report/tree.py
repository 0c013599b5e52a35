"""The stage graph as a tree: each stage with what is in it, what it takes, and where its values go."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from ppdsl.graph.ir import Edge, Stage, StageGraph
from ppdsl.report.names import join_names
from ppdsl.report.palette import AXIS, LABEL, TITLE, rank_color
from ppdsl.units import format_bytes, format_flops

__all__ = ["render_tree"]

_MODULES = 60


def render_tree(
    graph: StageGraph, *, width: int = 80, placement: Sequence[int] | None = None, ascii_only: bool = False
) -> Text:
    """Return a stage graph as a tree.

    Args:
        graph: What is shown.
        width: Columns; longer lines are folded.
        placement: For each stage its rank, if known.
        ascii_only: Whether to draw without box characters.

    >>> print(render_tree(StageGraph((Stage(0, "enc", modules=("conv",)),), (), name="Net"), width=60).plain)
    Net: 1 stage, 0 edges
    └── stage enc
        └── modules  conv
    """
    root = Tree(_headline(graph), guide_style=AXIS)
    for stage in graph.stages:
        branch = root.add(_stage_line(graph, stage, placement))
        for name, words in _facts(graph, stage):
            branch.add(Text.assemble((f"{name:<9}", AXIS), words))
        for edge in graph.edges:
            if edge.producer == stage.index:
                branch.add(_edge_line(graph, edge))
    for tie in graph.ties:
        stages = ", ".join(graph.stages[s].label for s in tie.stages)
        root.add(Text.assemble(("tied     ", AXIS), f"{' = '.join(tie.names)} in stages {stages}"))
    return _to_text(root, width, ascii_only=ascii_only)


def _headline(graph: StageGraph) -> Text:
    stages, edges = len(graph.stages), len(graph.edges)
    counts = f"{stages} stage{'s' * (stages != 1)}, {edges} edge{'s' * (edges != 1)}"
    names = [name for stage in graph.stages for name in stage.parameters]
    if names and len(names) == len(set(names)):
        # With a parameter in two stages the sum would count it twice; each stage says its own.
        counts += f", {format_bytes(sum(s.parameter_bytes for s in graph.stages))} of parameters"
    return Text.assemble((graph.name, TITLE), f": {counts}")


def _stage_line(graph: StageGraph, stage: Stage, placement: Sequence[int] | None) -> Text:
    keys = list(dict.fromkeys(s.key for s in graph.stages))
    hue = keys.index(stage.key) if placement is None else placement[stage.index]
    line = Text.assemble((f"stage {stage.label}", Style(color=rank_color(hue), bold=True)))
    if placement is not None:
        line.append(f"  rank {placement[stage.index]}")
    if stage.span is not None:
        line.append(f"  {stage.span.short}", AXIS)
    return line


def _facts(graph: StageGraph, stage: Stage) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if stage.modules:
        facts.append(("modules", join_names(stage.modules, _MODULES)))
    if stage.operations:
        facts.append(("glue", f"{stage.operations} operation{'s' * (stage.operations != 1)}"))
    if stage.parameters:
        frozen = "" if stage.trainable else ", frozen"
        tensors = f"{len(stage.parameters)} tensor{'s' * (len(stage.parameters) != 1)}"
        facts.append(("params", f"{format_bytes(stage.parameter_bytes)} in {tensors}{frozen}"))
    if stage.flops:
        total = sum(s.flops for s in graph.stages)
        facts.append(("forward", f"{format_flops(stage.flops)}, {100 * stage.flops / total:.0f} % of the model"))
    taken = [f"{r.name} {r.meta}" for r in graph.inputs if stage.index in r.consumers]
    facts += [("input", name) for name in taken]
    made = [f"{o.name} {o.meta}" for o in graph.outputs if o.producer == stage.index]
    facts += [("output", name) for name in made]
    if graph.loss == stage.index:
        facts.append(("output", "loss"))
    return facts


def _edge_line(graph: StageGraph, edge: Edge) -> Text:
    targets = ", ".join(graph.stages[c].label for c in edge.consumers)
    line = Text.assemble(("sends    ", AXIS), (edge.value, LABEL), f" {edge.meta} {format_bytes(edge.bytes)}")
    line.append(f" to {targets}")
    if not edge.gradient_from:
        line.append(", no gradient", AXIS)
    return line


def _to_text(tree: Tree, width: int, *, ascii_only: bool) -> Text:
    """Lay a tree out once, so that it can be measured, compared and printed anywhere."""
    console = Console(file=StringIO(), width=width, color_system="truecolor", force_terminal=True, legacy_windows=False)
    options = console.options.update(width=width)
    if ascii_only:
        options.encoding = "ascii"
    lines = console.render_lines(tree, options, pad=False)
    texts = []
    for line in lines:
        text = Text(no_wrap=True)
        for segment in line:
            text.append(segment.text, segment.style)
        text.rstrip()
        texts.append(text)
    return Text("\n", no_wrap=True).join(texts)
