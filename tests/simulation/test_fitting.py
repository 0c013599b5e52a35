"""Costs that are fitted to a measured step: what was put into a step is found again in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule.registry import build_schedule
from ppdsl.simulation.costs import uniform_costs
from ppdsl.simulation.fitting import fitted_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.timeline import Timeline
from ppdsl.units import Seconds

FAMILIES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("interleaved_zero_bubble", 2)]


@given(
    family=st.sampled_from(FAMILIES),
    ranks=st.integers(2, 4),
    microbatches=st.integers(1, 9),
    seconds=st.tuples(*[st.floats(0.5, 2)] * 3),
    latency=st.floats(0, 1),
)
def test_a_step_that_was_simulated_is_explained_to_its_length(
    family: tuple[str, int], ranks: int, microbatches: int, seconds: tuple[float, float, float], latency: float
) -> None:
    name, each = family
    graph = chain_graph(ranks * each)
    placement = (*range(ranks), *reversed(range(ranks))) if name == "zbv" else tuple(range(ranks)) * each
    schedule = build_schedule(name, graph, placement, microbatches=microbatches)
    forward, inputs, weights = seconds
    costs = uniform_costs(graph, forward=forward, input_grad=inputs, weight_grad=weights, latency=latency)
    seen = simulate_schedule(schedule, graph, costs)
    again = simulate_schedule(schedule, graph, fitted_costs(seen, graph))
    assert again.makespan == pytest.approx(seen.makespan, rel=1e-9)


def test_the_time_between_two_computations_belongs_to_the_later_one() -> None:
    graph = chain_graph(2)
    schedule = build_schedule("gpipe", graph, (0, 0), microbatches=3)
    plain = simulate_schedule(schedule, graph, uniform_costs(graph))
    slow = tuple(
        replace(event, start=Seconds(event.start + number * 0.25), end=Seconds(event.end + number * 0.25))
        for number, event in enumerate(plain.events)
    )
    costs = fitted_costs(Timeline(slow, 1, measured=True), graph)
    assert (costs.forward, costs.backward) == ((1.25, 1.25), (2.25, 2.25))


def test_a_message_that_is_waited_for_once_shows_its_time() -> None:
    graph = chain_graph(2)
    schedule = build_schedule("gpipe", graph, (0, 1), microbatches=2)
    costs = replace(uniform_costs(graph, forward=1, latency=0.125), forward=(Seconds(1.0), Seconds(3.0)))
    seen = simulate_schedule(schedule, graph, costs)
    assert fitted_costs(seen, graph).latency == (0.125,)
