"""Splits: the optimum against brute force, branches, memory, weights, and what the elements are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import SpecError
from ppdsl.graph.outline import ModelOutline
from ppdsl.spec.balance import Row, divide, whole_numbers
from ppdsl.spec.branches import Flow, branch_order, range_rule
from ppdsl.spec.resolve import resolve
from ppdsl.spec.split import PartReason
from tests.spec.outlines import Net, chain, towers
from tests.spec.reading import read

costs = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def divisions(size: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, size), parts - 1):
        yield (*inner, size)


def pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


def largest(row: Sequence[float], ends: Sequence[int]) -> float:
    return max(sum(row[a:b]) for a, b in pairs(ends))


def parts_of(text: str, outline: ModelOutline, seconds: dict[str, float] | None = None) -> list[PartReason]:
    return list(resolve(read(text), outline, seconds).reasons)


def names(text: str, outline: ModelOutline) -> list[list[str]]:
    return [list(part.elements) for part in parts_of(text, outline)]


# ---------------------------------------------------------------- the optimum


@given(row=costs, data=st.data())
def test_no_division_has_a_smaller_largest_part(row: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(row)))
    ends = divide(Row(tuple(row)), parts)
    assert ends in set(divisions(len(row), parts))
    assert largest(row, ends) == min(largest(row, other) for other in divisions(len(row), parts))


@given(row=st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=8), data=st.data())
def test_the_same_holds_for_seconds(row: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(row)))
    ends = divide(Row(whole_numbers(row)), parts)
    best = min(largest(row, other) for other in divisions(len(row), parts))
    assert largest(row, ends) == pytest.approx(best, rel=1e-12, abs=1e-12)


@given(row=costs, data=st.data())
def test_forbidden_ranges_and_limits_of_single_parts_are_kept(row: list[int], data: st.DataObject) -> None:
    size = len(row)
    parts = data.draw(st.integers(1, size))
    every = [(a, b) for a in range(size) for b in range(a + 2, size + 1)]
    forbidden = set(data.draw(st.lists(st.sampled_from(every), max_size=8))) if every else set()
    last = None
    if data.draw(st.booleans()):
        reach = st.lists(st.integers(1, 4), min_size=size, max_size=size)
        steps = [data.draw(reach) for _ in range(parts)]
        # A range that fits is one whose inner ranges fit: the end never moves back.
        last = tuple(tuple(max(0, *(min(size, i + r[i]) for i in range(s + 1))) for s in range(size)) for r in steps)

    def allowed(start: int, end: int) -> bool:
        return (start, end) not in forbidden

    def fits(ends: Sequence[int]) -> bool:
        return all(
            (b - a == 1 or allowed(a, b)) and (last is None or b <= last[part][a])
            for part, (a, b) in enumerate(pairs(ends))
        )

    possible = [ends for ends in divisions(size, parts) if fits(ends)]
    found = divide(Row(tuple(row), allowed, last), parts)
    if not possible:
        assert found is None
        return
    assert found in possible
    assert largest(row, found) == min(largest(row, ends) for ends in possible)


@pytest.mark.parametrize(
    ("row", "parts", "ends"),
    [
        ((1,) * 12, 4, (3, 6, 9, 12)),
        ((1,) * 10, 4, (2, 5, 7, 10)),
        ((9, 1, 1, 1, 1, 1), 3, (1, 3, 6)),
        ((0, 0, 0), 3, (1, 2, 3)),
    ],
)
def test_among_optimal_divisions_an_even_one_is_taken(row: tuple[int, ...], parts: int, ends: tuple[int, ...]) -> None:
    assert divide(Row(row), parts) == ends


@pytest.mark.parametrize("shape", ["equal", "one giant", "random"])
def test_two_thousand_elements_are_divided_into_64_parts(shape: str) -> None:
    row = [1000 + (at * 7919) % 997 if shape == "random" else 1000 for at in range(2000)]
    if shape == "one giant":
        row[700] = 500_000
    ends = divide(Row(tuple(row)), 64)
    assert len(ends) == 64


# ---------------------------------------------------------------- branches


def flow(*needs: Sequence[int]) -> Flow:
    return Flow(tuple(frozenset(some) for some in needs))


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    size = draw(st.integers(1, 8))
    return Flow(tuple(frozenset(draw(st.sets(st.integers(0, at - 1), max_size=2))) if at else frozenset()
                      for at in range(size)))  # fmt: skip


@given(flows())
def test_the_order_of_branches_is_topological(graph: Flow) -> None:
    order = branch_order(graph)
    place = {element: at for at, element in enumerate(order)}
    assert sorted(order) == list(range(len(graph.needs)))
    assert all(place[need] < place[element] for element, needs in enumerate(graph.needs) for need in needs)


@given(st.integers(1, 12))
def test_the_order_of_a_chain_with_skips_is_the_recorded_one(size: int) -> None:
    needs = [{at - 1, at // 2} - {at} if at else set() for at in range(size)]
    assert branch_order(flow(*needs)) == tuple(range(size))


def reach(needs: Sequence[frozenset[int] | set[int]]) -> list[set[int]]:
    found: list[set[int]] = []
    for own in needs:
        found.append(set().union(own, *(found[need] for need in own)))
    return found


@given(graph=flows(), data=st.data())
def test_an_allowed_range_makes_nothing_outside_wait_for_more(graph: Flow, data: st.DataObject) -> None:
    order = branch_order(graph)
    place = {element: at for at, element in enumerate(order)}
    ordered = Flow(tuple(frozenset(place[need] for need in graph.needs[element]) for element in order))
    size = len(order)
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    rule = range_rule(ordered, [1.0] * size, 1000)
    inside = set(range(start, end))
    before = reach(ordered.needs)
    waits = {at for at in range(size) if at not in inside and before[at] & inside}
    needed = set().union(*(before[at] for at in inside)) - inside
    right = all(inside <= before[at] for at in waits) and all(needed <= before[at] for at in inside)
    assert (rule is None or rule(start, end)) == right


@pytest.mark.parametrize("interleaved", [False, True])
def test_branches_that_run_beside_each_other_get_parts_of_their_own(interleaved: bool) -> None:
    found = names("split text[*], image[*] into 4 by flops as p[i]\nstage z { join }", towers(6, 6, interleaved))
    assert found == [
        ["text.0", "text.1", "text.2"],
        ["text.3", "text.4", "text.5"],
        ["image.0", "image.1", "image.2"],
        ["image.3", "image.4", "image.5"],
    ]


def test_a_short_branch_is_kept_apart_from_a_long_one() -> None:
    found = names("split text[*], image[*] into 4 by flops as p[i]\nstage z { join }", towers(3, 9))
    assert found[0] == ["text.0", "text.1", "text.2"]
    assert [len(part) for part in found] == [3, 3, 3, 3]


def test_an_element_that_costs_next_to_nothing_may_wait() -> None:
    net = Net("Seq2seq")
    x = -1
    for at in range(4):
        x = net.run(net.module(f"encoder.{at}", "Block", 4), *([x] if at else []), flops=100)
    y = net.run(net.module("embed", "Embedding", 4), flops=0)
    for at in range(4):
        y = net.run(net.module(f"decoder.{at}", "Block", 4), x, y, flops=100)
    found = names("split encoder[*], embed, decoder[*] into 4 by flops as p[i]", net.outline())
    assert [len(part) for part in found] == [2, 2, 3, 2]
    assert found[2] == ["embed", "decoder.0", "decoder.1"]


def test_when_branches_cannot_be_kept_apart_the_best_balance_is_taken_and_said() -> None:
    resolution = resolve(read("split text[*], image[*], join into 2 by count as p[i]"), towers())
    assert [len(part.elements) for part in resolution.reasons] == [3, 4]
    assert [warning.code for warning in resolution.warnings] == ["branches-joined"]


@given(graph=flows(), data=st.data())
def test_no_part_of_any_model_makes_another_wait_for_what_it_does_not_need(graph: Flow, data: st.DataObject) -> None:
    net = Net()
    made: list[int] = []
    for at, needs in enumerate(graph.needs):
        net.module(f"m.{at}", count=2)
        made.append(net.run(f"m.{at}", *(made[need] for need in sorted(needs)), flops=data.draw(st.integers(1, 9))))
    size = len(graph.needs)
    parts = data.draw(st.integers(1, size))
    resolution = resolve(read(f"split m.* into {parts} by flops as p[i]"), net.outline())
    found = [{int(name.split(".")[1]) for name in part.elements} for part in resolution.reasons]
    assert sorted(at for part in found for at in part) == list(range(size))
    if any(warning.code == "branches-joined" for warning in resolution.warnings):
        return
    before = reach(graph.needs)
    for part in found:
        for outside in set(range(size)) - part:
            assert not before[outside] & part or part <= before[outside]


@pytest.mark.parametrize(("size", "memory"), [(2000, ""), (2000, "memory = 100000B\n")])
def test_large_models_with_branches_are_divided(size: int, memory: str) -> None:
    outline = towers(size // 2, size // 2)
    parts = parts_of(f"{memory}split text[*], image[*] into 64 by flops as p[i]\nstage z {{ join }}", outline)
    assert len(parts) == 64
    assert max(len(part.elements) for part in parts) == 32


# ---------------------------------------------------------------- elements and costs


def test_several_selected_modules_are_the_elements() -> None:
    assert names("split transformer.h[*] into 2 by count as p[i]\nstage z { rest }", chain(4)) == [
        ["transformer.h.0", "transformer.h.1"],
        ["transformer.h.2", "transformer.h.3"],
    ]


def test_a_single_module_is_opened_down_to_what_calls_nothing() -> None:
    found = names("split transformer into 2 by count as p[i]\nstage z { lm_head }", chain(2))
    assert found == [
        ["transformer.wte", "transformer.h.0.attn", "transformer.h.0.mlp"],
        ["transformer.h.1.attn", "transformer.h.1.mlp", "transformer.ln_f"],
    ]


def test_nosplit_keeps_modules_whole() -> None:
    text = "nosplit type(Block)\nsplit ** into 3 by count as p[i]"
    assert names(text, chain(4)) == [
        ["transformer.wte", "transformer.h.0"],
        ["transformer.h.1", "transformer.h.2"],
        ["transformer.h.3", "transformer.ln_f", "lm_head"],
    ]


def test_what_other_stages_claim_is_no_element() -> None:
    text = "stage a { transformer.wte, transformer.h[0] }\nsplit rest into 2 by count as p[i]\nnosplit type(Block)"
    assert names(text, chain(3)) == [["transformer.h.1", "transformer.h.2"], ["transformer.ln_f", "lm_head"]]


def test_a_parameter_right_in_an_opened_module_is_an_element() -> None:
    net = Net()
    net.module("body", "Body")
    net.parameter("body.token", 6)
    for name in ("body.a", "body.b"):
        net.module(name, count=2)
    net.call("body", lambda: net.run("body.b", net.run("body.a", net.step(op="expand", parameters=("body.token",)))))
    parts = parts_of("split body into 2 by params as p[i]", net.outline())
    assert [part.elements for part in parts] == [("body.token",), ("body.a", "body.b")]
    assert [part.text for part in parts] == ["6 parameters, 60.0% of the split", "4 parameters, 40.0% of the split"]


def test_a_tied_parameter_counts_once_in_a_split() -> None:
    parts = parts_of("split ** into 4 by params as p[i]\nnosplit type(Block)", chain(1))
    assert [part.cost for part in parts] == [100, 12, 2, 0]


def test_a_weight_multiplies_the_cost() -> None:
    text = "split transformer.h[*] into 2 by flops as p[i]\nstage z { rest }\nweight transformer.h[0] = 3"
    assert [len(part) for part in names(text, chain(4))] == [1, 3]


def test_measured_seconds_balance_by_time() -> None:
    seconds = {"transformer.h.0": 0.5, "transformer.h.1": 0.1, "transformer.h.2.attn": 0.1, "transformer.h.2.mlp": 0.1}
    parts = parts_of("split transformer.h[*] into 2 by time as p[i]\nstage z { rest }", chain(3), seconds)
    assert [part.text for part in parts] == ["500 ms, 62.5% of the split", "300 ms, 37.5% of the split"]
    with pytest.raises(SpecError, match=r"say nothing of `transformer.h\[1\]`"):
        parts_of("split transformer.h[*] into 2 by time as p[i]\nstage z { rest }", chain(3), {"transformer.h.0": 1.0})


def test_a_module_that_is_called_twice_is_in_one_part() -> None:
    net = Net()
    for name in "abc":
        net.module(f"m.{name}", count=4)
    x = net.run("m.a", flops=4)
    x = net.run("m.b", x, flops=4)
    x = net.run("m.a", x, flops=4)
    net.run("m.c", x, flops=4)
    resolution = resolve(read("split m.* into 2 by flops as p[i]"), net.outline())
    assert resolution.assignment.steps == ("p[0]", "p[1]", "p[0]", "p[1]")


# ---------------------------------------------------------------- memory


def memory_of(parts: Sequence[PartReason], sizes: Callable[[str], int]) -> list[int]:
    return [sum(sizes(name) for name in part.elements) for part in parts]


@given(
    counts=st.lists(st.integers(1, 9), min_size=3, max_size=7),
    flops=st.lists(st.integers(1, 9), min_size=7, max_size=7),
    parts=st.integers(2, 4),
    limit=st.integers(30, 260),
    ranks=st.integers(1, 4),
)
def test_memory_is_kept_to_whenever_it_can_be(
    counts: list[int], flops: list[int], parts: int, limit: int, ranks: int
) -> None:
    size = len(counts)
    if parts > size:
        return
    outline = chain(size, flops=flops[:size], counts=counts)
    split = f"split transformer.h[*] into {parts} by flops as p[i] @ i % {ranks}"
    text = f"memory = {limit}B\n{split}\nstage z {{ rest }}"
    # Parameters and gradients: 4 bytes each; `mlp` has 8 parameters.
    needs = [8 * (count + 8) for count in counts]
    work = [2 * f + 1 for f in flops[:size]]

    def loads(ends: Sequence[int]) -> list[int]:
        found = [0] * ranks
        for part, (a, b) in enumerate(pairs(ends)):
            found[part % ranks] += sum(needs[a:b])
        return found

    possible = [ends for ends in divisions(size, parts) if max(loads(ends)) <= limit]
    try:
        found = parts_of(text, outline)
    except SpecError as error:
        split_errors = [
            f for f in error.diagnostics if f.code == "does-not-fit" and f.message.startswith("No division")
        ]
        assert bool(split_errors) == (not possible)
        return
    ends = []
    for part in found:
        ends.append((ends[-1] if ends else 0) + len(part.elements))
    assert tuple(ends) in possible
    assert largest(work, ends) == min(largest(work, other) for other in possible)


def test_what_other_stages_hold_on_a_rank_counts() -> None:
    text = (
        "memory = 1000B\nstage a @ 0 { transformer.wte, transformer.ln_f }\n"
        "split transformer.h[*] into 2 by flops as p[i] @ i\nstage z @ 2 { lm_head }"
    )
    parts = parts_of(text, chain(8))
    assert [len(part.elements) for part in parts] == [1, 7]
    assert memory_of(parts, lambda _: 96) == [96, 672]


# ---------------------------------------------------------------- what has no place of its own


def test_a_dropout_that_is_called_twice_is_no_element() -> None:
    net = Net()
    net.module("body", "Body")
    for name in "abc":
        net.module(f"body.{name}", count=4)
    net.module("body.drop", "Dropout")

    def body() -> int:
        x = net.run("body.drop", net.run("body.a", flops=4))
        return net.run("body.drop", net.run("body.c", net.run("body.b", x, flops=4), flops=4))

    net.call("body", body)
    resolution = resolve(read("split body into 3 by flops as p[i]"), net.outline())
    assert [part.elements for part in resolution.reasons] == [("body.a",), ("body.b",), ("body.c",)]
    assert resolution.assignment.steps == ("p[0]", None, "p[1]", "p[2]", None)
    assert not resolution.warnings


def test_parameters_of_a_module_that_is_never_called_are_beside_the_element_before() -> None:
    net = Net()
    for name in ("unused", "a", "spare", "b"):
        net.module(f"body.{name}", count=4)
    net.run("body.b", net.run("body.a", flops=4), flops=4)
    resolution = resolve(read("split body.* into 2 by count as p[i]"), net.outline())
    assert [part.elements for part in resolution.reasons] == [("body.a",), ("body.b",)]
    assert [(row.modules, row.parameters) for row in resolution.accounts] == [
        ("body.unused, body.a, body.spare", 12),
        ("body.b", 4),
    ]


def test_two_stars_select_parameters_right_in_the_model_too() -> None:
    net = Net()
    net.parameter("token", 3)
    for name in "ab":
        net.module(name, count=4)
    net.run("b", net.run("a", net.step(op="expand", parameters=("token",))))
    assert names("split ** into 2 by params as p[i]", net.outline()) == [["token", "a"], ["b"]]


def test_large_models_are_resolved() -> None:
    outline = chain(1000)
    parts = parts_of("split ** into 64 by flops as p[i]", outline)
    assert len(parts) == 64
