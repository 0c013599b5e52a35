"""A stage graph in every form: a tree and a drawing for people, Mermaid, DOT, SVG and JSON for tools.

All forms say the same: stages, the values between them with their bytes for one micro-batch, inputs, outputs, ties.
"""

from __future__ import annotations

import json

from ppdsl.graph.ir import Edge, Stage, StageGraph
from ppdsl.report.dag import render_dag
from ppdsl.report.graph_svg import to_svg
from ppdsl.report.names import fold_names, shorten
from ppdsl.report.tree import render_tree
from ppdsl.units import format_bytes

__all__ = ["render_dag", "render_tree", "to_dot", "to_json", "to_mermaid", "to_svg"]

_MOST_NAME = 40


def to_mermaid(graph: StageGraph) -> str:
    """Return a Mermaid flowchart, as GitHub and GitLab draw in Markdown.

    >>> print(to_mermaid(StageGraph((Stage(0, "enc"), Stage(1, "dec")), ())))
    flowchart TD
        s0["stage enc"]
        s1["stage dec"]
    """
    lines = ["flowchart TD"]
    for stage in graph.stages:
        text = "<br/>".join(_mermaid_text(part) for part in _stage_words(stage))
        lines.append(f'    s{stage.index}["{text}"]')
    for position, route in enumerate(graph.inputs):
        if route.consumers:
            lines.append(f'    i{position}(["{_mermaid_text(route.name)}"])')
            lines += [f"    i{position} -.-> s{consumer}" for consumer in route.consumers]
    for edge in graph.edges:
        arrow = "-->" if edge.gradient_from else "-.->"
        label = _mermaid_text(f"{edge.value} {format_bytes(edge.bytes)}")
        lines += [f'    s{edge.producer} {arrow}|"{label}"| s{consumer}' for consumer in edge.consumers]
    for position, output in enumerate(graph.outputs):
        lines.append(f'    o{position}(["{_mermaid_text(output.name)}"])')
        lines.append(f"    s{output.producer} -.-> o{position}")
    return "\n".join(lines)


def to_dot(graph: StageGraph) -> str:
    """Return a graph in Graphviz's DOT language.

    >>> print(to_dot(StageGraph((Stage(0, 0),), (), name="Net")))
    digraph "Net" {
        rankdir=TB;
        node [shape=box, style=rounded, fontname="sans-serif"];
        edge [fontname="sans-serif"];
        s0 [label="stage 0"];
    }
    """
    lines = [
        f"digraph {_dot_text(graph.name)} {{",
        "    rankdir=TB;",
        '    node [shape=box, style=rounded, fontname="sans-serif"];',
        '    edge [fontname="sans-serif"];',
    ]
    lines += [f"    s{stage.index} [label={_dot_text(*_stage_words(stage))}];" for stage in graph.stages]
    for position, route in enumerate(graph.inputs):
        if route.consumers:
            lines.append(f"    i{position} [label={_dot_text(route.name)}, shape=plaintext];")
            lines += [f"    i{position} -> s{consumer} [style=dashed];" for consumer in route.consumers]
    for edge in graph.edges:
        style = "" if edge.gradient_from else ", style=dashed"
        label = _dot_text(edge.value, format_bytes(edge.bytes))
        lines += [f"    s{edge.producer} -> s{consumer} [label={label}{style}];" for consumer in edge.consumers]
    for position, output in enumerate(graph.outputs):
        lines.append(f"    o{position} [label={_dot_text(output.name)}, shape=plaintext];")
        lines.append(f"    s{output.producer} -> o{position} [style=dashed];")
    return "\n".join([*lines, "}"])


def to_json(graph: StageGraph) -> str:
    """Return a graph as one JSON object on one line.

    Sizes are in bytes and for one micro-batch; stages are numbered along the model, as actions count them.

    >>> json.loads(to_json(StageGraph((Stage(0, "enc"),), ())))["stages"][0]["label"]
    'enc'
    """
    return json.dumps(
        {
            "name": graph.name,
            "digest": graph.digest,
            "stages": [_stage_object(stage) for stage in graph.stages],
            "edges": [_edge_object(edge) for edge in graph.edges],
            "inputs": [
                {"name": r.name, "consumers": r.consumers, "shape": r.meta.shape, "dtype": r.meta.dtype}
                for r in graph.inputs
            ],
            "outputs": [
                {"name": o.name, "producer": o.producer, "shape": o.meta.shape, "dtype": o.meta.dtype}
                for o in graph.outputs
            ],
            "ties": [{"names": t.names, "stages": t.stages} for t in graph.ties],
            "loss": graph.loss,
        }
    )


def _stage_words(stage: Stage) -> list[str]:
    words = [f"stage {stage.label}"]
    if stage.modules:
        words.append(shorten(", ".join(fold_names(stage.modules)), _MOST_NAME))
    if stage.parameters:
        words.append(format_bytes(stage.parameter_bytes))
    return words


def _stage_object(stage: Stage) -> dict[str, object]:
    return {
        "index": stage.index,
        "key": stage.key,
        "visit": stage.visit,
        "label": stage.label,
        "place": None if stage.span is None else str(stage.span),
        "modules": stage.modules,
        "operations": stage.operations,
        "parameters": stage.parameters,
        "buffers": stage.buffers,
        "parameter_bytes": stage.parameter_bytes,
        "trainable": stage.trainable,
        "has_backward": stage.has_backward,
        "says": stage.says,
        "flops": stage.flops,
    }


def _edge_object(edge: Edge) -> dict[str, object]:
    return {
        "index": edge.index,
        "value": edge.value,
        "producer": edge.producer,
        "consumers": edge.consumers,
        "shape": edge.meta.shape,
        "stride": edge.meta.stride,
        "dtype": edge.meta.dtype,
        "bytes": edge.bytes,
        "requires_grad": edge.meta.requires_grad,
        "gradient_from": list(edge.gradient_from),
        "place": None if edge.span is None else str(edge.span),
    }


def _mermaid_text(text: str) -> str:
    for character, name in (("#", "#35;"), ("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(character, name)
    return text


def _dot_text(*lines: str) -> str:
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
