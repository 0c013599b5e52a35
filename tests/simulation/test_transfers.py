"""Messages in time: one for each value and gradient between ranks, from its maker's end to its arrival."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan.lowering import lower
from ppdsl.schedule.registry import build_schedule
from ppdsl.simulation.costs import uniform_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.simulation.transfers import transfers

DIAMOND = shape_graph(4, [(0, (1, 2, 3)), (1, (3,)), (2, (3,))])


@given(st.sampled_from(["1f1b", "gpipe", "zero_bubble(h1)", "forward_only"]), st.integers(1, 6), st.floats(0, 3))
def test_messages_are_those_of_the_plan_and_arrive_before_their_use(name: str, count: int, latency: float) -> None:
    for graph in (chain_graph(4), DIAMOND):
        schedule = build_schedule(name, graph, range(4), count)
        costs = uniform_costs(graph, latency=latency)
        timeline = simulate_schedule(schedule, graph, costs)
        found = transfers(timeline, graph, costs)
        events = {event.action: event for event in timeline.events}
        assert Counter((t.source, t.target, t.made.microbatch) for t in found) == Counter(
            (message.source, message.target, message.microbatch) for message in lower(schedule, graph).messages
        )
        for t in found:
            assert (events[t.made].rank, events[t.used].rank) == (t.source, t.target)
            assert t.start == events[t.made].end
            assert t.end == t.start + latency
            assert t.end <= events[t.used].start + 1e-9


def test_values_that_stay_on_a_rank_are_no_messages() -> None:
    graph = chain_graph(4)
    schedule = build_schedule("zbv", graph, (0, 1, 1, 0), 3)
    timeline = simulate_schedule(schedule, graph)
    assert {(t.made.stage, t.used.stage) for t in transfers(timeline, graph, uniform_costs(graph))} == {
        (0, 1), (2, 3), (1, 0), (3, 2),
    }  # fmt: skip
