"""Every trap, under every schedule that trains: as in the plain loop over the micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppdsl.schedule.registry import families
from tests.runtime.launch import launch
from tests.trust.entry import Entry, Setup, differences
from tests.trust.graphs import GRAPH_ENTRIES
from tests.trust.losses import LOSS_ENTRIES
from tests.trust.structures import STRUCTURE_ENTRIES

ENTRIES = (*GRAPH_ENTRIES, *STRUCTURE_ENTRIES, *LOSS_ENTRIES)
SCHEDULES = ("1f1b", "gpipe", "sequential")


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_pipeline_trains_like_the_plain_loop(entry: Entry, schedule: str, microbatches: int) -> None:
    assert differences(entry, microbatches, schedule=schedule) == []


def test_the_judge_sees_what_is_wrong() -> None:
    entry = ENTRIES[0]

    def otherwise(microbatches: int) -> Setup:
        calls.append(microbatches)
        setup = entry.make(microbatches)
        with torch.no_grad():
            setup.model.a.weight.add_(1e-6 * (len(calls) - 1))
        return setup

    calls: list[int] = []
    found = differences(replace(entry, make=otherwise), 2)
    assert any("loss" in text for text in found)
    assert any("gradient of a.weight" in text for text in found)
    assert any("output" in text for text in found)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_train_like_the_plain_loop(processes: int, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("worker.py")
    done = launch(processes, str(tmp_path), "3", "1f1b", "gpipe", seconds=300.0, worker=worker)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(processes)] == ["done"] * processes


def test_schedules_are_those_that_there_are() -> None:
    assert set(SCHEDULES) <= set(families())
