"""Tables of stages and edges."""

from __future__ import annotations

from ppdsl.graph.shapes import chain_graph
from ppdsl.report.tables import edge_table, stage_table
from tests.report.samples import CHAIN, UNET, check_golden


def test_the_table_of_stages_is_its_golden_text() -> None:
    check_golden("stages_chain", stage_table(CHAIN, width=80, placement=[0, 1, 2, 3]).plain)


def test_the_table_of_edges_is_its_golden_text() -> None:
    check_golden("edges_unet", edge_table(UNET, width=80).plain)


def test_a_table_is_not_wider_than_the_terminal() -> None:
    lines = stage_table(CHAIN, width=60).plain.splitlines()
    assert max(map(len, lines)) <= 60


def test_a_graph_without_edges_has_none_to_list() -> None:
    assert edge_table(chain_graph(1)).plain == "none"
