"""Messages of the user's own beside the pipeline's: between steps they are his affair, inside a step an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import launch_bare

WORKER = Path(__file__).with_name("traffic_worker.py")


@pytest.mark.distributed
def test_targets_may_be_broadcast_between_steps() -> None:  # UR-039
    assert launch_bare(2, "between", seconds=60.0, worker=WORKER) == ["True", "True"]


@pytest.mark.distributed
def test_a_broadcast_inside_the_loss_is_refused_on_every_rank_before_anything_runs() -> None:  # UR-039
    one, other = launch_bare(2, "inside", seconds=60.0, worker=WORKER)
    assert one == other
    assert one.startswith("RecordingError: error[collective-between-modules]")
    assert "broadcast" in one
