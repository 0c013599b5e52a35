from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import ppdsl as pp
from tests.runtime.launch import Finished, launch, launch_bare, said
from tests.runtime.test_checkpoint import adamw, deep, piped, train, train_plain

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("state_worker.py")
TOGETHER = ("clipping", "clipping_errors", "token_mean", "ties", "filling", "keeping", "troubles")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def two(folder: Path) -> Finished:
    """All scenarios that leave the processes alive, on two processes."""
    return launch(2, str(folder), *TOGETHER, seconds=240, worker=WORKER)


def test_clipping_equals_one_process_bit_for_bit_whatever_ranks_own(two: Finished) -> None:  # UR-070, UR-117, UR-118
    assert [said(two, rank, "clipping") for rank in range(2)] == ["equal, True, 3", "equal, True, 0"], two.stderr


def test_one_ranks_wrong_gradients_are_an_error_on_every_rank(two: Finished) -> None:
    for rank in range(2):
        text = said(two, rank, "clipping_errors")
        assert "Ranks disagree before the clipping of the gradients: the clipping is max_norm=1.0" in text
        assert "RunError: error[norm-not-finite]: The norm of all gradients is nan" in text
        assert "rank 1 | b.bias: nan" in text
        assert "Parameter `b.weight` has a sparse gradient" in text
        assert text.endswith("\nTrue")


def test_token_mean_on_two_processes_equals_the_whole_batch(two: Finished) -> None:  # UR-042
    assert [said(two, rank, "token_mean") for rank in range(2)] == ["equal"] * 2


def test_tied_parameters_on_two_processes_train_like_one(two: Finished) -> None:  # UR-010, UR-011, UR-015 to UR-017
    assert [said(two, rank, "ties") for rank in range(2)] == ["equal"] * 2


def test_each_rank_fills_its_part_with_one_devices_values_and_reads_no_more(two: Finished) -> None:  # UR-115
    for rank, mine in ((0, "1 read, True, False"), (1, "9 read, False, True")):
        text = said(two, rank, "filling")
        assert text.startswith(f"{mine}\n{mine}\nCallError: error["), text
        assert "nothing.safetensors." in text


def test_what_two_ranks_saved_goes_on_in_one_process_and_in_the_plain_model(
    two: Finished, folder: Path
) -> None:  # UR-107, UR-111
    lines = [said(two, rank, "keeping").splitlines() for rank in range(2)]
    assert lines[0] == lines[1], two.stderr
    assert lines[0][1] == "step-6"
    expected = ast.literal_eval(lines[0][0])
    model = deep(stages=4)
    pipe = piped(model)
    optimizer = adamw(pipe)
    found = pp.load(pipe, folder / "kept", optimizer)
    assert (found.steps, found.extra, found.ranks) == (3, {"from": "two ranks"}, 2)
    model.drop.p = 0.0
    assert train(pipe, optimizer, range(3, 6)) == expected
    plain = deep()
    plain.drop.p = 0.0
    optimizer = adamw(plain)
    pp.load(plain, folder / "kept", optimizer)
    actual = train_plain(plain, optimizer, range(3, 6))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(list(plain.parameters()), list(model.parameters()), rtol=1e-8, atol=1e-10)


def test_what_one_rank_cannot_save_or_load_every_rank_reports(two: Finished) -> None:
    for rank in range(2):
        missing = said(two, rank, "missing")
        assert missing.startswith("CallError: error["), two.stderr
        assert re.search(r"There is no folder .*nowhere\.", missing)
        assert "the optimizer is none on rank 0 and AdamW on rank 1" in said(two, rank, "one optimizer")
        assert "4 tensors of the model are missing in the checkpoint" in said(two, rank, "another model")
        full = said(two, rank, "disk full")
        assert full.startswith("RunError: error[")
        assert "Rank 1 could not write its part of" in full
        assert "No space left on device" in full
        background = said(two, rank, "disk full in the background")
        assert background.startswith("RunError: error[save-failed]: Rank 1 could not write its part of")
        assert said(two, rank, "afterwards") == "1\nstep-2"


def test_a_rank_that_is_killed_while_it_saves_leaves_the_last_good_one(folder: Path) -> None:
    text = launch_bare(2, str(folder), "killed", seconds=60, worker=WORKER)[0]
    assert "Rank 1 did not come to the saving of the checkpoint within 6 seconds" in text
    model = deep(stages=3)
    pipe = piped(model)
    optimizer = adamw(pipe)
    assert pp.load(pipe, folder / "killed", optimizer).path.name == "step-3"
    model.drop.p = 0.0
    undisturbed = deep(stages=2)
    undisturbed.drop.p = 0.0
    whole = piped(undisturbed)
    theirs = adamw(whole)
    train(whole, theirs, range(3))
    assert train(pipe, optimizer, range(3, 6)) == train(whole, theirs, range(3, 6))
