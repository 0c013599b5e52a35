"""Contracts: each measure on graphs whose figures are known, and the messages of broken ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.contracts import ContractReport, check_contracts, parameter_counts
from ppdsl.diagnostics import render_plain
from ppdsl.graph.ir import StageGraph, Tie
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan.lifetimes import peak_activations
from ppdsl.schedule.registry import build_schedule
from ppdsl.simulation.costs import uniform_costs
from ppdsl.source import Span
from ppdsl.spec.partition import Expectation, Measure, Partition
from ppdsl.units import Bytes, Flops
from tests.spec.outlines import chain

HERE = Span("net.ppspec", 7, 5, 7, 30)


def expect(what: str, op: str = "<=", bound: float = 0, stage: int | str | None = None, text: str = "") -> Expectation:
    return Expectation(Measure(what), stage, op, bound, (), text or f"expect {what} {op} {bound}", HERE)


def edges(*pairs: tuple[str, str]) -> Expectation:
    return Expectation(Measure.EDGES, None, "", 0, pairs, "expect edges", HERE)


def check(graph: StageGraph, *expectations: Expectation, **options: object) -> ContractReport:
    partition = Partition("net", "net.ppspec", expectations=expectations)
    placement = options.pop("placement", tuple(range(len(graph.stages))))
    return check_contracts(partition, graph, placement, **options)


def value(graph: StageGraph, what: str, stage: int | str | None = None, **options: object) -> float | None:
    return check(graph, expect(what, "<=", 10**12, stage), **options).measured[0].value


def heavy(graph: StageGraph, **changes: dict[int, object]) -> StageGraph:
    """Return the graph with fields of single stages changed: `flops={0: 5}`."""
    stages = [
        replace(stage, **{name: values[stage.index] for name, values in changes.items() if stage.index in values})
        for stage in graph.stages
    ]
    return replace(graph, stages=tuple(stages))


def scheduled(graph: StageGraph, microbatches: int = 4, name: str = "1f1b") -> dict[str, object]:
    placement = tuple(range(len(graph.stages)))
    return {"schedule": build_schedule(name, graph, placement, microbatches=microbatches)}


def test_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    graph = heavy(chain_graph(4), flops={0: Flops(3), 1: Flops(1), 2: Flops(1), 3: Flops(1)})
    assert value(graph, "imbalance") == 2.0
    assert value(graph, "imbalance", placement=(0, 1, 1, 1)) == 1.0
    assert value(graph, "imbalance", 1) == value(graph, "imbalance", 1, placement=(0, 1, 1, 1)) == pytest.approx(2 / 3)


def test_a_stage_without_backward_costs_a_third_of_one_with() -> None:
    graph = shape_graph(2, [(0, (1,))], frozen={0})
    assert value(graph, "imbalance") == pytest.approx(3 / 2)


def test_visits_of_one_stage_count_together() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], keys=("a", "b", "a"))
    assert value(graph, "imbalance", placement=(0, 1, 0)) == pytest.approx(4 / 3)
    assert value(graph, "stages") == 2


def test_a_graph_without_operations_is_balanced() -> None:
    assert value(chain_graph(3, flops=0), "imbalance") == 1.0


def test_the_bubble_is_that_of_the_simulated_step() -> None:
    graph = chain_graph(4)
    bubble = value(graph, "bubble", costs=uniform_costs(graph), **scheduled(graph, 12))
    assert bubble == pytest.approx(0.2)


def test_memory_is_parameters_gradients_and_activations() -> None:
    names = {at: (f"w{at}",) for at in range(3)}
    graph = heavy(
        chain_graph(3, bytes_per_edge=400),
        parameter_bytes={0: Bytes(1000), 1: Bytes(10), 2: Bytes(20)},
        parameters=names,
    )
    options = scheduled(graph)
    peaks = peak_activations(options["schedule"], graph)
    assert value(graph, "memory", 0, **options) == 2000 + 3 * 400
    assert value(graph, "memory", **options) == max(2000 + peaks[0].bytes, 20 + peaks[1].bytes, 40 + peaks[2].bytes)
    assert value(graph, "memory", 1) == 20


def test_a_frozen_stage_has_no_gradients() -> None:
    graph = heavy(shape_graph(2, [(0, (1,))], frozen={0}), parameter_bytes={0: Bytes(100)}, parameters={0: ("w",)})
    assert value(graph, "memory", 0) == 100


def test_two_visits_hold_the_same_parameters_once() -> None:
    shape = shape_graph(3, [(0, (1,)), (1, (2,))], keys=("a", "b", "a"))
    same = heavy(shape, parameter_bytes={0: Bytes(8), 2: Bytes(8)}, parameters={0: ("w",), 2: ("w",)})
    other = heavy(shape, parameter_bytes={0: Bytes(8), 2: Bytes(8)}, parameters={0: ("w",), 2: ("v",)})
    assert (value(same, "memory", "a"), value(other, "memory", "a")) == (16, 32)


def test_a_tied_parameter_counts_once_in_the_whole() -> None:
    graph = heavy(chain_graph(2), parameters={0: ("transformer.wte.weight",), 1: ("lm_head.weight",)})
    graph = replace(graph, ties=(Tie(("transformer.wte.weight", "lm_head.weight"), (0, 1)),))
    counts = parameter_counts(chain(1))
    assert [value(graph, "params", key, counts=counts) for key in (None, 0, 1)] == [100, 100, 100]


def test_counts_of_stages_ranks_messages_and_operations() -> None:
    graph = chain_graph(4, flops=5)
    options = {"placement": (0, 1, 0, 1), "schedule": build_schedule("1f1b", graph, (0, 1, 0, 1), microbatches=2)}
    found = [value(graph, what, **dict(options)) for what in ("stages", "ranks", "flops", "messages")]
    assert found == [4, 2, 20, 3 * 2 * 2]
    assert value(graph, "messages", 0, **dict(options)) == 2 * 2


def test_edges_are_exactly_those_between_the_named_stages() -> None:
    graph = shape_graph(4, [(0, (1, 2)), (1, (3,)), (2, (3,))], keys=("a", "b", "c", "d"))
    fine = edges(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    assert check(graph, fine).findings == ()
    assert check(graph, edges(("a", "b"), ("b", "d"))).findings == ()
    report = check(graph, edges(("a", "b"), ("b", "c"), ("c", "d")))
    assert report.findings[0].message == (
        "`expect edges` is broken: there is no edge b -> c, and there is also a -> c, b -> d."
    )
    assert report.measured[0].text == "a -> b, a -> c, b -> d, c -> d"


def test_messages_of_broken_contracts() -> None:
    graph = heavy(chain_graph(2), flops={0: Flops(3), 1: Flops(1)}, parameter_bytes={1: Bytes(2**30)},
                  parameters={1: ("w",)})  # fmt: skip
    report = check(
        graph,
        expect("imbalance", "<=", 1.1),
        expect("memory", "<=", 2**30, 1, "expect memory(1) <= 1GiB"),
        expect("bubble", "<", 0.12, None, "expect bubble < 12%"),
        expect("params", "<=", 9),
        expect("stages", "==", 2),
        expect("flops", "<=", 10, 7),
        **scheduled(graph),
        costs=uniform_costs(graph),
    )
    assert [measured.ok for measured in report.measured] == [False, False, False, False, True, False]
    assert render_plain(report.findings).splitlines() == [
        "error[broken-contract]: `expect imbalance <= 1.1` is broken: imbalance is 1.5, more than 1.1.",
        " --> net.ppspec:7:5 measured: 1.5",
        "",
        "error[broken-contract]: `expect memory(1) <= 1GiB` is broken: memory of stage `1` is 2 GiB, more than 1 GiB.",
        " --> net.ppspec:7:5 measured: 2 GiB",
        "",
        "error[broken-contract]: `expect bubble < 12%` is broken: bubble is 20.0%, not less than 12.0%.",
        " --> net.ppspec:7:5 measured: 20.0%",
        "",
        "error[not-measurable]: `expect params <= 9` cannot be measured without the model.",
        " --> net.ppspec:7:5",
        "",
        "error[unknown-stage]: `expect flops <= 10` speaks of stage `7`, which there is not.",
        " --> net.ppspec:7:5",
        "help: one of: 0, 1",
    ]


def test_rounding_does_not_hide_what_is_wrong() -> None:
    graph = heavy(chain_graph(2), flops={0: Flops(1_000_001), 1: Flops(0)})
    message = check(graph, expect("flops", "<=", 1_000_000)).findings[0].message
    assert "is 1 MFLOP (1000001), more than 1 MFLOP (1000000)." in message


@given(op=st.sampled_from(["<=", "<", ">=", ">", "==", "!="]), bound=st.integers(1, 5))
def test_a_contract_holds_just_when_its_comparison_does(op: str, bound: int) -> None:
    report = check(chain_graph(3), expect("stages", op, bound))
    # The six comparisons by name, apart from the table under test.
    truth = {"<=": bound >= 3, "<": bound > 3, ">=": bound <= 3, ">": bound < 3, "==": bound == 3, "!=": bound != 3}
    assert report.measured[0].ok == truth[op]
    assert bool(report.findings) != truth[op]


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_imbalance_lies_between_one_and_the_number_of_stages(weights: list[int]) -> None:
    graph = heavy(chain_graph(len(weights)), flops={at: Flops(weight) for at, weight in enumerate(weights)})
    figure = value(graph, "imbalance")
    assert 1 - 1e-12 <= figure <= len(weights)
    shares = [value(graph, "imbalance", at) for at in range(len(weights))]
    assert math.isclose(max(shares), figure) and math.isclose(sum(shares), len(weights))
