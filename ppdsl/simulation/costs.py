"""What computations and messages cost: seconds per stage, latency and bandwidth per edge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from ppdsl.graph.ir import Stage, StageGraph
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.timeline import Timeline
from ppdsl.units import Bytes, Seconds

__all__ = ["Costs", "flop_costs", "measured_costs", "stage_costs", "uniform_costs"]


@dataclass(frozen=True)
class Costs:
    """Seconds of every computation and message of a step.

    Attributes:
        forward: For each stage the seconds of F.
        backward: For each stage the seconds of B; 0 for a stage without backward.
        input_grad: For each stage the seconds of I.
        weight_grad: For each stage the seconds of W.
        latency: For each edge the seconds before its first byte arrives on another rank.
        bandwidth: For each edge bytes per second; `math.inf` when only latency counts.
        bytes: For each edge its size.
    """

    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    input_grad: tuple[Seconds, ...]
    weight_grad: tuple[Seconds, ...]
    latency: tuple[Seconds, ...]
    bandwidth: tuple[float, ...]
    bytes: tuple[Bytes, ...]

    def __post_init__(self) -> None:
        stages = {len(self.forward), len(self.backward), len(self.input_grad), len(self.weight_grad)}
        edges = {len(self.latency), len(self.bandwidth), len(self.bytes)}
        if len(stages) > 1 or len(edges) > 1:
            raise ValueError("costs need one number per stage in each kind, and one per edge in each kind")
        times = (*self.forward, *self.backward, *self.input_grad, *self.weight_grad, *self.latency)
        if not all(0 <= seconds < math.inf for seconds in times) or not all(rate > 0 for rate in self.bandwidth):
            raise ValueError("seconds must be finite and not negative, bandwidths above zero")

    def of(self, action: Action) -> Seconds:
        """Return the seconds that `action` takes."""
        match action.kind:
            case ActionKind.FORWARD:
                return self.forward[action.stage]
            case ActionKind.BACKWARD:
                return self.backward[action.stage]
            case ActionKind.INPUT_GRAD:
                return self.input_grad[action.stage]
            case ActionKind.WEIGHT_GRAD:
                return self.weight_grad[action.stage]
            case _:
                assert_never(action.kind)

    def transfer(self, edge: int) -> Seconds:
        """Return the seconds that a message of `edge` takes between two ranks, in either direction."""
        return Seconds(self.latency[edge] + self.bytes[edge] / self.bandwidth[edge])


def uniform_costs(
    graph: StageGraph,
    *,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    latency: float = 0.0,
) -> Costs:
    """Return the same costs for every stage, as papers assume them; B is I and W together.

    A stage without weights to train has no W, and its B costs what its I costs.

    Args:
        graph: The stages and edges.
        forward: Seconds of F.
        input_grad: Seconds of I.
        weight_grad: Seconds of W.
        latency: Seconds of each message between ranks.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> costs = uniform_costs(chain_graph(2), latency=0.5)
    >>> costs.forward, costs.backward, costs.transfer(0)
    ((1.0, 1.0), (2.0, 2.0), 0.5)
    """
    stages = [(forward, input_grad, weight_grad if stage.trainable else 0.0) for stage in graph.stages]
    return _costs(graph, stages, latency, math.inf)


def flop_costs(
    graph: StageGraph,
    *,
    flops_per_second: float = 100e12,
    overhead: float = 20e-6,
    latency: float = 10e-6,
    bandwidth: float = 50e9,
) -> Costs:
    """Return costs estimated from the operations of each stage's forward and the bytes of each edge.

    Input and weight gradients are taken to cost as much as the forward; a stage without trainable parameters has no
    weight gradient. An estimate to compare schedules with, not a promise of speed.

    Args:
        graph: The stages and edges.
        flops_per_second: Operations per second of one rank.
        overhead: Seconds that each computation takes even when it does nothing.
        latency: Seconds before a message's first byte arrives.
        bandwidth: Bytes per second between two ranks.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> costs = flop_costs(chain_graph(2, flops=10**9), flops_per_second=1e12, overhead=0)
    >>> costs.forward, costs.backward
    ((0.001, 0.001), (0.002, 0.002))
    """

    def seconds(stage: Stage) -> tuple[float, float, float]:
        work = stage.flops / flops_per_second
        return work + overhead, work + overhead, work if stage.trainable else 0.0

    return _costs(graph, [seconds(stage) for stage in graph.stages], latency, bandwidth)


def stage_costs(
    graph: StageGraph,
    forward: Mapping[int | str, float],
    *,
    input_grad: Mapping[int | str, float] | None = None,
    weight_grad: Mapping[int | str, float] | None = None,
    latency: float = 0.0,
    bandwidth: float = math.inf,
) -> Costs:
    """Return costs from the seconds of each stage, as a profile gives them.

    Args:
        graph: The stages and edges.
        forward: Seconds of F by stage key; visits of one stage cost the same.
        input_grad: Seconds of I; None, or a key left out: as F.
        weight_grad: Seconds of W; None, or a key left out: as F. A stage without weights to train has none.
        latency: Seconds before a message's first byte arrives.
        bandwidth: Bytes per second between two ranks.

    Raises:
        ValueError: A stage has no seconds of F, or seconds are given for a stage that there is not.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> stage_costs(chain_graph(2), {0: 3, 1: 1}, input_grad={0: 2}).backward
    (5.0, 2.0)
    """
    keys = {stage.key for stage in graph.stages}
    given = {"F": forward, "I": input_grad or {}, "W": weight_grad or {}}
    unknown = sorted({str(key) for table in given.values() for key in table if key not in keys})
    missing = sorted(str(key) for key in keys if key not in forward)
    if unknown or missing:
        wrong = [f"stage {key} is not in the graph" for key in unknown]
        wrong += [f"stage {key} has no seconds of F" for key in missing]
        raise ValueError("; ".join(wrong))

    def seconds(stage: Stage) -> tuple[float, float, float]:
        f = float(forward[stage.key])
        w = float(given["W"].get(stage.key, f)) if stage.trainable else 0.0
        return f, float(given["I"].get(stage.key, f)), w

    return _costs(graph, [seconds(stage) for stage in graph.stages], latency, bandwidth)


def measured_costs(timeline: Timeline, graph: StageGraph) -> Costs:
    """Return the mean seconds of each stage in a timeline; messages cost nothing.

    With these costs `simulate` tells how long a step would take if ranks never waited for the network, and for another
    schedule of the same backward kind how long it would take on this machine.

    Args:
        timeline: A measured step.
        graph: The stages and edges it ran.
    """
    total: dict[tuple[int, ActionKind], float] = {}
    count: dict[tuple[int, ActionKind], int] = {}
    for event in timeline.events:
        key = (event.action.stage, event.action.kind)
        total[key] = total.get(key, 0.0) + event.end - event.start
        count[key] = count.get(key, 0) + 1

    def mean(kind: ActionKind) -> tuple[Seconds, ...]:
        keys = [(stage.index, kind) for stage in graph.stages]
        return tuple(Seconds(total[key] / count[key]) if key in count else Seconds(0.0) for key in keys)

    return Costs(
        forward=mean(ActionKind.FORWARD),
        backward=mean(ActionKind.BACKWARD),
        input_grad=mean(ActionKind.INPUT_GRAD),
        weight_grad=mean(ActionKind.WEIGHT_GRAD),
        latency=(Seconds(0.0),) * len(graph.edges),
        bandwidth=(math.inf,) * len(graph.edges),
        bytes=tuple(edge.bytes for edge in graph.edges),
    )


def _costs(graph: StageGraph, stages: list[tuple[float, float, float]], latency: float, bandwidth: float) -> Costs:
    backward = [stage.has_backward for stage in graph.stages]
    pairs = list(zip(stages, backward, strict=True))
    return Costs(
        forward=tuple(Seconds(f) for f, _, _ in stages),
        backward=tuple(Seconds(i + w if has else 0.0) for (_, i, w), has in pairs),
        input_grad=tuple(Seconds(i if has else 0.0) for (_, i, _), has in pairs),
        weight_grad=tuple(Seconds(w if has else 0.0) for (_, _, w), has in pairs),
        latency=(Seconds(latency),) * len(graph.edges),
        bandwidth=(bandwidth,) * len(graph.edges),
        bytes=tuple(edge.bytes for edge in graph.edges),
    )
