"""`ppdsl graph`: the stages of a model, drawn or for other tools."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from rich.text import Text

from ppdsl.cli.arguments import add_model, add_spec, add_width, parameters_of
from ppdsl.cli.models import ModelCall, load_model
from ppdsl.cli.output import Exit, Output
from ppdsl.graph.ir import StageGraph
from ppdsl.report.graph import render_dag, render_tree, to_dot, to_json, to_mermaid, to_svg
from ppdsl.report.tables import edge_table, stage_table

__all__ = ["add_arguments", "record_graph", "run_graph", "show_graph"]

_WRITERS = {"mermaid": to_mermaid, "dot": to_dot, "json": to_json, "svg": to_svg}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `ppdsl graph`."""
    add_model(parser, required=True)
    add_spec(parser)
    parser.add_argument(
        "--view", choices=("both", "tree", "dag", "table"), default="both", help="what to draw (default: both)"
    )
    parser.add_argument(
        "--format", choices=("text", "mermaid", "dot", "json", "svg"), default="text", help="default: text"
    )
    add_width(parser)


def run_graph(options: Namespace, output: Output) -> Exit:
    """Record a model and write its stage graph."""
    with output.busy("recording the model"):
        graph = _graph_of(options)
    output.report(graph.warnings)
    if options.format == "text":
        show_graph(graph, options.view, output)
    else:
        output.write(_WRITERS[options.format](graph))
    return Exit.FINE


def record_graph(call: ModelCall) -> StageGraph:
    """Return the stage graph of a model's call, with the loss when there is one."""
    from ppdsl.recording.record import record_call  # loads torch

    return record_call(call.model, call.args, dict(call.kwargs), loss=call.loss, targets=call.targets).graph


def _graph_of(options: Namespace) -> StageGraph:
    if options.spec is None:
        return record_graph(load_model(options.model))
    from ppdsl.cli.spec_models import record_with_spec  # loads lark
    from ppdsl.spec.load import load_spec

    partition = load_spec(options.spec, parameters_of(options.parameters))
    return record_with_spec(partition, load_model(options.model)).graph


def show_graph(graph: StageGraph, view: str, output: Output) -> None:
    """Draw a graph as a tree, as boxes and wires, as tables, or as tree and boxes."""
    width, plain = output.width, output.ascii_only
    views: dict[str, Callable[[], tuple[Text, ...]]] = {
        "tree": lambda: (render_tree(graph, width=width, ascii_only=plain),),
        "dag": lambda: (render_dag(graph, width=width, ascii_only=plain),),
        "table": lambda: (stage_table(graph, width=width), edge_table(graph, width=width)),
    }
    names = ("tree", "dag") if view == "both" else (view,)
    output.show(*(text for name in names for text in views[name]()))
