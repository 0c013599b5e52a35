"""Numbers of a timeline: how long, how much waiting, how much memory, how far from the best."""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.plan.lifetimes import Peak, peak_activations
from ppdsl.plan.messages import MessagePlan
from ppdsl.plan.verify import Planned
from ppdsl.schedule.action import ActionKind
from ppdsl.simulation.bounds import Bounds, lower_bounds
from ppdsl.simulation.costs import Costs, measured_costs, uniform_costs
from ppdsl.simulation.simulator import period, simulate
from ppdsl.timeline import Timeline
from ppdsl.units import Bytes, Seconds

__all__ = ["Metrics", "bubble_fraction", "metrics"]


@dataclass(frozen=True)
class Metrics:
    """What one step of a plan costs.

    Published numbers mix two bubbles. `bubble` counts all waiting of a step that every rank starts and ends together;
    `span_idle` counts only the waiting between a rank's own first and last action, which is what remains when steps
    follow each other without a barrier.

    Attributes:
        makespan: Seconds from the first start to the last end.
        bubble: Share of all ranks' time in which they wait, from 0 to 1.
        spans: For each rank the seconds from its first start to its last end.
        span_idle: For each rank the seconds it waits within its span.
        peaks: For each rank the most activations it holds, each from its F to its last use.
        peaks_until_input_grad: The same, as if I freed them, which is how some papers count.
        period: Seconds from one step to the next when steps follow each other without a barrier.
        period_bubble: Share of all ranks' time in which they then wait, from 0 to 1.
        messages: Number of messages between ranks.
        message_bytes: Their size together.
        bounds: What no order of the same computations on the same ranks can beat.
    """

    makespan: Seconds
    bubble: float
    spans: tuple[Seconds, ...]
    span_idle: tuple[Seconds, ...]
    peaks: tuple[Peak, ...]
    peaks_until_input_grad: tuple[Peak, ...]
    period: Seconds
    period_bubble: float
    messages: int
    message_bytes: Bytes
    bounds: Bounds

    @property
    def percent_of_optimal(self) -> float:
        """The best lower bound in per cent of the makespan; 100 means that no order is faster."""
        return 100.0 if not self.makespan else 100.0 * self.bounds.best / self.makespan


def metrics(planned: Planned | MessagePlan, timeline: Timeline | None = None, costs: Costs | None = None) -> Metrics:
    """Return the numbers of one step.

    Args:
        planned: A pipeline, or a plan.
        timeline: A predicted or measured step of it; None: simulated with `costs`.
        costs: What the bounds are computed with; None: what a measured timeline shows, else forward 1, backward 2,
            messages free.

    >>> from ppdsl.graph.shapes import chain_graph
    >>> from ppdsl.plan.lowering import lower
    >>> from ppdsl.schedule.registry import build_schedule
    >>> graph = chain_graph(4)
    >>> numbers = metrics(lower(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=8), graph))
    >>> numbers.makespan, numbers.percent_of_optimal, numbers.messages, [peak.count for peak in numbers.peaks]
    (33.0, 100.0, 48, [4, 3, 2, 1])
    """
    plan = planned if isinstance(planned, MessagePlan) else planned.plan
    if costs is None:
        measured = timeline is not None and timeline.measured
        costs = measured_costs(timeline, plan.graph) if timeline is not None and measured else uniform_costs(plan.graph)
    timeline = timeline or simulate(plan, costs)
    spans = timeline.spans
    between = period(plan.schedule, plan.graph, costs)
    work = sum(float(costs.of(action)) for row in plan.schedule.rows for action in row)
    sent = [message.bytes for message in plan.messages]
    return Metrics(
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        spans=spans,
        span_idle=tuple(Seconds(span - busy) for span, busy in zip(spans, timeline.busy, strict=True)),
        peaks=peak_activations(plan.schedule, plan.graph),
        peaks_until_input_grad=peak_activations(plan.schedule, plan.graph, until=ActionKind.INPUT_GRAD),
        period=between,
        period_bubble=1.0 - work / (between * plan.schedule.ranks) if between else 0.0,
        messages=len(sent),
        message_bytes=Bytes(sum(sent)),
        bounds=lower_bounds(plan.schedule, plan.graph, costs),
    )


def bubble_fraction(depth: int, microbatches: int) -> float:
    """Return the bubble of GPipe and 1F1B for equal stages, one on each rank, and free messages.

    A chain of `D` stages is `(D - 1)` of `(m + D - 1)` slots idle.

    Args:
        depth: `D`, at least 1.
        microbatches: `m`, at least 1.

    Raises:
        ValueError: An argument is below 1.

    Source:
        Huang et al. 2019, arXiv:1811.06965, section 2.3.

    >>> bubble_fraction(depth=4, microbatches=12)
    0.2
    """
    if depth < 1 or microbatches < 1:
        raise ValueError(f"depth {depth} and micro-batches {microbatches} must be at least 1")
    return (depth - 1) / (microbatches + depth - 1)
