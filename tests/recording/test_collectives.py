"""Collectives of the user's own: kept where a module is called whole, everywhere else found when a pipeline is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import Finished, launch, said

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("collective_worker.py")
CODE = "collective-between-modules"


@pytest.fixture(scope="module")
def two() -> Finished:
    return launch(2, "kept", "refused", "text", seconds=120.0, worker=WORKER)


def test_collectives_inside_whole_modules_are_run_with_them(two: Finished) -> None:
    ways = ["a module", "statistics", "functional", "a loss module", "tensor-parallel", "tensor-parallel layers"]
    assert [said(two, rank, "kept").splitlines() for rank in range(2)] == [ways] * 2, two.stderr
    assert two.returncode == 0, two.stderr


def test_a_collective_in_the_loss_function_or_between_modules_is_refused_by_its_name_and_line(two: Finished) -> None:
    for rank in range(2):
        lines = said(two, rank, "refused").splitlines()
        assert len(lines) == 26, two.stderr
        for between, loss in zip(lines[::2], lines[1::2], strict=True):
            wanted = between.partition(":")[0].partition(",")[0]
            for line, where in ((between, "forward of Between"), (loss, "the loss function")):
                code, message, source = line.partition(": ")[2].split(" | ", 2)
                name = message.split("`")[1]
                assert code == CODE, line
                assert message == f"`{name}` of torch.distributed is called in {where}"
                expected = {"message": ("send", "recv")[rank], "function": "all_reduce"}.get(wanted, wanted)
                assert name in (expected, f"c10d.{expected.replace('_', '')}_"), line
                assert expected.replace("_", "") in source.replace("_", "") or "function(" in source, line


def test_the_whole_error_says_what_to_do(two: Finished) -> None:
    first, place, *lines = said(two, 0, "text").splitlines()
    assert first == (
        f"error[{CODE}]: `broadcast` of torch.distributed is called in the loss function, in code that is taken apart, "
        "where no stage program would repeat it."
    )
    assert place.startswith(f" --> {WORKER}:")
    assert [line.partition("| ")[2].strip() for line in lines[1:3]] == ["dist.broadcast(target, 0)", "^" * 25]
    assert lines[-1] == (
        "help: call it after the step, on the loss it returns, or inside a module that lies in one stage; replicas are "
        "averaged by mesh="
    )
