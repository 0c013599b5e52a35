"""The stage graph drawn, as a tree, and for other tools."""

from __future__ import annotations

import json
import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ppdsl.graph.ir import StageGraph, Tie
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.report.dag import layout_graph
from ppdsl.report.graph import render_dag, render_tree, to_dot, to_json, to_mermaid, to_svg
from ppdsl.report.names import fold_names
from tests.report.samples import BRANCHES, CHAIN, GRAPHS, TRANSLATOR, UNET, check_golden, make_graph


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    count = draw(st.integers(1, 10))
    edges = []
    for producer in range(count - 1):
        for _ in range(draw(st.integers(0, 3))):
            consumers = draw(st.sets(st.integers(producer + 1, count - 1), min_size=1, max_size=4))
            edges.append((producer, sorted(consumers)))
    return shape_graph(count, edges)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("width", [80, 160])
def test_a_graph_is_drawn_as_its_golden_text(name: str, width: int) -> None:
    check_golden(f"dag_{name}_{width}", render_dag(GRAPHS[name], width=width).plain)


def test_a_graph_without_box_characters_is_drawn_as_its_golden_text() -> None:
    text = render_dag(UNET, width=80, placement=[0, 1, 2, 1, 0], ascii_only=True).plain
    assert text.isascii()
    check_golden("dag_unet_ascii", text)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_tree_is_its_golden_text(name: str) -> None:
    check_golden(f"tree_{name}", render_tree(GRAPHS[name], width=80).plain)


@pytest.mark.parametrize("name", GRAPHS)
def test_mermaid_is_its_golden_text(name: str) -> None:
    check_golden(f"mermaid_{name}", to_mermaid(GRAPHS[name]))


def test_dot_is_its_golden_text() -> None:
    check_golden("dot_translator", to_dot(TRANSLATOR))


def test_branches_stand_side_by_side() -> None:
    found = layout_graph(BRANCHES, width=80)
    assert found is not None
    tops = {box.stage: box.top for box in found[0].boxes}
    assert tops[1] == tops[2] == tops[3] == tops[4]


def test_a_chain_is_straight() -> None:
    found = layout_graph(CHAIN, width=80)
    assert found is not None
    assert all(line[0] == line[2] for wire in found[0].wires for line in wire.lines)


@given(graphs(), st.integers(40, 160))
def test_a_drawing_keeps_to_its_width(graph: StageGraph, width: int) -> None:
    lines = render_dag(graph, width=width).plain.splitlines()
    assert max(map(cell_len, lines)) <= width


@given(graphs(), st.integers(40, 160))
def test_boxes_do_not_overlap_and_lie_inside(graph: StageGraph, width: int) -> None:
    found = layout_graph(graph, width=width)
    if found is None:
        return
    drawing, _ = found
    cells: set[tuple[int, int]] = set()
    for box in drawing.boxes:
        mine = {(x, y) for x in range(box.left, box.left + box.width) for y in range(box.top, box.top + box.height)}
        assert not cells & mine
        cells |= mine
    assert all(0 <= x < width and 0 <= y < drawing.height for x, y in cells)


@given(graphs())
def test_every_edge_has_a_wire_into_each_consumer(graph: StageGraph) -> None:
    found = layout_graph(graph, width=160)
    if found is None:
        return
    drawing, _ = found
    box_of = {box.stage: box for box in drawing.boxes}
    for wire in drawing.wires:
        for consumer in wire.net.consumers:
            box = box_of[consumer]
            entered = [x for x, y in wire.arrows if y == box.top and box.left < x < box.left + box.width - 1]
            assert entered, f"stage {consumer} has no arrow of {wire.net}"


@given(graphs())
def test_wires_are_connected_and_two_never_run_along_the_same_cells(graph: StageGraph) -> None:
    found = layout_graph(graph, width=160)
    if found is None:
        return
    drawing, _ = found
    upright: dict[tuple[int, int], int] = {}
    level: dict[tuple[int, int], int] = {}
    for number, wire in enumerate(drawing.wires):
        for x, y, last_x, last_y in wire.lines:
            cells = upright if x == last_x else level
            for cell in [(c, r) for c in range(x, last_x + 1) for r in range(y, last_y + 1)]:
                assert cells.setdefault(cell, number) == number
        assert _is_connected(wire.lines)


def _is_connected(lines: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Return whether lines form one piece."""
    cells = [{(x, y) for x in range(a, c + 1) for y in range(b, d + 1)} for a, b, c, d in lines]
    piece, rest = cells[0], cells[1:]
    while True:
        touching = [line for line in rest if line & piece]
        if not touching:
            return not rest
        piece = piece.union(*touching)
        rest = [line for line in rest if line not in touching]


@given(graphs(), st.booleans())
def test_colour_only_adds_colour(graph: StageGraph, tree: bool) -> None:
    text = render_tree(graph, width=100) if tree else render_dag(graph, width=100)
    console = Console(file=StringIO(), width=100, color_system="truecolor", force_terminal=True)
    console.print(text, no_wrap=True, overflow="ignore", crop=False)
    assert Text.from_ansi(console.file.getvalue()).plain.rstrip("\n") == text.plain  # type: ignore[attr-defined]


def test_a_graph_that_is_too_wide_is_listed() -> None:
    wide = shape_graph(42, [(0, tuple(range(1, 41))), *((s, (41,)) for s in range(1, 41))])
    text = render_dag(wide, width=80).plain
    assert text.startswith("shape: too many stages side by side to draw in 80 columns")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "  7 -> 41" in text


def test_a_graph_of_48_stages_in_a_row_is_drawn() -> None:
    text = render_dag(chain_graph(48), width=80).plain
    assert "stage 47" in text


def test_names_of_wide_characters_keep_the_boxes_whole() -> None:
    graph = make_graph("Net", [("段階", ["層"]), (1, ["b"])], [("値", 0, [1])])
    lines = render_dag(graph, width=80).plain.splitlines()
    inside = [line for line in lines if line.startswith("│")]
    assert len({cell_len(line) for line in inside}) == 1


def test_a_long_list_of_modules_is_shortened_in_the_box_and_whole_in_the_tree() -> None:
    names = [f"module_{name}" for name in "abcdefghij"]
    graph = make_graph("Net", [(0, names)], [])
    assert "…" in render_dag(graph, width=80).plain
    folded = re.sub(r"[│└├─\s]+", " ", render_tree(graph, width=80).plain)
    assert all(name in folded for name in names)


def test_a_tree_says_what_is_tied() -> None:
    graph = StageGraph(CHAIN.stages, CHAIN.edges, ties=(Tie(("embed.weight", "head.weight"), (0, 3)),))
    assert "tied     embed.weight = head.weight in stages 0, head" in render_tree(graph, width=80).plain


@pytest.mark.parametrize("name", GRAPHS)
def test_svg_is_well_formed_and_names_every_stage(name: str) -> None:
    graph = GRAPHS[name]
    root = ElementTree.fromstring(to_svg(graph))
    words = " ".join("".join(node.itertext()) for node in root.iter())
    assert all(f"stage {stage.label}" in words for stage in graph.stages)


def test_svg_escapes_what_xml_does_not_take() -> None:
    graph = make_graph("Net<&>", [("<a>", ["x&y"])], [])
    ElementTree.fromstring(to_svg(graph))


@pytest.mark.parametrize("name", GRAPHS)
def test_json_is_one_line_with_all_edges(name: str) -> None:
    text = to_json(GRAPHS[name])
    assert "\n" not in text
    found = json.loads(text)
    assert [edge["value"] for edge in found["edges"]] == [edge.value for edge in GRAPHS[name].edges]
    assert found["digest"] == GRAPHS[name].digest


def test_mermaid_and_dot_escape_quotes() -> None:
    graph = make_graph('Net"x', [('say "hi"', [])], [])
    assert '"hi"' not in to_mermaid(graph)
    assert r"\"hi\"" in to_dot(graph)


@given(st.lists(st.sampled_from(["a", "b", "h.0", "h.1", "h.2", "h.3", "x.1.y", "x.2.y", "x.3.y"]), max_size=12))
def test_folded_names_stand_for_as_many_as_there_were(names: list[str]) -> None:
    assert sum(map(_stands_for, fold_names(names))) == len(names)


def _stands_for(text: str) -> int:
    first, dots, last = text.partition(" .. ")
    if dots:
        numbers = [int(part) for name in (first, last) for part in name.split(".") if part.isdecimal()]
        return numbers[1] - numbers[0] + 1
    name, times, count = text.partition(" x")
    return int(count) if times else len([name])
