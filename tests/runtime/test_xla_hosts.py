"""A pipeline on the XLA devices of two processes trains like the plain model, and ends as a whole when a part does.

Each process owns two devices of the CPU client and drives two ranks; between processes there is gloo.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runtime.launch import Finished, launch, launch_bare, said

pytestmark = [pytest.mark.xla, pytest.mark.distributed]

WORKER = Path(__file__).with_name("xla_hosts_worker.py")
TRAINING = ("schedules", "traffic", "edges", "few_ranks", "other_rows", "whole_run", "refusals", "failures", "unsent")


@pytest.fixture(scope="module")
def trained() -> Finished:
    """Run all scenarios that both processes survive in one start of torch_xla."""
    result = launch(2, *TRAINING, seconds=240.0, worker=WORKER)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


def both(result: Finished, scenario: str) -> tuple[list[str], list[str]]:
    first, second = (said(result, rank, scenario).splitlines() for rank in range(2))
    return first, second


def test_every_kind_of_schedule_gives_the_numbers_of_the_plain_model(trained: Finished) -> None:
    for lines in both(trained, "schedules"):
        assert [line.partition(":")[0] for line in lines] == ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "1f1b"]
        assert all("4 ranks" in line for line in lines)
        assert [line.rpartition(" ")[2] for line in lines] == ["permute", "host", "permute", "permute", "permute"]


def test_only_what_leaves_a_process_is_copied_to_its_host(trained: Finished) -> None:
    for lines in both(trained, "traffic"):
        found = re.fullmatch(r"(\d+) messages leave, (\d+) copies to the host, 0 compiled", lines[1])
        assert found is not None, lines
        assert 0 < int(found[1]) == int(found[2])
        assert lines[2] == "outbox left: False"


def test_integers_truth_values_and_values_without_gradient_go_between_processes(trained: Finished) -> None:
    for lines in both(trained, "edges"):
        assert len(lines) == 1


def test_a_process_may_have_fewer_ranks_than_devices_but_not_none(trained: Finished) -> None:
    for lines in both(trained, "few_ranks"):
        text = "\n".join(lines)
        assert "3 ranks" in text
        assert "error[xla-idle-process]: The pipeline has 2 ranks, so the process of rank 2-3 has none." in text
        assert "error[xla-few-devices]: The pipeline has 5 ranks or more, but 2 processes have 4 XLA devices" in text


def test_batches_of_other_sizes_train_alike(trained: Finished) -> None:
    assert both(trained, "other_rows") == (["alike"], ["alike"])


def test_a_whole_run_clips_evaluates_saves_and_loads(trained: Finished) -> None:
    for lines in both(trained, "whole_run"):
        assert lines[1:] == ["state: True, 11 of 20", "times of 4 ranks", "saved: ['step-7']", "loaded: 7 of 7"]


def test_what_cannot_be_is_refused_by_both_processes(trained: Finished) -> None:
    first, second = ("\n".join(lines) for lines in both(trained, "refusals"))
    for text in (first, second):
        assert "error[xla-replicas]" in text
        assert "error[xla-processes]: A pipeline on the XLA devices of several processes needs gloo" in text
        assert "error[ranks-disagree]: Ranks disagree before step 1: the call is" in text
        assert "on rank 0-1 and" in text
    assert "error[unknown-transport]: There is no transport 'pigeon'." in first
    assert "error[refused-elsewhere]: Rank 0 refused the start of the XLA devices" in second


def test_a_stage_that_fails_ends_both_processes_with_one_error_that_names_it(trained: Finished) -> None:
    texts = ["\n".join(lines) for lines in both(trained, "failures")]
    for stage, (failed, other) in {1: (0, 1), 2: (1, 0)}.items():
        cause = f"error[stage-failed]: Rank {stage} failed in the forward of stage {stage}, micro-batch 2: ValueError"
        assert re.search(rf"^{re.escape(cause)}: the ink is spilled$", texts[failed], re.MULTILINE)
        names = ("0-1", "2-3")
        assert f"error[other-rank-failed]: Rank {names[other]} stopped" in texts[other]
        assert f"because rank {names[failed]} failed.\nrank {names[failed]} | {cause}" in texts[other]
    for text in texts:
        assert text.count("error[pipeline-ended]") == 2
        assert text.splitlines()[-1].startswith("1f1b:"), "a new pipeline trains"


def test_a_tensor_that_cannot_be_sent_ends_both_processes(trained: Finished) -> None:
    first, second = ("\n".join(lines) for lines in both(trained, "unsent"))
    cause = "error[xla-not-sent]: Rank 0 could not send forward of `embed`, stage 0 to 3, micro-batch 0: RuntimeError"
    assert first.startswith(f"{cause}: Out of memory")
    assert f"because rank 0-1 failed.\nrank 0-1 | {cause}" in second


def test_a_killed_process_ends_the_other_one_in_time() -> None:
    first, _ = launch_bare(2, "killed", seconds=120.0, worker=WORKER)
    assert "error[rank-lost]: Rank 2-3 is gone without a word, while rank 0-1 waited for it" in first
    assert first.endswith("in time: True")
