"""Times of a CUDA device come from events in its queue; a stand-in for the device shows the order of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ppdsl.runtime import device_clock
from ppdsl.schedule.action import parse_action


class Queue:
    """A device whose clock goes on with each computation, and that nothing waits for but `synchronize`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at: float | None = None

        def record(self, stream: object) -> None:
            assert stream == "stream"
            self.at = found.now

        def elapsed_time(self, other: Event) -> float:
            assert self.at is not None
            assert other.at is not None
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: 100.0)
    return found


def test_times_are_milliseconds_of_the_device_after_a_moment_of_the_process(queue: Queue) -> None:
    queue.now = 5000.0
    clock = device_clock.DeviceClock(torch.device("cuda", 0))

    def takes(milliseconds: float) -> Any:
        def call(microbatch: int) -> None:
            queue.now += milliseconds

        return call

    clock.run(parse_action("0F0"), takes(250), 0)
    queue.now += 1000
    clock.run(parse_action("0B0"), takes(500), 0)
    assert queue.waits == 1
    assert [(str(m.action), m.start, m.end) for m in clock.read()] == [("0F0", 100.0, 100.25), ("0B0", 101.25, 101.75)]
    assert queue.waits == 2
