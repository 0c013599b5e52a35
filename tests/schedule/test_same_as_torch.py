"""Orders and CSV files equal those of the installed torch, action by action."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule import Schedule, build_schedule, parse_csv, to_csv
from tests.schedule.torch_orders import dumped, known, loaded, single_rows, torch_rows

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)]
LOOPS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")


def ours(name: str, p: int, v: int, m: int) -> Schedule:
    ring = range(p)
    placement = (*ring, *reversed(ring)) if name in ("zbv", "dualpipev") else tuple(ring) * v
    return build_schedule(name, chain_graph(p * v), placement, m)


def cells(schedule: Schedule) -> list[list[str]]:
    return [line.split(",") for line in to_csv(schedule).splitlines()]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_on_each_rank_runs_as_torch_runs(name: str) -> None:
    for p, m in SIZES:
        if m >= p:  # torch refuses fewer
            assert cells(ours(name, p, 1, m)) == single_rows(name, p, m), (p, m)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_loops_are_torchs_wherever_torch_defines_them(name: str, v: int) -> None:
    for p, m in SIZES:
        if name == "looped_bfs" or m % max(1, m // p) == 0:
            assert cells(ours(name, p, v, m)) == torch_rows(name, p, v, m), (p, v, m)


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_vs_are_torchs_wherever_torch_defines_them(name: str) -> None:
    for p, m in SIZES:
        if name == "zbv" or m >= 2 * p:
            assert cells(ours(name, p, 2, m)) == torch_rows(name, p, 2, m), (p, m)


def test_zero_bubble_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank() -> None:
    for p, m in ((2, 4), (4, 8), (4, 4), (8, 16)):
        assert cells(ours("zero_bubble(h1)", p, 1, m)) == torch_rows("interleaved_zero_bubble", p, 1, m)


@pytest.mark.parametrize(
    ("name", "p", "v", "m"), [("interleaved_1f1b", 4, 2, 8), ("zbv", 3, 2, 6), ("dualpipev", 4, 2, 8)]
)
@pytest.mark.parametrize("communications", [False, True])
def test_what_torch_writes_is_read_and_written_again(
    name: str, p: int, v: int, m: int, communications: bool, tmp_path: Path
) -> None:
    text = dumped(name, p, v, m, tmp_path / "torch.csv", communications=communications)
    schedule = parse_csv(text)
    wanted = ours(name, p, v, m)
    assert schedule.rows == wanted.rows
    # Older torch takes pairs apart when it adds communications.
    assert schedule.overlaps == (wanted.overlaps if "OVERLAP_F_B" in text else ())
    idle_left_out = [[cell for cell in line.split(",") if cell] for line in text.splitlines()]
    again = [known(line.split(",")) for line in to_csv(schedule, communications=communications).splitlines()]
    # Taken apart, a pair no longer says that its messages leave together.
    if schedule.overlaps == wanted.overlaps:
        assert again == idle_left_out


@pytest.mark.parametrize(
    "name", ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zbv", "dualpipev", "v_half", "v_min"]
)
@pytest.mark.parametrize("communications", [False, True])
def test_what_is_written_is_read_by_torch(name: str, communications: bool, tmp_path: Path) -> None:
    schedule = build_schedule(name, chain_graph(6), (0, 1, 2, 2, 1, 0) if name[0] in "zdv" else (0, 1, 2, 0, 1, 2), 6)
    written = [known(line.split(",")) for line in to_csv(schedule, communications=communications).splitlines()]
    text = "".join(",".join(row) + "\n" for row in written)
    read = loaded(text, 3, 2, 6, tmp_path / "ours.csv", communications=communications)
    assert read == written
