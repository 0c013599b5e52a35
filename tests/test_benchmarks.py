"""The benchmarks run, and find equal numbers; how long anything takes is not for a test to judge."""

from __future__ import annotations

import pytest

from tests.benchmarks import bench_memory, gpu
from tests.benchmarks.bench_steps import run
from tests.benchmarks.huggingface import HUGGING_FACE
from tests.benchmarks.workloads import WORKLOADS

pytestmark = [pytest.mark.distributed, pytest.mark.current]


@pytest.mark.parametrize("workload", ["tiny", "unet"])
def test_steps_are_measured_after_their_gradients_were_found_equal(workload: str) -> None:
    rows = run(workload, 2, 2, 6.0, "--schedules", "1f1b", "zbv")
    assert [(row["schedule"], row["stages"]) for row in rows] == [("1f1b", 2 if workload == "tiny" else 4), ("zbv", 4)]
    for row in rows:
        assert set(row["errors"]) == ({"ours", "torch"} if workload == "tiny" else {"ours"})
        assert all(0 <= error < 2e-4 for error in row["errors"].values())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_memory_is_predicted_from_above_and_nothing_is_left_after_a_step(schedule: str) -> None:
    row = bench_memory.row(WORKLOADS["unet"], schedule)
    assert row["left"] == 0
    for predicted, measured in zip(row["predicted"], row["measured"], strict=True):
        assert 0.85 * predicted <= measured <= predicted


@pytest.mark.zoo
def test_the_gpu_script_goes_its_way_in_one_process_without_a_gpu_and_finds_equal_gradients() -> None:
    for work in (WORKLOADS["experts"], HUGGING_FACE["hf_llama"]):
        row = gpu.in_process(work, "zbv", rounds=1)
        assert 0 <= row["error"] < 2e-4
