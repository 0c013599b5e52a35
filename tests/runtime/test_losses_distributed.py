"""Losses, metrics and loss scales of several processes: those of one, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import Finished, launch, said

WORKER = Path(__file__).with_name("losses_worker.py")
RANKS = range(4)


@pytest.fixture(scope="module")
def done() -> Finished:
    result = launch(4, "said", "replicas", "scaler", "apart", seconds=180.0, worker=WORKER)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.distributed
def test_what_stages_say_is_the_same_on_every_rank(done: Finished) -> None:  # UR-045
    assert [said(done, rank, "said") for rank in RANKS] == ["said"] * 4


@pytest.mark.distributed
def test_what_replicas_say_is_over_the_whole_batch(done: Finished) -> None:  # UR-045
    assert [said(done, rank, "replicas") for rank in RANKS] == ["replicas"] * 4


@pytest.mark.distributed
def test_all_ranks_skip_a_step_when_a_gradient_of_one_overflows(done: Finished) -> None:  # UR-119, UR-023
    assert [said(done, rank, "scaler") for rank in RANKS] == ["[64.0, 32.0, 32.0, 64.0, 32.0, 32.0]"] * 4


@pytest.mark.distributed
def test_a_rank_that_forgets_the_scaler_is_named(done: Finished) -> None:
    texts = {said(done, rank, "apart") for rank in RANKS}
    assert len(texts) == 1
    assert "scale=4.0" in texts.pop()
