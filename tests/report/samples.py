"""Graphs and schedules that the drawings are tested with, and the comparison with the golden texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ppdsl.graph.ir import Edge, InputRoute, OutputRoute, Stage, StageGraph, TensorMeta
from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule.registry import build_schedule
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs, uniform_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.timeline import Timeline
from ppdsl.units import Bytes, Flops

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare a whole text with its file; `GOLDEN=write pytest tests/report` writes the files anew."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8"), f"{path.name} differs"


def make_graph(
    name: str,
    stages: Sequence[tuple[int | str, Sequence[str]]],
    edges: Sequence[tuple[str, int, Sequence[int]]],
    inputs: Sequence[tuple[str, Sequence[int]]] = (),
    outputs: Sequence[tuple[str, int]] = (),
    loss: int | None = None,
    constants: Sequence[str] = (),
) -> StageGraph:
    """Return a graph; `constants` are the values without gradient."""
    keys = [key for key, _ in stages]
    nodes = tuple(
        Stage(
            index=index,
            key=key,
            visit=keys[:index].count(key),
            modules=tuple(modules),
            operations=index,
            parameters=tuple(f"{module}.weight" for module in modules),
            parameter_bytes=Bytes(40_000 * len(modules)),
            flops=Flops(3_000_000 * len(modules)),
        )
        for index, (key, modules) in enumerate(stages)
    )
    values = tuple(
        Edge(
            index,
            value,
            TensorMeta((4, 16, 8 * (index + 1)), "float32", requires_grad=value not in constants),
            producer,
            tuple(consumers),
        )
        for index, (value, producer, consumers) in enumerate(edges)
    )
    return StageGraph(
        stages=nodes,
        edges=values,
        inputs=tuple(InputRoute(n, TensorMeta((4, 128), "int64"), tuple(c)) for n, c in inputs),
        outputs=tuple(OutputRoute(n, TensorMeta((4, 10), "float32"), p) for n, p in outputs),
        loss=loss,
        name=name,
    )


CHAIN = make_graph(
    "GPT",
    [(0, ["embed", "h.0", "h.1", "h.2"]), (1, ["h.3", "h.4", "h.5"]), (2, ["h.6", "h.7"]), ("head", ["norm", "head"])],
    [("h", 0, [1]), ("h_1", 1, [2]), ("h_2", 2, [3])],
    inputs=[("tokens", (0,)), ("targets[0]", (3,))],
    loss=3,
)
UNET = make_graph(
    "UNet",
    [(0, ["enc0"]), (1, ["enc1"]), (2, ["middle"]), (1, ["dec1"]), (0, ["dec0", "head"])],
    [
        ("down0", 0, [1]),
        ("skip0", 0, [4]),
        ("down1", 1, [2]),
        ("skip1", 1, [3]),
        ("up1", 2, [3]),
        ("up0", 3, [4]),
    ],
    inputs=[("x", (0,))],
    outputs=[("output", 4)],
)
SKIP = make_graph(
    "Residual",
    [(0, ["a"]), (1, ["b"]), (2, ["c"]), (3, ["d"])],
    [("a", 0, [1, 3]), ("b", 1, [2]), ("c", 2, [3])],
    inputs=[("x", (0,))],
    outputs=[("output", 3)],
)
BRANCHES = make_graph(
    "Experts",
    [("trunk", ["stem"]), ("a", ["a"]), ("b", ["b"]), ("c", ["c"]), ("d", ["d"]), ("join", ["head"])],
    [("x", 0, [1, 2, 3, 4]), ("ya", 1, [5]), ("yb", 2, [5]), ("yc", 3, [5]), ("yd", 4, [5])],
    inputs=[("x", (0,))],
    outputs=[("output", 5)],
)
TRANSLATOR = make_graph(
    "Translator",
    [
        ("enc0", ["encoder.0", "encoder.1"]),
        ("enc1", ["encoder.2", "encoder.3"]),
        ("dec0", ["embed", "decoder.0"]),
        ("dec1", ["decoder.1"]),
        ("dec2", ["decoder.2", "head"]),
    ],
    [("h", 0, [1]), ("memory", 1, [2, 3, 4]), ("mask", 1, [2, 3, 4]), ("d", 2, [3]), ("d_1", 3, [4])],
    inputs=[("source", (0,)), ("target", (2,))],
    outputs=[("logits", 4)],
    constants=["mask"],
)
TOWERS = make_graph(
    "CLIP",
    [("image0", ["vision.0"]), ("image1", ["vision.1"]), ("text", ["text"]), ("loss", [])],
    [("v", 0, [1]), ("image", 1, [3]), ("text", 2, [3]), ("mask", 2, [3])],
    inputs=[("pixels", (0,)), ("tokens", (2,))],
    loss=3,
    constants=["mask"],
)
GRAPHS = {
    "chain": CHAIN,
    "unet": UNET,
    "skip": SKIP,
    "branches": BRANCHES,
    "translator": TRANSLATOR,
    "towers": TOWERS,
}


def make_timeline(
    name: str, ranks: int, microbatches: int, *, stages: int | None = None, costs: Costs | None = None
) -> Timeline:
    """Return the simulated step of a chain; more stages than ranks are dealt out in a loop."""
    graph = chain_graph(stages or ranks)
    placement = tuple(stage % ranks for stage in range(len(graph.stages)))
    return simulate_schedule(build_schedule(name, graph, placement, microbatches), graph, costs)


def timeline_of(schedule: Schedule) -> Timeline:
    """Return the simulated step of a given order, all stages of a rank together taking 1 for F, I and W."""
    graph = chain_graph(len(schedule.placement))
    share = schedule.ranks / len(schedule.placement)
    costs = uniform_costs(graph, forward=share, input_grad=share, weight_grad=share)
    return simulate_schedule(schedule, graph, costs)
