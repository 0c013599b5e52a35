"""Small messages between processes of one machine: all arrive, by tag; nobody waits for room for ever; ends show."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdsl.runtime.processes.finding import connected
from ppdsl.runtime.processes.near import LARGEST, Arrival, Near

pytestmark = pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET"), reason="no whole packets between processes here")

PATIENCE = 20.0


@contextmanager
def pair(patience: float = PATIENCE) -> Iterator[tuple[Near, Near]]:
    """Two processes' ends, ranks 0 and 1."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = Near({1: one}, patience), Near({0: two}, patience)
    for line in (one, two):
        # Room for two messages of the biggest kind, or three.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def send(near: Near, rank: int, tag: int, data: bytes) -> None:
    """Send bytes, and let go of where they lay."""
    place = ctypes.create_string_buffer(data, len(data))
    near.send(rank, tag, ctypes.addressof(place), len(data))


def receive(near: Near, rank: int, tag: int, size: int, patience: float = PATIENCE) -> bytes:
    """Return what comes under a tag."""
    place = ctypes.create_string_buffer(size)
    near.receive(rank, tag, ctypes.addressof(place), size, patience)
    return place.raw


def content(tag: int, size: int) -> bytes:
    """Bytes that tell messages apart."""
    return bytes((tag * 31 + place) % 251 for place in range(min(size, 300))).ljust(size, b"#")


Traffic = list[tuple[int, int]]
sizes = st.one_of(st.integers(1, 64), st.integers(1, LARGEST))
traffic = st.lists(sizes, min_size=1, max_size=40).map(lambda found: list(enumerate(found)))


@given(there=traffic, back=traffic, seed=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_all_arrive_by_their_tags_in_whatever_order_they_are_asked_for(
    there: Traffic, back: Traffic, seed: object
) -> None:
    """Both ends send everything first: the socket is full long before, so each has to take what comes meanwhile."""

    def run(near: Near, other: int, mine: Traffic, theirs: Traffic) -> list[tuple[int, bytes]]:
        for tag, size in mine:
            send(near, other, tag, content(tag, size))
        found = [(tag, receive(near, other, tag, size)) for tag, size in theirs]
        near.flush(other, PATIENCE)
        return found

    with pair() as (zero, one), ThreadPoolExecutor(2) as pool:
        asked = sorted(back, key=lambda _: seed.random()), sorted(there, key=lambda _: seed.random())  # type: ignore[attr-defined]
        runs = pool.submit(run, zero, 1, there, asked[0]), pool.submit(run, one, 0, back, asked[1])
        for future, sizes_of in zip(runs, asked, strict=True):
            assert future.result() == [(tag, content(tag, size)) for tag, size in sizes_of]


def test_one_tag_twice_arrives_in_order() -> None:
    with pair() as (zero, one):
        for data in (b"first", b"other", b"later"):
            send(zero, 1, 2 if data == b"other" else 1, data)
        assert [receive(one, 0, tag, 5) for tag in (2, 1, 1)] == [b"other", b"first", b"later"]


def test_a_wait_ends_after_its_time_or_when_the_other_end_closes_or_a_thread_breaks_it_off() -> None:
    with pair(0.2) as (zero, one):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            receive(zero, 1, 0, 4, 0.2)
        assert time.monotonic() - began >= 0.2
        send(one, 0, 5, b"last")
        one.close()
        assert receive(zero, 1, 5, 4) == b"last"
        with pytest.raises(RuntimeError, match="closed"):
            receive(zero, 1, 0, 4)
        row = torch.zeros(4, dtype=torch.uint8)
        with pytest.raises(RuntimeError):
            zero.send(1, 0, row.data_ptr(), 4).wait(timedelta(seconds=1))
    with pair() as (zero, one):
        threading.Timer(0.2, zero.break_off).start()
        with pytest.raises(RuntimeError, match="closed"):
            Arrival(zero, 1, 3, torch.zeros(4, dtype=torch.uint8)).wait(timedelta(seconds=PATIENCE))
        with pytest.raises(RuntimeError, match="closed"):
            receive(one, 0, 3, 4)


def test_what_finds_no_room_leaves_when_the_sender_waits() -> None:
    with pair(1.0) as (zero, one):
        for tag in range(50):
            send(zero, 1, tag, content(tag, LARGEST))
        with pytest.raises(RuntimeError, match="timed out"):
            zero.flush(1, 0.1)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: [receive(one, 0, tag, LARGEST) for tag in range(50)])
            zero.flush(1, PATIENCE)
            assert found.result() == [content(tag, LARGEST) for tag in range(50)]


class Table:
    """Gives texts of threads to all of them."""

    def __init__(self, count: int) -> None:
        self._texts = [""] * count
        self._barrier = threading.Barrier(count, timeout=PATIENCE)
        self.first: list[str] = []

    def gather(self, rank: int, text: str) -> Sequence[str]:
        """Return everybody's text."""
        self._texts[rank] = text
        self._barrier.wait()
        found = list(self._texts)
        self.first = self.first or found
        if rank == 0 and len(self.first) and found is not self.first:
            self.intrude()
        self._barrier.wait()
        return found

    def intrude(self) -> None:
        """Call somebody without knowing the word."""
        name = self.first[0].split('"')[1]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, suppress(OSError):
            stranger.connect(f"\0ppdsl-{name}")
            stranger.send(b"let me in 1")


def test_processes_find_each_other_and_nobody_else() -> None:
    table = Table(4)
    members = (3, 0, 2, 1)
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(connected, members, rank, partial(table.gather, process), PATIENCE)
            for rank, process in enumerate(members)
        ]
        ends = [run.result() for run in runs]
    assert all(end.complete for end in ends)
    for one, near in enumerate(ends):
        for other in range(4):
            assert near.reaches(other, LARGEST) == (one != other)
            assert not near.reaches(other, LARGEST + 1)
            if one != other:
                send(near, other, one, bytes([one, other]))
    assert all(receive(ends[a], b, b, 2) == bytes([b, a]) for a in range(4) for b in range(4) if a != b)
    for near in ends:
        near.close()


FORKED = """
import os, socket, time
from ppdsl.runtime.processes.near import Near
one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
near = Near({1: one}, 20.0)
if not os.fork():
    two.close()
    os.close(1)
    os.close(2)
    time.sleep(15.0)
    os._exit(0)
near.close()
two.settimeout(10.0)
print(two.recv(1))
"""


def test_a_forked_process_does_not_keep_a_line_open() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60.0, check=True)
    assert done.stdout == "b''\n"
