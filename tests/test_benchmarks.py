"""The benchmarks run, and find equal numbers; how long anything takes is not for a test to judge."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_steps import run

pytestmark = [pytest.mark.distributed, pytest.mark.current]


@pytest.mark.parametrize("workload", ["tiny", "unet"])
def test_steps_are_measured_after_their_gradients_were_found_equal(workload: str) -> None:
    rows = run(workload, 2, 2, 6.0, "--schedules", "1f1b", "zbv")
    assert [(row["schedule"], row["stages"]) for row in rows] == [("1f1b", 2 if workload == "tiny" else 4), ("zbv", 4)]
    for row in rows:
        assert set(row["errors"]) == ({"ours", "torch"} if workload == "tiny" else {"ours"})
        assert all(0 <= error < 2e-4 for error in row["errors"].values())
