"""Every family as it is drawn: at 80 and 160 columns, with colour, without box characters, small and large."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ppdsl.graph.shapes import chain_graph
from ppdsl.plan.lifetimes import peak_activations
from ppdsl.report.timeline import render_timeline
from ppdsl.schedule.action import ActionKind
from ppdsl.schedule.arrangement import Arrangement
from ppdsl.schedule.registry import build_schedule, named_family
from ppdsl.simulation.bounds import lower_bounds
from ppdsl.simulation.costs import uniform_costs
from ppdsl.simulation.simulator import simulate_schedule
from ppdsl.simulation.transfers import transfers
from ppdsl.timeline import Timeline
from ppdsl.units import Seconds
from tests.report.samples import check_golden

FAMILIES = {
    "1f1b": 1,
    "eager_1f1b": 1,
    "gpipe": 1,
    "interleaved_1f1b(v=2)": 2,
    "interleaved_1f1b(v=4)": 4,
    "looped_bfs(v=2)": 2,
    "zero_bubble(h1)": 1,
    "zero_bubble(h2)": 1,
    "interleaved_zero_bubble(v=2)": 2,
    "zbv": 2,
    "dualpipev": 2,
    "v_half": 2,
    "v_min": 2,
    "sequential": 1,
    "forward_only": 1,
}


def step_of(
    name: str, ranks: int, microbatches: int, stages_a_rank: int, latency: float = 0.0
) -> tuple[Timeline, dict[str, Any]]:
    """Return the simulated step of a family on a chain, and what the drawing says of it."""
    graph = chain_graph(ranks * stages_a_rank)
    back = named_family(name).family.arrangement is Arrangement.V
    placement = [s % ranks if not back or s < ranks else 2 * ranks - 1 - s for s in range(len(graph.stages))]
    schedule = build_schedule(name, graph, placement, microbatches)
    costs = uniform_costs(graph, latency=latency)
    timeline = simulate_schedule(schedule, graph, costs)
    said: dict[str, Any] = {
        "title": f"{name}: {ranks} ranks, {microbatches} micro-batches",
        "unit": "F",
        "bound": lower_bounds(schedule, graph, costs).best,
        "period": max(timeline.spans),
        "peaks": [peak.count for peak in peak_activations(schedule, graph)],
        "messages": transfers(timeline, graph, costs) if latency else None,
    }
    return timeline, said


def file_name(name: str) -> str:
    return name.replace("(", "_").replace(")", "").replace("=", "")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_drawn_as_its_golden_text(name: str) -> None:
    timeline, said = step_of(name, 4, 8, FAMILIES[name])
    drawn = [render_timeline(timeline, width=width, **said).plain for width in (80, 160)]
    ascii_only = render_timeline(timeline, width=80, ascii_only=True, **said).plain
    assert ascii_only.isascii()
    check_golden(f"family_{file_name(name)}", "\n\n".join([*drawn, ascii_only]))


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b(v=2)", "zbv"])
def test_a_family_is_coloured_as_its_golden_text(name: str) -> None:
    timeline, said = step_of(name, 4, 8, FAMILIES[name])
    # Spans, not escapes: rich's styles remember the escapes of the first terminal they were printed on.
    check_golden(f"styled_{file_name(name)}", render_timeline(timeline, width=80, **said).markup)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_messages_are_drawn_as_their_golden_text(name: str) -> None:
    timeline, said = step_of(name, 4, 8, FAMILIES[name], latency=1.0)
    drawn = [render_timeline(timeline, width=120, ascii_only=plain, **said).plain for plain in (False, True)]
    assert drawn[1].isascii()
    check_golden(f"messages_{file_name(name)}", "\n\n".join(drawn))


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_64_ranks_with_512_microbatches_are_drawn(name: str) -> None:
    timeline, said = step_of(name, 64, 512, FAMILIES[name])
    whole = render_timeline(timeline, width=80, **said).plain
    some = render_timeline(timeline, width=160, ranks=[0, 1, 31, 62, 63], **said).plain
    check_golden(f"large_{file_name(name)}", f"{whole}\n\n{some}")


def test_what_is_cut_short_is_marked_without_box_characters_too() -> None:
    timeline, said = step_of("zbv", 4, 8, 2)
    lines = render_timeline(timeline, width=40, ascii_only=True, **{**said, "title": "long " * 9}).plain
    assert lines.isascii()
    assert "~ predicted" in lines.splitlines()[0]


def test_only_the_ranks_asked_for_are_drawn_and_a_gap_is_marked() -> None:
    timeline, said = step_of("1f1b", 8, 8, 1)
    lines = render_timeline(timeline, width=120, ranks=[0, 1, 6], **said).plain.splitlines()
    assert [line.split(" │")[0] for line in lines[1:5]] == ["rank 0", "rank 1", "     ┆", "rank 6"]
    assert "3 of 8 ranks are shown" in "\n".join(lines)


def test_labels_of_several_stages_are_all_long_or_all_short() -> None:
    timeline, said = step_of("interleaved_1f1b(v=2)", 4, 8, 2)
    narrow = render_timeline(timeline, width=160, **said).plain
    wide = render_timeline(timeline, width=260, **said).plain
    assert "rank 0 │F0F1" in narrow
    assert "lower case: a rank's second stage" in narrow
    assert "rank 0 │0F0─0F1─" in wide
    assert "numbers: stage and micro-batch" in wide
    assert "lower case" not in wide


@pytest.mark.parametrize("name", ["interleaved_1f1b(v=4)", "zbv"])
def test_a_step_in_several_lines_is_drawn_as_its_golden_text(name: str) -> None:
    timeline, said = step_of(name, 4, 8, FAMILIES[name])
    check_golden(f"wrapped_{file_name(name)}", render_timeline(timeline, width=80, wrap=True, **said).plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_several_lines_every_action_is_labelled(name: str) -> None:
    timeline, said = step_of(name, 4, 8, FAMILIES[name])
    rows = [r for r in render_timeline(timeline, width=80, wrap=True, **said).plain.splitlines() if " │" in r]
    drawn = [row.split("│")[1] for row in rows]
    for letter, kind in zip("FBIW", ActionKind, strict=True):
        count = sum(event.action.kind is kind for event in timeline.events)
        labels = sum(len(re.findall(rf"{letter}\d", row, re.IGNORECASE)) for row in drawn)
        assert count <= labels <= count + len(rows)  # an action that goes on in the next line has two labels


def test_in_several_lines_every_message_is_drawn_once() -> None:
    timeline, said = step_of("1f1b", 4, 8, 1, latency=1.0)
    rows = [r for r in render_timeline(timeline, width=60, wrap=True, **said).plain.splitlines() if " sends │" in r]
    assert len(rows) > 4
    assert sum(row.count("↓") + row.count("↑") for row in rows) == len(said["messages"])


def test_measured_steps_stay_on_one_line() -> None:
    timeline, said = step_of("1f1b", 2, 40, 1)
    events = tuple(replace(e, end=Seconds(e.end - 0.001 * (i % 7))) for i, e in enumerate(timeline.events))
    text = render_timeline(replace(timeline, events=events), width=60, wrap=True, title=said["title"]).plain
    assert text.count("rank 0") == 1


def test_every_message_is_drawn_or_counted() -> None:
    timeline, said = step_of("1f1b", 4, 8, 1, latency=1.0)
    rows = [line for line in render_timeline(timeline, width=160, **said).plain.splitlines() if " sends │" in line]
    arrows = sum(row.count("↓") + row.count("↑") for row in rows)
    assert arrows == len(said["messages"]) == 2 * 3 * 8


def test_a_message_arrives_where_its_wire_ends() -> None:
    timeline, said = step_of("gpipe", 2, 2, 1, latency=1.0)
    lines = render_timeline(timeline, width=80, **said).plain.splitlines()
    sends, needs = lines[2], lines[3]
    first = sends.index("↓")
    assert needs[first + sends[first:].index("╌") :].lstrip("·╌").startswith("F0")
