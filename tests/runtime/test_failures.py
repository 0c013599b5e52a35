"""A rank that raises, dies or hangs, at any moment: all others end with one error that says what happened.

Reports: UR-074 (nobody says who failed), UR-075 (a script that does not end), UR-066 (handles that nobody awaits).
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launch import ENVIRONMENT, ROOT, launch_bare

pytestmark = [pytest.mark.distributed, pytest.mark.current]

LEAVING = Path(__file__).with_name("leaving_worker.py")
TWO = (
    "kill-forward--1", "kill-build--1", "kill-save--1", "stop-forward--1", "stop-between-0-held",
    "kill-forward-0-held", "raise-build--1", "raise-save--1", "raise-optimizer--1",
)  # fmt: skip
OVER_GLOO = ("kill-forward--1", "stop-forward--1", "raise-backward--1")
FOUR = ("kill-backward-1", "stop-forward-0", "raise-backward--1", "kill-forward-0-held")


def script(module: str, *arguments: str, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**ENVIRONMENT, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def outcomes(ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Run all faults on that many ranks, from one process: to start each would take most of the time."""
    found: dict[str, list[dict[str, Any]]] = script("tests.runtime.faults", str(ranks), *(TWO if ranks == 2 else FOUR))
    return found


@cache
def outcomes_over_gloo() -> dict[str, list[dict[str, Any]]]:
    """Run the faults that end waits for messages on two ranks that send everything through gloo."""
    found: dict[str, list[dict[str, Any]]] = script("tests.runtime.faults", "2", *OVER_GLOO, PPDSL_LINES="0")
    return found


def texts(ranks: int, fault: str) -> list[str]:
    """Return what each rank said; all but the one in trouble have ended with an error of ppdsl."""
    ended = outcomes(ranks)[fault]
    what, _, rest = fault.partition("-")
    victim = int(rest.partition("-")[2].removesuffix("-held")) % ranks
    for rank, end in enumerate(ended):
        if rank != victim:
            assert end["code"] == 1, f"rank {rank}: {end}"
            assert end["text"].partition(":")[0] in ("RunError", "CallError"), f"rank {rank}: {end['text']}"
    assert ended[victim]["code"] == {"kill": -9, "stop": None, "raise": 1}[what]
    return [end["text"] for end in ended]


def test_a_rank_killed_in_a_step_is_named_with_what_was_awaited() -> None:
    lost = texts(2, "kill-forward--1")[0]
    awaited = "(gradient of `tanh`, stage 1 to 0, micro-batch "
    assert lost.startswith("RunError: error[rank-lost]: Rank 1 is gone without a word, while rank 0 waited for it ")
    assert awaited in lost


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (OVER_GLOO[0], "rank-lost]: Rank 1 is gone without a word"),
        (OVER_GLOO[1], "timed-out]: Rank 0 waited 4 seconds for rank 1"),
        (OVER_GLOO[2], "other-rank-failed]: Rank 0 stopped while waiting for rank 1"),
    ],
)
def test_the_same_is_said_where_gloo_carries_all_messages(fault: str, error: str) -> None:
    assert outcomes_over_gloo()[fault][0]["text"].startswith(f"RunError: error[{error}")


@pytest.mark.parametrize(
    ("fault", "moment"), [("kill-build--1", "the first step"), ("kill-save--1", "the saving of the checkpoint")]
)
def test_a_rank_killed_between_steps_is_missed_where_the_others_wait(fault: str, moment: str) -> None:
    expected = f"RunError: error[rank-missing]: Rank 1 did not come to {moment} within 4 seconds; rank 0 waits there."
    assert texts(2, fault)[0].startswith(expected)


def test_a_rank_that_stands_still_is_reported_after_the_timeout() -> None:
    text = texts(2, "stop-forward--1")[0]
    assert text.startswith("RunError: error[timed-out]: Rank 0 waited 4 seconds for rank 1 in vain (gradient of `tanh`")


def test_the_holder_of_the_store_that_stands_still_holds_up_nobody() -> None:
    text = texts(2, "stop-between-0-held")[1]
    expected = "RunError: error[store-lost]: The store of torch.distributed gave no answer within 4 seconds; rank 1 "
    assert text.startswith(expected)


def test_the_holder_of_the_store_that_is_killed_is_named() -> None:
    # It takes the store with it, and either may be noticed first.
    for ranks in (2, 4):
        for rank, text in enumerate(texts(ranks, "kill-forward-0-held")[1:], 1):
            assert "Rank 0 is gone without a word" in text or "store of torch.distributed is " in text
            assert f"rank {rank}" in text


def test_an_error_while_building_or_saving_is_told_to_all() -> None:
    building = texts(2, "raise-build--1")
    assert building[0].startswith(
        "CallError: error[refused-elsewhere]: Rank 1 refused the first step, so all ranks do."
    )
    assert building[0].endswith("rank 1 | ValueError: bad luck")
    saving = texts(2, "raise-save--1")
    assert "rank 1 | error[save-failed]: Rank 1 could not write its part of " in saving[0]
    assert "ValueError: bad luck" in saving[0]


def test_an_error_between_steps_is_told_to_all() -> None:
    text = texts(2, "raise-optimizer--1")[0]
    assert text.startswith("RunError: error[rank-ended]: Rank 1 ended before the saving of the checkpoint")
    assert "rank 1 | ValueError: bad luck" in text


def test_four_ranks_report_the_same_error() -> None:
    said_by = texts(4, "raise-backward--1")
    own = said_by[3].removeprefix("RunError: ")
    assert own.startswith(
        "error[stage-failed]: Rank 3 failed in the backward of stage 3, micro-batch 2: ValueError: bad"
    )
    for rank, text in enumerate(said_by[:3]):
        assert text.startswith(f"RunError: error[other-rank-failed]: Rank {rank} stopped while waiting for rank ")
        assert "\n".join(f"rank 3 | {line}".rstrip() for line in own.splitlines()) in text


def test_four_ranks_name_the_one_that_was_killed() -> None:
    for rank, text in enumerate(texts(4, "kill-backward-1")):
        assert rank == 1 or "Rank 1 is gone without a word" in text


def test_four_ranks_name_the_one_that_all_others_wait_for_in_the_end() -> None:
    for rank, text in enumerate(texts(4, "stop-forward-0")):
        assert rank == 0 or "waited 4 seconds for rank " in text
        assert rank == 0 or "rank 0 hangs" in text


def test_a_script_that_shuts_nothing_down_ends_by_itself() -> None:
    assert launch_bare(2, "quietly", worker=LEAVING, seconds=100.0) == ["end", "end"]


def test_an_error_at_the_top_of_a_script_is_what_the_others_report() -> None:
    text = launch_bare(2, "badly", worker=LEAVING, seconds=100.0)[0]
    assert text == (
        "RunError: error[rank-ended]: Rank 1 ended before step 2, which rank 0 has begun.\n"
        "rank 1 | ValueError: bad luck\n"
        "help: all ranks must make the same calls, for the same number of batches\nend"
    )


def test_fifty_pipelines_leave_no_thread_file_or_group_and_wait_once_for_each_handle() -> None:
    for ended in script("tests.runtime.hygiene", "2"):
        assert ended["code"] == 0, ended["text"] + ended["stderr"]
        found = json.loads(ended["text"])
        # A pipeline that leaves something leaves it 45 times; a socket may be a moment late.
        assert all(late <= found["early"][name] + 3 for name, late in found["late"].items()), found
        assert set(found["waits"]) == {"1"}
