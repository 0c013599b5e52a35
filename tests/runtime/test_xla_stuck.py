"""XLA devices that get stuck end in one clear error, before torch_xla ends the process without one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ppdsl.runtime.xla import adapter, bounded_wait

pytestmark = pytest.mark.xla

ROOT = Path(__file__).parents[2]
POOLS = {"starved": 2, "tested": 1, "left_out": 16, "endless": 16, "reads": 16, "leaves": 16}
"""How each process gets stuck, and its threads for four devices."""
TOGETHER = 3


class Ended:
    """How a process ended.

    Attributes:
        status: Its exit status.
        said: On its standard output.
        error: On its standard error.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.said, self.error = process.communicate(timeout=300)
        self.status = process.returncode


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    """Run all the processes, some at a time: most of them only wait."""
    found: dict[str, Ended] = {}
    names = list(POOLS)
    for first in range(0, len(names), TOGETHER):
        running = {name: start(name) for name in names[first : first + TOGETHER]}
        try:
            found.update({name: Ended(process) for name, process in running.items()})
        finally:
            for process in running.values():
                process.kill()
    return found


def start(name: str) -> subprocess.Popen[str]:
    settings = {"XLA_THREAD_POOL_SIZE": str(POOLS[name]), "PPDSL_XLA_SELF_TEST_CHILD": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.stuck_worker", name],
        env={**os.environ, **settings}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def assert_clear(one: Ended, *words: str) -> None:
    """The error was written by Python, torch_xla did not end the process, and it did not hang at its end."""
    assert "error[xla-stuck]: " in one.error, one.error
    for text in words:
        assert text in one.error, one.error
    assert "Termination timeout" not in one.error
    assert one.status == 1, one.error


def test_devices_without_threads_of_their_own_are_named_with_the_remedy(ended: dict[str, Ended]) -> None:
    one = ended["starved"]
    assert_clear(one, "The transfer between XLA devices (forward of `tanh`, stage 0 to 1, micro-batch 0) did not end")
    assert "xla:0 | does not answer | last started: The forward of stage 0" in one.said
    assert "set XLA_THREAD_POOL_SIZE=4: 2 threads cannot run 4 devices at once; start the process again" in one.said


def test_after_it_a_step_is_refused_at_once_with_the_same_words(ended: dict[str, Ended]) -> None:
    one = ended["starved"]
    assert one.error.rstrip().endswith(one.said.strip()), "said once by the worker, raised again by its second step"


def test_the_test_at_the_start_is_bounded(ended: dict[str, Ended]) -> None:
    assert_clear(ended["tested"], "The test of a permutation between 4 XLA devices did not end")


def test_a_device_left_out_of_a_transfer_in_the_middle_of_training_is_named(ended: dict[str, Ended]) -> None:
    one = ended["left_out"]
    assert one.said == "stepped\n"
    assert_clear(one, "and xla:0, xla:1 and xla:2 do not answer.", "xla:3 | answers", "start each collective on all")
    assert "RunError" in one.error


def test_a_stage_that_never_ends_is_given_up_after_the_timeout(ended: dict[str, Ended]) -> None:
    one = ended["endless"]
    assert_clear(one, "no program has ended for ", "xla:2 | does not answer | last started: The forward of stage 2")
    assert "a stage that never ends, or give a longer timeout=" in one.error


def test_who_waits_inside_torch_xla_is_told_where(ended: dict[str, Ended]) -> None:
    one = ended["reads"]
    assert one.said == "waits\n"
    assert_clear(one, "A collective between XLA devices did not end", "The main thread waits here:", "made[0].cpu()")


def test_a_program_that_ends_meanwhile_does_not_hang_at_its_end(ended: dict[str, Ended]) -> None:
    one = ended["leaves"]
    assert one.said == "leaves\n"
    assert_clear(one, "A collective between XLA devices did not end")


# ---------------------------------------------------------------- what is not stuck


def test_an_error_of_torch_xla_is_raised_where_it_was_called() -> None:
    adapter.device_count()

    def fail() -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError, match="by zero"):
        bounded_wait.waiting(fail)
    assert bounded_wait.starting(len, "four") == 4


def test_a_thread_that_used_devices_leaves_none_behind() -> None:
    x = torch.ones(2, device="xla:1")
    adapter.host_copy(x)
    before = threading.active_count()
    for _ in range(5):
        thread = threading.Thread(target=adapter.host_copy, args=(x,))
        thread.start()
        thread.join()
    for _ in range(300):
        # Each ends a moment after the one that it served.
        if threading.active_count() > before:
            time.sleep(0.1)
    assert threading.active_count() <= before


def test_a_call_that_was_interrupted_does_not_hold_up_the_next_one() -> None:
    adapter.device_count()
    gate, begun = threading.Event(), threading.Event()

    class Interrupted(BaseException):
        pass

    def block() -> None:
        begun.set()
        gate.wait(60)

    def interrupt(self: object) -> None:
        begun.wait(60)
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_wait._Call, "wait", interrupt)  # as a signal would
        with pytest.raises(Interrupted):
            bounded_wait.waiting(block)
    try:
        assert bounded_wait.waiting(lambda: 5) == 5
    finally:
        gate.set()


def test_a_permutation_that_is_interrupted_reaches_all_devices_all_the_same() -> None:
    devices = [adapter.device_of(position) for position in range(adapter.device_count())]
    rows = [torch.full((3,), float(position), device=device) for position, device in enumerate(devices)]
    for device in devices:
        adapter.launch(device)
    pairs = [(position, (position + 1) % len(devices)) for position in range(len(devices))]

    class Interrupted(BaseException):
        pass

    def interrupt(self: object) -> None:
        raise Interrupted

    for _ in range(5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bounded_wait._Call, "wait", interrupt)  # as a signal would
            with pytest.raises(Interrupted):
                adapter.permute(rows, pairs)
        moved = adapter.permute(rows, pairs)
        assert [float(adapter.host_copy(tensor)[0]) for tensor in moved] == [3.0, 0.0, 1.0, 2.0]
