"""What each contract measures, and how.

- `imbalance`: the work of the busiest rank over the mean of all ranks with a stage: small stages (an embedding) that
  share a rank with others do not make a plan unbalanced. Of a stage: its work over the mean of all stages. The work is
  the operations of a forward and a backward of all visits: the backward counts twice the forward, once when nothing in
  the stage is trained, and not at all for a stage without backward.
- `bubble`: the share of all ranks' time in which they wait, simulated with costs from the operations and edges (the
  default rates of `flop_costs`) unless other costs are given.
- `memory`: bytes of parameters, of their gradients, and the most activations that the schedule keeps at once. Of a
  stage: its own; of the whole plan: those of the fullest rank. Activations are the values that enter and leave stages;
  what a stage keeps inside for its backward is not known before it runs. Without a schedule activations do not count.
- `params`, `flops`: numbers in the parameters (a parameter of several stages once in the whole), and operations of a
  forward on one micro-batch.
- `stages`, `ranks`: stages with different keys, ranks with a stage.
- `messages`: sent between ranks in one step; of a stage: those it sends or receives.
- `edges`: which of the named stages send to which, values of all kinds together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ppdsl.graph.ir import Stage, StageGraph
from ppdsl.plan.lifetimes import peak_activations, state_bytes
from ppdsl.plan.lowering import lower
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import Costs, flop_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.spec.partition import Measure

__all__ = ["Subject", "edges_between", "measure", "state_of"]

Key = int | str


@dataclass(frozen=True)
class Subject:
    """What contracts are measured on.

    Attributes:
        graph: The stages and edges.
        placement: For each stage its rank.
        schedule: Computations for each rank, or None.
        counts: Numbers in each parameter by every name, or None.
        costs: Seconds to simulate with; None: from the operations.
    """

    graph: StageGraph
    placement: tuple[int, ...]
    schedule: Schedule | None = None
    counts: Mapping[str, int] | None = None
    costs: Costs | None = None

    def visits(self, key: Key | None) -> tuple[Stage, ...]:
        """Return the visits of one stage, or all."""
        return tuple(stage for stage in self.graph.stages if key is None or stage.key == key)


def measure(what: Measure, key: Key | None, subject: Subject) -> float | None:
    """Return the measured value, or None when what it needs is not known.

    Args:
        what: The measure; not `EDGES`.
        key: The stage it is of, or None for the whole plan.
        subject: What it is measured on.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> measure(Measure.IMBALANCE, None, Subject(chain_graph(4), (0, 1, 2, 3)))
    1.0
    """
    return _MEASURES[what](key, subject)


def edges_between(keys: Sequence[Key], graph: StageGraph) -> tuple[tuple[Key, Key], ...]:
    """Return which of the stages send values to which, in the order of the graph."""
    pairs = (
        (graph.stages[edge.producer].key, graph.stages[consumer].key)
        for edge in graph.edges
        for consumer in edge.consumers
    )
    return tuple(dict.fromkeys((a, b) for a, b in pairs if a in keys and b in keys and a != b))


def _imbalance(key: Key | None, subject: Subject) -> float:
    work: dict[Key, float] = {}
    for stage in subject.graph.stages:
        home = subject.placement[stage.index] if key is None else stage.key
        work[home] = work.get(home, 0.0) + stage.flops * (1 + _backward(stage))
    mean = sum(work.values()) / max(1, len(work))
    largest = max(work.values(), default=0.0) if key is None else work.get(key, 0.0)
    return largest / mean if mean else 1.0


def _backward(stage: Stage) -> int:
    return 0 if not stage.has_backward else 2 if stage.trainable else 1


def _bubble(_key: Key | None, subject: Subject) -> float | None:
    if subject.schedule is None:
        return None
    return simulate_schedule(subject.schedule, subject.graph, subject.costs or flop_costs(subject.graph)).bubble


def _memory(key: Key | None, subject: Subject) -> float:
    if key is not None:
        return state_of(subject.visits(key)) + _stage_activations(key, subject)
    ranks: dict[int, list[Stage]] = {}
    for stage in subject.graph.stages:
        ranks.setdefault(subject.placement[stage.index], []).append(stage)
    peaks = peak_activations(subject.schedule, subject.graph) if subject.schedule is not None else ()
    held = {peak.rank: peak.bytes for peak in peaks}
    return max((state_of(stages) + held.get(rank, 0) for rank, stages in ranks.items()), default=0)


def state_of(stages: Sequence[Stage]) -> int:
    """Return the bytes of parameters and gradients; what an earlier visit of a stage holds is held once."""
    total = 0
    seen: dict[Key, set[str]] = {}
    for stage in stages:
        known = seen.setdefault(stage.key, set())
        if not stage.parameters or not known.issuperset(stage.parameters):
            total += stage.parameter_bytes * (2 if stage.trainable and stage.has_backward else 1)
        known.update(stage.parameters)
    return total


def _stage_activations(key: Key, subject: Subject) -> int:
    """Return the most bytes of states of one stage, all its visits together."""
    schedule = subject.schedule
    if schedule is None:
        return 0
    sizes = state_bytes(schedule.placement, subject.graph)
    own = {stage.index for stage in subject.visits(key)}
    most = 0
    for row in schedule.rows:
        last = {(a.stage, a.microbatch): at for at, a in enumerate(row) if a.stage in own}
        now = 0
        for at, action in enumerate(row):
            if action.stage not in own:
                continue
            if action.kind is ActionKind.FORWARD:
                now += sizes[action.stage]
                most = max(most, now)
            if last[action.stage, action.microbatch] == at:
                now -= sizes[action.stage]
    return most


def _parameters(key: Key | None, subject: Subject) -> float | None:
    if subject.counts is None:
        return None
    first = {name: tie.names[0] for tie in subject.graph.ties for name in tie.names}
    names = {first.get(name, name) for stage in subject.visits(key) for name in stage.parameters}
    return None if any(name not in subject.counts for name in names) else sum(subject.counts[n] for n in names)


def _messages(key: Key | None, subject: Subject) -> float | None:
    if subject.schedule is None:
        return None
    own = {stage.index for stage in subject.visits(key)}
    edges = subject.graph.edges
    messages = lower(subject.schedule, subject.graph).messages
    return sum(edges[message.edge].producer in own or message.consumer in own for message in messages)


_MEASURES: Mapping[Measure, Callable[[Key | None, Subject], float | None]] = {
    Measure.IMBALANCE: _imbalance,
    Measure.BUBBLE: _bubble,
    Measure.MEMORY: _memory,
    Measure.PARAMS: _parameters,
    Measure.FLOPS: lambda key, subject: sum(stage.flops for stage in subject.visits(key)),
    Measure.STAGES: lambda key, subject: len({stage.key for stage in subject.visits(key)}),
    Measure.RANKS: lambda key, subject: len({subject.placement[stage.index] for stage in subject.visits(key)}),
    Measure.MESSAGES: _messages,
}
