from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import Finished, launch, launch_bare, said

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("ragged_worker.py")


@pytest.fixture(scope="module")
def two() -> Finished:
    return launch(2, "ragged", "lengths", "other_shape", seconds=240.0, worker=WORKER)


def test_batches_of_any_size_on_two_processes_equal_one_process_bit_for_bit(two: Finished) -> None:  # UR-054, UR-059
    assert [said(two, rank, "ragged") for rank in range(2)] == ["equal"] * 2, two.stderr
    assert two.returncode == 0


def test_changing_lengths_run_on_two_processes(two: Finished) -> None:  # UR-055
    assert [said(two, rank, "lengths") for rank in range(2)] == ["equal"] * 2, two.stderr


def test_changing_lengths_run_on_four_processes_however_long_messages_take() -> None:  # UR-060
    four = launch(4, "lengths", seconds=240.0, worker=WORKER)
    assert [said(four, rank, "lengths") for rank in range(4)] == ["equal"] * 4, four.stderr


def test_a_rank_with_another_shape_makes_all_refuse_before_the_first_message(two: Finished) -> None:
    shapes = (
        "CallError: error[ranks-disagree]: Ranks disagree before step 2: the call is x float64[8, 4], targets[0] "
        "float64[8, 4] on rank 0 and x float64[7, 4], targets[0] float64[7, 4] on rank 1.\n"
        "help: all ranks must build the same model and make the same calls"
    )
    rows = (
        "error[rows-differ]: Inputs have different numbers of rows: `x` has 6, `targets[0]` has 8.\n"
        "help: give every input and target the same rows of the batch"
    )
    quoted = "\n".join(f"rank 1 | {line}" for line in rows.splitlines())
    elsewhere = f"CallError: error[refused-elsewhere]: Rank 1 refused step 3, so all ranks do.\n{quoted}"
    assert said(two, 0, "other_shape") == f"{shapes}\n{elsewhere}\nTrue"
    assert said(two, 1, "other_shape") == f"{shapes}\nCallError: {rows}\nTrue"


def test_a_rank_with_fewer_batches_is_an_error_on_all_ranks_and_no_hang() -> None:  # UR-059, UR-073
    texts = launch_bare(2, "stops_early", "evaluate", "close", "sleep", "end", seconds=120.0, worker=WORKER)
    zero, one = (dict(part.split("\n", 1) for part in f"\n{text}\n".split("\n# ")[1:]) for text in texts)
    advice = "help: all ranks must make the same calls, for the same number of batches"
    mode = (
        "CallError: error[ranks-disagree]: Ranks disagree before step 3: the mode is train on rank 0 and evaluate "
        "on rank 1.\nhelp: all ranks must build the same model and make the same calls"
    )
    ended = f"RunError: error[rank-ended]: Rank 1 ended before step 3, which rank 0 has begun.\n{advice}"
    missing = (
        "RunError: error[rank-missing]: Rank 1 did not come to step 3 within 4 seconds; rank 0 waits there.\n"
        f"{advice}; timeout= sets the wait"
    )
    assert zero == {
        "evaluate": f"{mode}\nover",
        "close": f"{ended}\nover",
        "sleep": f"{missing}\nover",
        "end": f"{ended}\nover\n",
    }
    assert one["evaluate"] == f"no more batches\n{mode}\nover"
    assert {one[name].strip() for name in ("close", "sleep", "end")} == {"no more batches\nover"}
