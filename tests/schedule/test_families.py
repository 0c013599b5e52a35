"""Golden orders, and the errors of the registry and of users' own orders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import peak_activations
from ppdsl.schedule import build_schedule, from_rows, parse_csv, registry, to_csv
from ppdsl.schedule.registry import schedule_names
from tests.schedule.shapes import microbatches

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_four_stages_and_eight_microbatches_are_in_torchs_order(name: str) -> None:
    golden = (DATA / f"{name}_p4_m8.csv").read_text(encoding="utf-8")
    assert to_csv(build_schedule(name, chain_graph(4), (0, 1, 2, 3), 8)) == golden


def test_fewer_microbatches_than_stages() -> None:
    assert str(build_schedule("1f1b", chain_graph(4), (0, 1, 2, 3), 2)) == (
        "rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1F1 1B0 1B1\nrank 2 | 2F0 2F1 2B0 2B1\nrank 3 | 3F0 3B0 3F1 3B1"
    )


def test_two_visits_of_one_stage_never_wait_for_each_other() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], keys=(0, 1, 0))
    assert str(build_schedule("1f1b", graph, (0, 1, 0), 3)) == (
        "rank 0 | 0F0 0F1 2F0 2B0 2F1 2B1 0F2 0B0 2F2 0B1 2B2 0B2\nrank 1 | 1F0 1F1 1B0 1F2 1B1 1B2"
    )


def test_parallel_branches_start_together_and_join() -> None:
    graph = shape_graph(4, [(0, (3,)), (1, (3,)), (2, (3,))])
    assert str(build_schedule("1f1b", graph, (0, 1, 2, 3), 3)) == (
        "rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2\n"
        "rank 1 | 1F0 1F1 1B0 1F2 1B1 1B2\n"
        "rank 2 | 2F0 2F1 2B0 2F2 2B1 2B2\n"
        "rank 3 | 3F0 3B0 3F1 3B1 3F2 3B2"
    )


def test_a_frozen_stage_runs_forward_only_and_not_far_ahead_of_its_rank() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], frozen={0})
    assert str(build_schedule("1f1b", graph, (0, 1, 1), 6)) == (
        "rank 0 | 0F0 0F1 0F2 0F3 0F4 0F5\n"
        "rank 1 | 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1F2 2F2 2B2 1B2 1F3 2F3 2B3 1B3 1F4 2F4 2B4 1B4 1F5 2F5 2B5 1B5"
    )


def test_neighbours_on_one_rank_work_as_one_stage() -> None:
    assert str(build_schedule("1f1b", chain_graph(4), (0, 0, 1, 1), 3)) == (
        "rank 0 | 0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2\n"
        "rank 1 | 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2"
    )


@given(p=st.integers(1, 5), v=st.integers(1, 3), m=microbatches)
def test_blocks_of_a_chain_are_the_1f1b_of_a_shorter_chain(p: int, v: int, m: int) -> None:
    graph = chain_graph(p * v)
    blocks = build_schedule("1f1b", graph, [stage // v for stage in range(p * v)], m)
    merged = build_schedule("1f1b", chain_graph(p), range(p), m)
    assert [peak.count for peak in peak_activations(blocks, graph)] == [min(m, p - rank) * v for rank in range(p)]
    for wide, narrow in zip(blocks.rows, merged.rows, strict=True):
        assert [(a.kind, a.microbatch) for a in wide[::v]] == [(a.kind, a.microbatch) for a in narrow]


@given(stages=st.integers(1, 6), m=microbatches)
def test_a_chain_on_one_rank_is_a_plain_loop(stages: int, m: int) -> None:
    graph, placement = chain_graph(stages), (0,) * stages
    assert build_schedule("1f1b", graph, placement, m).rows == build_schedule("sequential", graph, placement, m).rows


def test_a_name_may_be_written_with_capitals_and_hyphens() -> None:
    assert build_schedule("Forward-Only", chain_graph(1), (0,), 1).name == "forward_only"


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule("1f1d", chain_graph(2), (0, 1), 2)
    assert str(caught.value) == (
        "error[unknown-schedule]: There is no schedule named '1f1d'.\n"
        f"help: did you mean '1f1b'? all schedules: {', '.join(schedule_names())}"
    )


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule("zzz", chain_graph(2), (0, 1), 2)
    assert str(caught.value) == (
        f"error[unknown-schedule]: There is no schedule named 'zzz'.\nhelp: one of: {', '.join(schedule_names())}"
    )


def test_what_a_family_demands_is_said_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(graph: StageGraph, placement: Sequence[int], m: int) -> Diagnostic | None:
        return Diagnostic("odd-microbatches", f"{m} micro-batches do not go in pairs.") if m % 2 else None

    pairs = registry.Family("pairs", registry.families()["gpipe"].build, "two at a time", demands=(even,))
    monkeypatch.setattr(registry, "_FAMILIES", (pairs,))
    assert build_schedule("pairs", chain_graph(2), (0, 1), 2).name == "pairs"
    with pytest.raises(ScheduleError, match="3 micro-batches do not go in pairs"):
        build_schedule("pairs", chain_graph(2), (0, 1), 3)


def test_impossible_sizes_are_all_named_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule("gpipe", chain_graph(3), (0, 2), 0, ranks=2)
    assert str(caught.value) == (
        "error[no-microbatches]: A step of 0 micro-batches has nothing to run.\n"
        "help: use at least 1 micro-batch\n"
        "\n"
        "error[placement-length]: The placement has 2 ranks for 3 stages.\n"
        "help: give one rank for each stage\n"
        "\n"
        "error[unknown-rank]: Stage 1 is on rank 2, but there are 2 ranks.\n"
        "help: use a rank from 0 to 1"
    )


def test_a_csv_may_have_idle_cells_and_split_backwards() -> None:
    schedule = parse_csv("0F0, 0F1 ,,0I0,0W0,0B1\r\n,1F0,1B0,1F1,1I1,1W1\r\n", name="own.csv")
    assert str(schedule) == "rank 0 | 0F0 0F1 0I0 0W0 0B1\nrank 1 | 1F0 1B0 1F1 1I1 1W1"
    assert (schedule.placement, schedule.microbatches, schedule.forward_only) == ((0, 1), 2, False)


def test_a_cell_that_is_no_action_is_shown_in_its_line() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv("0F0,0B0\n1F0, 1F0junk\n", name="own.csv")
    assert str(caught.value) == (
        "error[not-an-action]: A cell of a schedule is one action. Found '1F0junk'.\n"
        " --> own.csv:2:6\n"
        "  |\n"
        "2 | 1F0, 1F0junk\n"
        "  |      ^^^^^^^\n"
        "help: write stage, kind (F, B, I or W) and micro-batch, as in 2F0"
    )


def test_a_cell_of_a_file_is_shown_once(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,nothing\n", encoding="utf-8")
    with pytest.raises(ScheduleError) as caught:
        parse_csv(path.read_text(encoding="utf-8"), name=str(path))
    assert str(caught.value).count("1 | 0F0,nothing") == 1


def test_overlapped_cells_become_neighbours_and_are_written_again() -> None:
    text = "0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\n"
    schedule = parse_csv(text, name="own.csv")
    assert str(schedule) == "rank 0 | 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    assert schedule.overlaps == ((3,),)
    assert to_csv(schedule) == text


@pytest.mark.parametrize(
    "cell", ["(0F1;0B0;0F2)OVERLAP_F_B", "(0F1)OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B", "0F1OVERLAP_F_B"]
)
def test_other_overlaps_are_refused_with_what_to_write(cell: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(f"0F0,{cell}", name="own.csv")
    assert str(caught.value).endswith("help: write a forward and a backward that run together as (0F1;3B0)OVERLAP_F_B")


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        from_rows([["0F0", "0B0"], ["1F0", "0F1", "1B0"]])
    assert str(caught.value) == (
        "error[stage-on-two-ranks]: Stage 0 stands on ranks 0 and 1; 0F1 is on rank 1.\n"
        "help: move all actions of stage 0 to one rank"
    )


def test_a_gap_in_the_stage_numbers_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        from_rows([["0F0"], ["3F0"]])
    assert str(caught.value) == (
        "error[missing-stage]: The order has stage 3, but no action of stages 1 and 2.\n"
        "help: number the stages from 0 without gaps"
    )


def test_an_empty_order_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv("\n")
    assert str(caught.value) == "error[empty-schedule]: The order has no action.\nhelp: write actions such as 0F0"


def test_words_that_are_no_action_are_refused_in_rows() -> None:
    with pytest.raises(ScheduleError) as caught:
        from_rows([["0F0", "0X0"]])
    assert str(caught.value) == (
        "error[not-an-action]: Rank 0 has '0X0' at step 1, which is no action.\n"
        "help: write stage, kind (F, B, I or W) and micro-batch, as in 2F0"
    )
