"""The self-test of collectives ends in time with a reason, whatever a device does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ppdsl.cli.doctor import examine
from ppdsl.diagnostics import RunError
from ppdsl.runtime.inspection.bounded import ENDED, lines_of_module
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla import collectives as c
from ppdsl.runtime.xla.collectives import launching, testing
from ppdsl.runtime.xla.collectives.cases import CASES

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.device_count()
    monkeypatch.setattr(testing, "_known", {})


def child(*lines: str) -> Callable[..., Iterator[str]]:
    """Stand in for the process of the test."""

    def said(*_: object) -> Iterator[str]:
        yield from lines

    return said


def test_all_collectives_pass_and_the_command_says_so() -> None:
    found = {check.name: check for check in examine("xla", 200)}
    assert found["collectives"].found == f"all {len(CASES)} are right"
    assert found["transport permute"].status == "ok"
    assert found["devices"].found == "xla:0 to xla:3"
    assert {check.status for check in found.values()} == {"ok"}


def test_devices_without_threads_of_their_own_end_the_test_and_not_this_process() -> None:
    """One thread for four devices: the first replica waits for the others for ever."""
    starved = {"XLA_THREAD_POOL_SIZE": "1", "PPDSL_XLA_SELF_TEST_CHILD": "1"}
    lines = list(lines_of_module("ppdsl.runtime.xla.collectives.cases", ["send"], 120, starved))
    assert lines[-1] == f"{ENDED}it was ended by SIGABRT" or lines[0].startswith("ppdsl failed: send: The send is not")


def test_a_test_that_hangs_is_ended() -> None:
    begun = time.monotonic()
    lines = list(lines_of_module("ppdsl.runtime.xla.collectives.cases", ["send"], 0.2))
    assert lines == [f"{ENDED}it did not end within 0.2 seconds"]
    assert time.monotonic() - begun < 60


def test_what_hangs_is_left_out_and_the_rest_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = [name for name in CASES if name != "send"]
    answers = iter([
        child(f"{ENDED}it was ended by SIGABRT"),
        child(
            "noise",
            *(f"ppdsl passed: {name}" for name in rest if name != "gather"),
            "ppdsl failed: gather: result 1 is wrong",
            ENDED,
        ),
    ])  # fmt: skip
    monkeypatch.setattr(testing, "lines_of_module", lambda *given: next(answers)(*given))
    verdicts = {verdict.collective: verdict for verdict in testing.self_test()}
    assert set(verdicts) == set(CASES)
    assert [name for name in CASES if not verdicts[name].passed] == ["send", "gather"]
    assert verdicts["gather"].reason == "result 1 is wrong"
    x = torch.ones(2, device="xla:0")
    with pytest.raises(RunError) as caught:
        c.send(x, 1)
    (told,) = caught.value.diagnostics
    assert "send does not work on the XLA devices of this process: its test ran in a process" in told.message
    assert told.help == "say transport='all_reduce', which works here"
    assert c.recv(c.send(x, 1, "all_reduce"), 1).cpu().tolist() == [1, 1]


def test_after_two_that_hang_the_rest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "lines_of_module", child(f"{ENDED}it did not end within 9 seconds"))
    monkeypatch.setenv("XLA_THREAD_POOL_SIZE", "3")
    verdicts = testing.self_test()
    assert [verdict.collective for verdict in verdicts] == list(CASES)
    assert not any(verdict.passed for verdict in verdicts)
    with pytest.raises(RunError) as caught:
        c.all_reduce([torch.ones(2, device="xla:0")])
    assert caught.value.diagnostics[0].help is not None
    assert "set XLA_THREAD_POOL_SIZE to 4 or more" in caught.value.diagnostics[0].help


def test_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    everything = child(*(f"ppdsl passed: {name}" for name in CASES), ENDED)
    monkeypatch.setattr(testing, "lines_of_module", lambda *given: calls.append(given) or everything())
    assert testing.self_test() == testing.self_test()
    assert len(calls) == 1


def test_chips_that_one_process_owns_are_tested_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "device_kind", lambda: "TPU")
    monkeypatch.setattr(testing, "lines_of_module", None)
    assert all(verdict.passed for verdict in testing.self_test())


def test_what_is_never_computed_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, device="xla:0")
    adapter.launch_tensors([x], adapter.device_of(0))
    launching.wait_for([x], 30, "This")
    monkeypatch.setattr(adapter, "when_ready", lambda *_: None)
    with pytest.raises(RunError, match=r"The send is not finished after 0.1 seconds: a replica does not take part"):
        launching.wait_for([x], 0.1, "The send")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("is_spmd", True, "The process is in SPMD mode"),
        ("replica_count", 8, "This process drives 4 of the 8 XLA devices"),
    ],
)
def test_a_process_that_does_not_drive_all_devices_is_refused(
    name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, name, lambda: value)
    with pytest.raises(RunError, match=words):
        c.send(torch.ones(2, device="xla:0"), 1)
