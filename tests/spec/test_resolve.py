"""Claims, calls, cuts, replicas and ranks: which stage each step and call is given to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import SpecError
from ppdsl.graph.outline import ModelOutline
from ppdsl.spec.resolve import Resolution, resolve
from tests.spec.outlines import Net, chain
from tests.spec.reading import read
from tests.spec.resolve_cases import MODELS


def keys_by_call(resolution: Resolution, outline: ModelOutline) -> dict[str, list[int | str | None]]:
    found: dict[str, list[int | str | None]] = {}
    for call in outline.calls:
        found.setdefault(call.module, []).append(resolution.assignment.calls[call.index])
    return found


def stages_of(text: str, outline: ModelOutline) -> dict[str, list[int | str | None]]:
    return keys_by_call(resolve(read(text), outline), outline)


def shared(owner: str = "") -> ModelOutline:
    """`left` and `right` each call `table`, which is their child under two names (and `table` at the top)."""
    net = Net("Shared")
    for name in ("left", "right"):
        net.module(name, "Tower")
        net.module(f"{name}.linear", count=4)
    net.module("table", "Table", aliases=("left.table", "right.table"))
    x = net.call("left", lambda: net.run("left.linear", net.run("table")))
    net.call("right", lambda: net.run("right.linear", net.run("table"), x))
    return net.outline()


def test_a_claim_covers_what_is_inside() -> None:
    found = stages_of("stage a { transformer }\nstage b { lm_head }", chain(2))
    assert {found[name][0] for name in found if name.startswith("transformer")} == {"a"}
    assert found["lm_head"] == ["b"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_deeper_claim_wins(order: str) -> None:
    lines = {"a": "stage a { transformer }", "b": "stage b { transformer.h[1].mlp }"}
    text = "\n".join(lines[key] for key in order) + "\nstage c { lm_head }"
    found = stages_of(text, chain(3))
    assert found["transformer.h.1.mlp"] == ["b"]
    assert found["transformer.h.1.attn"] == found["transformer.h.1"] == ["a"]


@pytest.mark.parametrize("pattern", ["transformer.h[*]", "/transformer.h.*/", "type(Block)"])
def test_a_name_wins_over_a_pattern_on_the_same_module(pattern: str) -> None:
    text = f"stage a {{ transformer.wte, {pattern} }}\nstage b {{ transformer.h[2] }}\nstage c {{ rest }}"
    found = stages_of(text, chain(3))
    assert [found[f"transformer.h.{at}"][0] for at in range(3)] == ["a", "a", "b"]


def test_a_claim_on_a_container_that_is_never_called_covers_its_elements() -> None:
    found = stages_of("stage a { transformer }\nstage b { transformer.h }\nstage c { lm_head }", chain(2))
    assert found["transformer.h.0"] == found["transformer.h.1.attn"] == ["b"]
    assert found["transformer.wte"] == found["transformer.ln_f"] == ["a"]


def test_rest_is_what_nobody_else_claims() -> None:
    resolution = resolve(read("stage a { transformer.wte, transformer.h[0:2] }\nstage b { rest }"), chain(4))
    assert [row.modules for row in resolution.accounts] == [
        "transformer.wte, transformer.h[0:2]",
        "transformer.h[2:4], transformer.ln_f, lm_head",
    ]


def test_code_around_claimed_modules_is_left_to_the_data_flow() -> None:
    outline = chain(2)
    resolution = resolve(read("stage a { transformer.wte, transformer.h[0:1] }\nstage b { rest }"), outline)
    free = [step.name for step in outline.steps if resolution.assignment.steps[step.index] is None]
    assert free == ["add"]


def test_what_a_difference_takes_away_is_left_to_others() -> None:
    found = stages_of("stage a { transformer - transformer.h[1:3] }\nstage b { rest }", chain(3))
    assert [found[f"transformer.h.{at}"][0] for at in range(3)] == ["a", "b", "b"]
    assert found["transformer"] == ["a"]


def test_a_module_that_is_called_twice_is_visited_twice() -> None:
    outline = MODELS["looped"]
    resolution = resolve(read("stage a { block }\nstage b { other, head }"), outline)
    assert keys_by_call(resolution, outline)["block"] == ["a", "a"]
    assert [warning.code for warning in resolution.warnings] == ["visited-twice", "visited-twice"]


def test_one_call_can_be_claimed() -> None:
    text = "stage a { block }\nstage b { other, call(block, 1), head }"
    outline = MODELS["looped"]
    resolution = resolve(read(text), outline)
    assert keys_by_call(resolution, outline)["block"] == ["a", "b"]
    assert not resolution.warnings
    assert [row.parameters for row in resolution.accounts] == [4, 12]


def test_one_call_can_be_taken_away() -> None:
    text = "stage a { block - call(block, 1) }\nstage b { other, call(block, 1), head }"
    assert stages_of(text, MODELS["looped"])["block"] == ["a", "b"]


def test_a_module_with_two_callers_follows_them() -> None:
    assert stages_of("stage a { left }\nstage b { right }", shared())["table"] == ["a", "b"]


def test_a_module_with_two_callers_that_is_claimed_itself_stays_there() -> None:
    text = "stage a { left, table }\nstage b { right }"
    assert stages_of(text, shared())["table"] == ["a", "a"]
    assert stages_of(text.replace("table", "right.table"), shared())["table"] == ["a", "a"]


def test_rest_does_not_take_a_module_from_its_callers() -> None:
    net = Net()
    net.module("tool")
    net.module("block", "Block", count=4)
    net.module("head", count=4)
    net.run("head", net.call("block", lambda: net.step(net.run("tool"), parameters=("block.weight",))))
    assert stages_of("stage a { block }\nstage b { rest }", net.outline())["tool"] == ["a"]


def test_a_replicated_module_runs_in_every_stage_that_needs_it() -> None:
    outline = MODELS["rotary"]
    resolution = resolve(read("replicate rotary\nstage a { layers[0] }\nstage b { rest }"), outline)
    assert resolution.assignment.repeated == {0}
    assert resolution.assignment.steps[0] is None
    assert not resolution.warnings


def test_a_parameter_right_in_the_model_is_claimed_by_name_or_by_rest() -> None:
    net = Net()
    net.parameter("token", 3)
    for name in ("patch", "block"):
        net.module(name, count=4)
    joined = net.step(net.run("patch"), net.step(op="expand", parameters=("token",)), op="cat")
    net.run("block", joined)
    outline = net.outline()
    for members in ("patch, token", "patch"):
        last = "block" if "token" in members else "rest"
        resolution = resolve(read(f"stage a {{ {members} }}\nstage b {{ {last} }}"), outline)
        expand = next(step.index for step in outline.steps if step.name == "expand")
        assert resolution.assignment.steps[expand] == ("a" if "token" in members else "b")
    with pytest.raises(SpecError, match="1 parameter \\(3 elements\\) belongs to no stage: `token`"):
        resolve(read("stage a { patch }\nstage b { block }"), outline)


def test_what_runs_before_the_first_cut_is_stage_0() -> None:
    outline = chain(4)
    resolution = resolve(read("cut before transformer.h[2] as tail"), outline)
    assert resolution.assignment.keys == (0, "tail")
    first = next(step for step in outline.steps if outline.calls[step.call].module == "transformer.h.2.attn")
    assert resolution.assignment.steps == (0,) * first.index + ("tail",) * (len(outline.steps) - first.index)


def test_a_stage_that_is_declared_empty_names_what_runs_before_the_first_cut() -> None:
    resolution = resolve(read("stage early { }\ncut after transformer.h[1] as tail"), chain(4))
    assert resolution.assignment.keys == ("early", "tail")
    assert resolution.accounts[0].modules == "transformer.wte, transformer.h[0:2]"


def test_stages_and_cuts_can_be_mixed() -> None:
    text = "stage a { transformer.wte, transformer.h[0:2] }\ncut before transformer.h[2] as b\ncut before lm_head as c"
    resolution = resolve(read(text), chain(4))
    assert [row.modules for row in resolution.accounts] == [
        "transformer.wte, transformer.h[0:2]",
        "transformer.h[2:4], transformer.ln_f",
        "lm_head",
    ]


def test_a_cut_at_a_call_and_at_a_cutpoint() -> None:
    looped = resolve(read("cut before call(block, 1) as b"), MODELS["looped"])
    assert looped.assignment.steps == (0, 0, "b", "b")
    gates = resolve(read("cut at middle as b"), MODELS["gates"])
    assert gates.assignment.steps == (0, "b", "b")
    member = resolve(read("stage a { a }\nstage b { cut(middle) }"), MODELS["gates"])
    assert member.assignment.steps == ("a", "b", "b")


def test_the_loss_is_left_to_the_data_flow() -> None:
    net = Net()
    net.module("a", count=4)
    net.module("b", count=4)
    out = net.run("b", net.run("a"))
    net.finish()
    net.step(out, op="cross_entropy")
    resolution = resolve(read("cut before b as last"), net.outline())
    assert resolution.assignment.steps == (0, "last", None)


def test_ranks_options_and_limits_are_handed_on() -> None:
    text = (
        "ranks = 2\nmemory = 100000B\nstage a @ 0 { transformer.wte } with { memory = 9000B }\n"
        "split transformer.h[*] into 4 by count as p[i] @ i % 2\nstage z @ 1 { rest } with { freeze = true }"
    )
    resolution = resolve(read(text), chain(4))
    assert resolution.placement == {"a": 0, "p[0]": 0, "p[1]": 1, "p[2]": 0, "p[3]": 1, "z": 1}
    assert (resolution.ranks, resolution.rank_memory, resolution.memory) == (2, 100000, {"a": 9000})
    assert resolution.freeze == {"z"}


def test_a_shared_parameter_counts_in_each_of_its_stages() -> None:
    rows = resolve(read("stage a { transformer }\nstage b { lm_head }"), chain(2)).accounts
    assert [row.parameters for row in rows] == [100 + 2 * 12 + 2, 100]
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_a_module_that_is_never_called_may_be_left_to_rest() -> None:
    resolution = resolve(read("stage a { rotary, layers[0] }\nstage b { rest }"), MODELS["rotary"])
    assert not [warning for warning in resolution.warnings if warning.code == "never-called"]
    assert resolution.accounts[1].parameters == 8


@st.composite
def claims(draw: st.DrawFn) -> tuple[int, str]:
    size = draw(st.integers(1, 6))
    borders = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    pieces = list(zip([0, *borders], [*borders, size], strict=True))
    lines = [f"stage s{at} {{ transformer.h[{a}:{b}] }}" for at, (a, b) in enumerate(pieces)]
    return size, "\n".join(["stage first { transformer.wte }", *lines, "stage last { rest }"])


@given(claims())
def test_every_parameter_has_a_stage_and_every_claimed_step_its_own(case: tuple[int, str]) -> None:
    size, text = case
    outline = chain(size)
    resolution = resolve(read(text), outline)
    for step, key in zip(outline.steps, resolution.assignment.steps, strict=True):
        assert key is not None or outline.calls[step.call].module in {"", "transformer"}
    total = sum(parameter.count for parameter in outline.parameters)
    tied = 100
    assert sum(row.parameters for row in resolution.accounts) == total + tied


@given(seed=st.integers(0, 10_000))
def test_any_spec_resolves_or_raises_a_spec_error(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        "transformer",
        "transformer.h",
        "transformer.h[*]",
        "transformer.h[1]",
        "lm_head",
        "rest",
        "**",
        "transformer.h[0:2]",
        "call(lm_head, 0)",
        "type(MLP)",
        "transformer.h[7]",
        "nothing",
        "transformer.* - transformer.h",
        "/.*wte/",
        "lm_head.weight",
        "transformer - transformer.h[0].mlp",
    ]
    lines = []
    for at in range(rng.randint(1, 4)):
        members = ", ".join(rng.sample(pieces, rng.randint(0, 3)))
        lines.append(f"stage s{at} {{ {members} }}")
    if rng.random() < 0.4:
        by = rng.choice(["count", "params", "flops"])
        lines.append(f"split {rng.choice(pieces)} into {rng.randint(1, 4)} by {by} as p[i]")
    if rng.random() < 0.3:
        lines.append(f"cut before {rng.choice(pieces)} as c")
    if rng.random() < 0.2:
        lines.append(f"replicate {rng.choice(pieces)}")
    outline = chain(3)
    try:
        resolution = resolve(read("\n".join(lines)), outline)
    except SpecError:
        return
    assert len(resolution.assignment.steps) == len(outline.steps)
    assert set(resolution.assignment.steps) <= {None, *resolution.assignment.keys}


def test_a_partition_made_by_hand_is_checked_as_well() -> None:
    partition = read("ranks = 4\nstage a @ 0 { transformer }\nstage b @ 1 { rest }\nexpect params(b) <= 4")
    stages = (partition.stages[0], replace(partition.stages[1], ranks=(9,)))
    contract = replace(partition.expectations[0], stage="c")
    with pytest.raises(SpecError) as caught:
        resolve(replace(partition, stages=stages, expectations=(contract,)), chain(2))
    assert [(finding.code, finding.message) for finding in caught.value.diagnostics] == [
        ("unknown-rank", "Stage `b` is on rank 9, but there are 4 ranks."),
        ("unknown-stage", "`expect params(b) <= 4` speaks of stage `c`, which there is not."),
    ]


def test_rest_leaves_modules_without_parameters_to_the_data_flow() -> None:
    outline = MODELS["rotary"]
    found = stages_of("stage a { layers[0] }\nstage b { rest }", outline)
    assert (found["rotary"], found["drop"], found["layers.1"]) == ([None], [None], ["b"])
    assert stages_of("stage a { layers, unused }\nstage b { rest }", outline)["rotary"] == ["b"]


def test_a_tie_that_is_to_stay_on_one_rank_places_the_other_stage() -> None:
    text = "stage a @ 0 { transformer }\nstage b { lm_head }\ntie lm_head.weight = transformer.wte.weight colocate"
    resolution = resolve(read(text), chain(2))
    assert resolution.placement == {"a": 0, "b": 0}
    assert resolution.ties == {"transformer.wte.weight": "colocate"}


def test_a_frozen_stage_needs_no_memory_for_gradients() -> None:
    text = (
        "memory = 1100B\nstage a @ 0 { transformer.wte, transformer.h[0:4] } with { freeze = FREEZE }\n"
        "stage b @ 1 { rest }"
    )
    assert resolve(read(text.replace("FREEZE", "true")), chain(4)).freeze == {"a"}
    with pytest.raises(SpecError, match=r"Rank 0 needs 1\.16 KiB for parameters and gradients, but .* 1\.07 KiB"):
        resolve(read(text.replace("FREEZE", "false")), chain(4))


def test_a_parameter_that_no_module_has_is_no_concern_of_a_spec() -> None:
    net = Net()
    for name in "ab":
        net.module(name, count=4)
    net.run("b", net.call("a", lambda: net.step(parameters=("a.weight",))))
    outline = net.outline()
    steps = tuple(replace(step, parameters=(*step.parameters, "hidden")) for step in outline.steps)
    outline = replace(outline, steps=steps)
    assert [row.parameters for row in resolve(read("stage a { a }\nstage b { b }"), outline).accounts] == [4, 4]
    assert len(resolve(read("split ** into 2 by params as p[i]"), outline).reasons) == 2
