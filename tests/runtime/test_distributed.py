from __future__ import annotations

import re

import pytest

from tests.runtime.launch import Finished, launch, launch_bare, said

pytestmark = pytest.mark.distributed

TOGETHER = (
    "equal", "crowded", "tied", "different_models", "different_marks", "refusals", "odd_loss", "outputs", "traffic",
)  # fmt: skip


@pytest.fixture(scope="module")
def two() -> Finished:
    """All scenarios that leave the processes alive, on two processes: starting them is most of the time."""
    return launch(2, *TOGETHER, seconds=240)


@pytest.fixture(scope="module")
def four() -> Finished:
    """The same for four processes."""
    return launch(4, "equal", "timeline", seconds=240)


def test_two_processes_equal_two_ranks_of_one_process_bit_for_bit(two: Finished) -> None:
    assert [said(two, rank, "equal") for rank in range(2)] == ["equal"] * 2
    assert two.returncode == 0


def test_four_processes_equal_four_ranks_of_one_process_bit_for_bit(four: Finished) -> None:
    assert [said(four, rank, "equal") for rank in range(4)] == ["equal"] * 4
    assert four.returncode == 0


def test_more_stages_than_ranks_are_refused_on_every_rank(two: Finished) -> None:
    for rank in range(2):
        text = said(two, rank, "crowded")
        assert text.startswith(
            "GraphError: error[more-stages-than-ranks]: The model has 3 stages, but there are 2 ranks, and no "
            "placement says who shares one."
        )
        assert text.endswith("help: run on 3 ranks, or give a placement such as placement={0: 0, 1: 1, 2: 0}")


def test_tied_copies_start_equal_stay_equal_and_train_like_one_parameter(two: Finished) -> None:
    assert said(two, 0, "tied") == "w, a.weight, a.bias, c.weight, c.bias"
    assert said(two, 1, "tied") == "w, b.weight, b.bias"


def test_the_timeline_has_all_ranks_and_parallel_branches_run_at_the_same_time(four: Finished) -> None:
    expected = "32 events, 4 ranks, ('stem', 'left', 'right', 'join'), together: True"
    assert [said(four, rank, "timeline") for rank in range(4)] == [expected] * 4


def test_an_error_in_a_stage_ends_all_ranks_with_its_text() -> None:
    result = launch(3, "trouble", "raise")
    own = said(result, 1)
    assert own.startswith(
        "RunError: error[stage-failed]: Rank 1 failed in the forward of stage 1, micro-batch 2: ValueError: bad luck\n"
    )
    assert 'raise ValueError("bad luck")' in own
    assert "pipeline-ended" in own
    for rank, text in ((0, "gradient of `a`, stage 1 to 0"), (2, "forward of `trouble`, stage 1 to 2, micro-batch 2")):
        other = said(result, rank)
        assert other.startswith(
            f"RunError: error[other-rank-failed]: Rank {rank} stopped while waiting for rank 1 ({text}"
        )
        assert "rank 1 | error[stage-failed]: Rank 1 failed in the forward of stage 1, micro-batch 2" in other
        assert "worker.py" in other


def test_a_killed_rank_is_named_by_the_others() -> None:
    # What the killed rank had sent may be lost with it, so the micro-batch is any of the first three.
    lost = [re.sub("micro-batch [012]", "micro-batch *", text) for text in launch_bare(3, "trouble", "kill")]
    assert (
        lost[2]
        == (
            "RunError: error[rank-lost]: Rank 1 is gone without a word, while rank 2 waited for it "
            "(forward of `trouble`, stage 1 to 2, micro-batch *)."
        )
        or "rank 0 | error[rank-lost]: Rank 1 is gone without a word" in lost[2]
    )
    assert "Rank 1 is gone without a word" in lost[0]


def test_a_rank_that_leaves_in_a_step_is_reported_with_what_made_it_leave() -> None:
    result = launch(2, "trouble", "exit")
    assert said(result, 1) == "SystemExit: 5"
    assert said(result, 0).endswith("because rank 1 failed.\nrank 1 | SystemExit: 5"), result.stdout


def test_a_rank_that_hangs_is_reported_after_the_timeout() -> None:
    text = launch_bare(3, "trouble", "hang")[2]
    assert (
        text
        == (
            "RunError: error[timed-out]: Rank 2 waited 5 seconds for rank 1 in vain "
            "(forward of `trouble`, stage 1 to 2, micro-batch 2).\n"
            "help: rank 1 hangs, or needs longer than timeout= allows"
        )
        or "rank 0 | error[timed-out]: Rank 0 waited 5 seconds for rank 1 in vain" in text
    )


@pytest.mark.parametrize("scenario", ["different_models", "different_marks"])
def test_different_models_are_refused_on_every_rank_before_the_first_message(two: Finished, scenario: str) -> None:
    for rank in range(2):
        text = said(two, rank, scenario)
        assert "CallError: error[ranks-disagree]: Ranks disagree before the first step: the model is " in text
        assert "on rank 0 and " in text
        assert text.endswith("on rank 1.\nhelp: all ranks must build the same model and make the same calls")


def test_a_call_that_differs_on_one_rank_is_refused_on_all_and_the_next_step_is_fine(two: Finished) -> None:
    wrong = (
        "error[wrong-shape]: Input `x` has shape [6, 4], but 4 micro-batches of the recorded [2, 4] make [8, 4].\n"
        "help: give shape [8, 4], or build the pipeline with an example cut from such a batch"
    )
    quoted = "\n".join(f"rank 1 | {line}" for line in wrong.splitlines())
    mode = (
        "CallError: error[ranks-disagree]: Ranks disagree before step 3: the mode is train on rank 0 and evaluate on "
        "rank 1.\nhelp: all ranks must build the same model and make the same calls"
    )
    request = (
        "CallError: error[ranks-disagree]: Ranks disagree before step 4: the request is outputs=none, timeline=False "
        "on rank 0 and outputs=all, timeline=False on rank 1.\n"
        "help: all ranks must build the same model and make the same calls"
    )
    elsewhere = f"CallError: error[refused-elsewhere]: Rank 1 refused step 2, so all ranks do.\n{quoted}"
    assert said(two, 0, "refusals") == f"{elsewhere}\n{mode}\n{request}\nTrue"
    assert said(two, 1, "refusals") == f"CallError: {wrong}\n{mode}\n{request}\nTrue"


def test_a_rank_that_makes_fewer_steps_is_named() -> None:
    result = launch(2, "leaving")
    assert said(result, 0) == (
        "RunError: error[rank-ended]: Rank 1 ended before step 2, which rank 0 has begun.\n"
        "help: all ranks must make the same calls, for the same number of batches\nover"
    ), result.stderr


def test_a_loss_that_is_not_a_number_is_reported_on_every_rank(two: Finished) -> None:
    expected = "True\nwarning[loss-not-finite]: The loss, computed in stage 2, is nan in micro-batch 2."
    assert [said(two, rank, "odd_loss") for rank in range(2)] == [expected] * 2


def test_outputs_go_where_they_were_asked_for(two: Finished) -> None:
    whole = "{'logits': 'Tensor', 'hidden': 'tuple', 'none': 'NoneType'}"
    assert said(two, 0, "outputs") == f"nothing\n{whole}\n{whole}"
    assert said(two, 1, "outputs") == f"nothing\nnothing\n{whole}"


def test_the_users_own_messages_do_not_meet_the_pipelines(two: Finished) -> None:
    assert said(two, 0, "traffic") == "[1.0, 1.0, 1.0]\nTrue"
    assert said(two, 1, "traffic") == "[0.0, 0.0, 0.0]\nTrue"
