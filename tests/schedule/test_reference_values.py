"""Makespan, bubble, span and peaks of an independent simulator are reproduced, and the golden orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule import Schedule, to_csv
from ppdsl.simulation import simulate_schedule
from tests.schedule.own_constructions import chimera, dualpipe, seq1f1b
from tests.schedule.sizes import live_peaks, on_chain, paired_times

DATA = Path(__file__).parent.parent / "data"
ROWS = json.loads((DATA / "schedules.json").read_text(encoding="utf-8"))
FAMILY = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "ZB-H1": "zero_bubble(h1)",
    "ZB-H2": "zero_bubble(h2)",
    "ZB-V": "zbv",
    "DualPipeV": "dualpipev",
    "V-Half": "v_half",
    "V-Min": "v_min",
}


def built(name: str, p: int, m: int, chunks: int) -> tuple[Schedule, StageGraph]:
    match name:
        case "Chimera":
            return chimera(p, m)
        case "DualPipe":
            return dualpipe(p, m)
        case "Seq1F1B":
            return seq1f1b(p, m, chunks)
        case _:
            return on_chain(FAMILY[name], p, m, chunks)


def test_every_schedule_of_the_table_is_built() -> None:
    assert len(ROWS) == 123
    assert {row["schedule"] for row in ROWS} == {*FAMILY, "Chimera", "DualPipe", "Seq1F1B"}


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['schedule']}-p{r['p']}-m{r['m']}-c{r['chunks_per_rank']}")
def test_a_row_of_the_table(row: dict[str, Any]) -> None:
    schedule, graph = built(row["schedule"], row["p"], row["m"], row["chunks_per_rank"])
    if schedule.overlaps:
        # The table runs the two halves of a pair as one; in sequence they are never slower.
        times = paired_times(schedule, graph)
        assert times.makespan == row["makespan"]
        assert max(times.spans) == row["max_rank_span"]
        assert max(times.idle) == row["max_rank_idle_inside_span"]
        assert simulate_schedule(schedule, graph).makespan <= row["makespan"]
    else:
        timeline = simulate_schedule(schedule, graph)
        assert timeline.makespan == row["makespan"]
        assert round(timeline.bubble, 6) == row["bubble"]
        assert max(timeline.spans) == row["max_rank_span"]
        assert (
            max(s - b for s, b in zip(timeline.spans, timeline.busy, strict=True)) == row["max_rank_idle_inside_span"]
        )
    assert live_peaks(schedule, until="W") == row["peak_act_chunks_per_rank_until_W"]
    assert live_peaks(schedule, until="I") == row["peak_act_chunks_per_rank_until_I"]


@pytest.mark.parametrize(
    ("file", "name", "v"),
    [
        ("gpipe", "gpipe", 1),
        ("1f1b", "1f1b", 1),
        ("interleaved_v2", "interleaved_1f1b(v=2)", 2),
        ("looped_bfs_fifo_v2", "looped_bfs(fifo)", 2),
        ("zbh1", "zero_bubble", 1),
        ("zbh2", "zero_bubble(h2)", 1),
        ("zbv", "zbv", 2),
        ("dualpipev", "dualpipev", 2),
    ],
)
def test_golden_orders(file: str, name: str, v: int) -> None:
    schedule, _ = on_chain(name, 4, 8, v)
    assert to_csv(schedule) == (DATA / f"{file}_p4_m8.csv").read_text(encoding="utf-8")
