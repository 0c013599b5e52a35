"""The closed forms of makespan, memory and messages hold in their ranges, and stop where they are said to stop."""

from __future__ import annotations

from itertools import product

import pytest

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule import Schedule
from ppdsl.simulation import simulate_schedule, uniform_costs
from tests.schedule.sizes import live_peaks, on_chain, paired_times

SIZES = [(p, p * groups) for p in range(1, 17) for groups in (1, 2, 4) if p * groups <= 32]
SMALL = [(p, p * groups) for p in (2, 4, 8) for groups in (1, 2, 4)]
COSTS = list(product((1, 2, 3, 4), repeat=3))


def makespan(schedule: Schedule, graph: StageGraph, f: int = 1, i: int = 1, w: int = 1, c: float = 0) -> float:
    costs = uniform_costs(graph, forward=f, input_grad=i, weight_grad=w, latency=c)
    return simulate_schedule(schedule, graph, costs).makespan


def idle(schedule: Schedule, graph: StageGraph, f: int = 1, i: int = 1, w: int = 1) -> float:
    timeline = simulate_schedule(schedule, graph, uniform_costs(graph, forward=f, input_grad=i, weight_grad=w))
    return max(span - busy for span, busy in zip(timeline.spans, timeline.busy, strict=True))


@pytest.mark.parametrize(("name", "reach"), [("gpipe", None), ("1f1b", 1), ("eager_1f1b", 2)])
def test_one_stage_a_rank_with_full_backwards(name: str, reach: int | None) -> None:
    for p, m in SIZES:
        schedule, graph = on_chain(name, p, m)
        assert makespan(schedule, graph, 2, 3, 1) == (m + p - 1) * 6
        held = [m if reach is None else min(m, reach * (p - 1 - rank) + 1) for rank in range(p)]
        assert live_peaks(schedule, until="W") == held


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_loops_with_full_backwards(v: int) -> None:
    for p, m in SIZES:
        interleaved, graph = on_chain("interleaved_1f1b", p, m, v)
        assert makespan(interleaved, graph, 2, 3, 1) == (v * m + p - 1) * 6
        held = [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
        assert live_peaks(interleaved, until="W") == held
        for backward in ("lifo", "fifo"):
            looped, _ = on_chain(f"looped_bfs({backward})", p, m, v)
            assert makespan(looped, graph, 2, 3, 1) == (v * m + p - 1) * 6
            assert live_peaks(looped, until="W") == [m * v] * p


def test_zero_bubble_with_one_stage_a_rank() -> None:
    for p, m in SIZES:
        h1, graph = on_chain("zero_bubble(h1)", p, m)
        assert makespan(h1, graph) == 3 * m + p - 1
        assert makespan(h1, graph, 3, 4, 2) == m * 9 + (p - 1) * 5
        assert live_peaks(h1, until="W") == [p] * p
        if m >= 2 * p - 1:
            h2, _ = on_chain("zero_bubble(h2)", p, m)
            assert (makespan(h2, graph), idle(h2, graph)) == (3 * m + p - 1, 0)
            assert live_peaks(h2, until="W") == [2 * p - 1] * p


@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_zero_bubble(v: int) -> None:
    for p, m in SIZES:
        schedule, graph = on_chain("interleaved_zero_bubble", p, m, v)
        assert makespan(schedule, graph) == 3 * m * v + p - 1
        assert live_peaks(schedule, until="W") == [p * v] * p


def test_vs() -> None:
    for p, m in SIZES:
        zbv, graph = on_chain("zbv", p, m)
        assert max(live_peaks(zbv, until="W")) <= 2 * p
        if m >= 2 * p - 1:
            assert (makespan(zbv, graph), idle(zbv, graph)) == (6 * m + p - 1, 0)
        if m >= 2 * p:
            dual, _ = on_chain("dualpipev", p, m)
            assert max(paired_times(dual, graph).idle) == (p - 1) * (3 + 2 - 3)
            assert max(live_peaks(dual, until="W")) == 2 * p + 1


def test_v_half_and_v_min_stay_within_their_memory_for_any_size() -> None:
    for p, m in [*SIZES, *((p, m) for p in range(1, 9) for m in range(1, 12))]:
        half, _ = on_chain("v_half", p, m)
        assert max(live_peaks(half, until="W")) <= 2 * ((p + 2) // 2)
        least, _ = on_chain("v_min", p, m)
        assert max(live_peaks(least, until="W")) <= 2 * ((p + 4) // 3)


@pytest.mark.parametrize(("p", "half", "least"), [(4, 5, 11), (8, 17, 27), (16, 41, 59)])
def test_what_v_half_and_v_min_wait(p: int, half: int, least: int) -> None:
    assert idle(*on_chain("v_half", p, 2 * p)) == half
    assert idle(*on_chain("v_min", p, 2 * p)) == least


def test_messages_between_ranks() -> None:
    for name, v, messages in [("1f1b", 1, 48), ("interleaved_1f1b", 2, 112), ("looped_bfs", 4, 240), ("zbv", 2, 96)]:
        schedule, _ = on_chain(name, 4, 8, v)
        crossing = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
        assert 2 * 8 * crossing == messages


def test_gpipe_1f1b_and_loops_are_exact_for_all_times() -> None:
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2)):
        for p, m in SMALL:
            schedule, graph = on_chain(name, p, m, v)
            for f, i, w in COSTS[::7]:
                assert makespan(schedule, graph, f, i, w) == (v * m + p - 1) * (f + i + w)


def test_zb_h1_is_exact_while_weight_gradients_are_no_longer_than_forwards() -> None:
    exact = 0
    for p, m in SMALL:
        schedule, graph = on_chain("zero_bubble(h1)", p, m)
        for f, i, w in COSTS:
            # The formula is about the longest span of a rank; with W > I the last rank ends after the first one.
            holds = idle(schedule, graph, f, i, w) == (p - 1) * (f + i - w)
            assert holds == (w <= f)
            exact += holds
            if w <= min(f, i):
                assert makespan(schedule, graph, f, i, w) == m * (f + i + w) + (p - 1) * (f + i - w)
    assert exact == 360


def test_zb_h2_never_beats_its_formula_and_meets_it_in_300_of_384_cases() -> None:
    exact = 0
    for p, m in SMALL:
        if m >= 2 * p - 1:
            schedule, graph = on_chain("zero_bubble(h2)", p, m)
            for f, i, w in COSTS:
                waits, wanted = idle(schedule, graph, f, i, w), max(0, (p - 1) * (f + i - 2 * w))
                assert waits >= wanted
                assert waits == wanted or not (w <= f or f >= i)
                exact += waits == wanted
    assert exact == 300


def test_zb_v_waits_for_almost_all_unequal_times() -> None:
    equal = unequal = 0
    for p, m in SMALL:
        if m >= 2 * p - 1:
            schedule, graph = on_chain("zbv", p, m)
            for f, i, w in COSTS:
                never = idle(schedule, graph, f, i, w) == 0
                equal += never and f == i == w
                unequal += never and not f == i == w
    assert (equal, unequal) == (24, 18)


def test_dualpipev_is_exact_while_f_is_i_and_w_is_no_longer() -> None:
    for p, m in SMALL:
        if m >= 2 * p:
            schedule, graph = on_chain("dualpipev", p, m)
            for f, i, w in COSTS:
                if f == i >= w:
                    assert max(paired_times(schedule, graph, f=f, i=i, w=w).idle) == (p - 1) * (f + 2 * i - w)


def test_latency_is_hidden_by_eager_1f1b_and_paid_by_1f1b() -> None:
    for p, m in SMALL:
        eager, graph = on_chain("eager_1f1b", p, m)
        assert makespan(eager, graph, 10, 10, 10, 2) == (m + p - 1) * 30 + 4 * (p - 1)
        usual, _ = on_chain("1f1b", p, m)
        assert makespan(usual, graph, 10, 10, 10, 2) == (m + p - 1) * 30 + 4 * (p - 1) * (1 + m // p) - 4
    h1, graph = on_chain("zero_bubble(h1)", 8, 32)
    eager, _ = on_chain("eager_1f1b", 8, 32)
    assert makespan(h1, graph, 10, 10, 10, 5) == 1170
    assert makespan(eager, graph, 10, 10, 10, 5) == 1240
