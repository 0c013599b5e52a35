"""Small messages between processes of one machine, through sockets of its kernel (Unix domain, whole packets).

gloo hands a message from thread to thread on both sides, which costs more than a stage of a small model computes. Here
the main thread gives a packet to the kernel, and the receiver's main thread takes it from there when it needs it::

    send      tag and bytes -> kernel              returns at once; bytes that find no room there are kept, and go later
    receive   kernel -> the bytes of the tag       what comes for another tag meanwhile is kept until it is asked for

Whoever waits also sends what is left and takes what comes, so that ranks never wait for each other's room. Bigger
messages are gloo's, as are those to other machines: only processes that see one list of sockets find each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from typing import Any

import torch

__all__ = ["LARGEST", "ROOM", "Arrival", "Near", "Sent"]

LARGEST = 1 << 16
"""Bytes of the biggest message that goes this way; a socket holds several of them."""

ROOM = 1 << 22
"""Bytes that may be under way to one process, where the system allows as many."""

_HEAD = 8


class Near:
    """The lines of one process to others of its machine. Ranks are those of a pipeline.

    Args:
        lines: A connected socket for each rank.
        patience: Seconds that a wait may last.
        complete: Whether all ranks of the pipeline have lines to all others.

    Attributes:
        complete: The same.
        ended: Ranks at whose end a line was closed.
    """

    def __init__(self, lines: dict[int, socket.socket], patience: float, *, complete: bool = False) -> None:
        self._lines = lines
        self.complete = complete
        self._early: dict[tuple[int, int], deque[bytes]] = {}
        self._unsent: dict[int, deque[bytes]] = {}
        self.ended: set[int] = set()
        self._scratch = bytearray(_HEAD + LARGEST)
        self._source = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch)) + _HEAD
        for line in lines.values():
            line.setblocking(True)
            # A little more than the patience: who waits looks at the clock.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(patience + 0.05))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
        _open.add(self)

    def reaches(self, rank: int, size: int) -> bool:
        """Whether a message of `size` bytes to or from `rank` goes this way; both ends answer alike."""
        return size <= LARGEST and rank in self._lines

    def send(self, rank: int, tag: int, address: int, size: int) -> Sent:
        """Send bytes; they are copied.

        Args:
            rank: To whom.
            tag: What they are; the receiver asks for it.
            address: Where they lie.
            size: How many there are.
        """
        return self._send(rank, tag.to_bytes(_HEAD, "little"), (ctypes.c_char * size).from_address(address))

    def _send(self, rank: int, head: bytes, body: Any) -> Sent:
        if not self._unsent:
            try:
                self._lines[rank].sendmsg((head, body), (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError as error:
                return Sent(self, rank, error)
            else:
                return _SENT
        self._unsent.setdefault(rank, deque()).append(head + bytes(body))
        return Sent(self, rank)

    def receive(self, rank: int, tag: int, address: int, size: int, patience: float) -> None:
        """Take the bytes that `rank` sends under a tag.

        Args:
            rank: From whom.
            tag: What they are.
            address: Where they go.
            size: How many there are.
            patience: Seconds to wait.

        Raises:
            RuntimeError: They do not come.
        """
        end = time.monotonic() + patience
        while (rank, tag) not in self._early:
            self._check(rank, end)
            if self._unsent:
                self._turn(end)
            elif self._take(rank, (rank, tag), address, size):
                return
        packets = self._early[rank, tag]
        data = packets.popleft()
        if not packets:
            del self._early[rank, tag]
        _check_size(len(data), size)
        ctypes.memmove(address, data, size)

    def tell(self, tag: int, note: bytes) -> None:
        """Send a note to all ranks at the other ends; it is not longer than `LARGEST`."""
        head = tag.to_bytes(_HEAD, "little")
        for rank in self._lines:
            self._send(rank, head, note)

    def hear(self, tag: int, seconds: float) -> dict[int, bytes]:
        """Return the notes under a tag by rank: everybody's, or those that have come when the time is over."""
        end = time.monotonic() + seconds
        turned = False
        while True:
            found = {rank: self._early[rank, tag][0] for rank in self._lines if (rank, tag) in self._early}
            if len(found) == len(self._lines) or (turned and time.monotonic() >= end):
                return found
            if turned and self._lines.keys() - found.keys() <= self.ended:
                return found
            self._turn(end)
            turned = True

    def forget(self, tag: int) -> None:
        """Drop the notes under a tag."""
        for rank in self._lines:
            self._early.pop((rank, tag), None)

    def flush(self, rank: int, patience: float) -> None:
        """Return when all that was sent to `rank` has left.

        Raises:
            RuntimeError: The process is gone, or takes nothing.
        """
        end = time.monotonic() + patience
        while rank in self._unsent:
            self._check(rank, end)
            self._turn(end)

    def _check(self, rank: int, end: float) -> None:
        if rank in self.ended:
            raise RuntimeError("connection closed by peer")
        if time.monotonic() >= end:
            raise RuntimeError("timed out")

    def _take(self, rank: int, wanted: tuple[int, int], address: int, size: int, flags: int = 0) -> bool:
        """Read one packet of a rank; True when it is the wanted one, whose bytes are then in their place."""
        try:
            length = self._lines[rank].recv_into(self._scratch, 0, flags)
        except BlockingIOError:
            return False
        except OSError:
            length = 0
        if not length:
            self.ended.add(rank)
            return False
        tag = int.from_bytes(self._scratch[:_HEAD], "little")
        if (rank, tag) == wanted:
            _check_size(length - _HEAD, size)
            ctypes.memmove(address, self._source, size)
            return True
        self._early.setdefault((rank, tag), deque()).append(bytes(self._scratch[_HEAD:length]))
        return False

    def _turn(self, end: float) -> None:
        """Wait until something can be sent or read, and do it."""
        poll = select.poll()
        ranks = {}
        for rank, line in self._lines.items():
            if rank not in self.ended:
                ranks[line.fileno()] = rank
                poll.register(line, select.POLLIN | (select.POLLOUT if rank in self._unsent else 0))
        for number, event in poll.poll(max(0.0, end - time.monotonic()) * 1e3):
            rank = ranks[number]
            if event & ~select.POLLOUT:
                self._take(rank, (rank, -1), 0, 0, socket.MSG_DONTWAIT)
            if event & select.POLLOUT:
                self._push(rank)

    def _push(self, rank: int) -> None:
        packets = self._unsent[rank]
        try:
            while packets:
                self._lines[rank].send(packets[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                packets.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.ended.add(rank)
        del self._unsent[rank]

    # ---------------------------------------------------------------- the end

    def break_off(self) -> None:
        """Make every wait here and at the other ends of the lines end; any thread may call it."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the lines; what was sent still arrives."""
        for line in self._lines.values():
            line.close()


class Sent:
    """A message on its way.

    Args:
        near: The lines.
        rank: To whom.
        error: Why it could not be sent.
    """

    __slots__ = ("_error", "_near", "_rank")

    def __init__(self, near: Near | None = None, rank: int = 0, error: OSError | None = None) -> None:
        self._near = near
        self._rank = rank
        self._error = error

    @property
    def left(self) -> bool:
        """Whether it has left already, as nearly all do."""
        return self._near is None

    def wait(self, timeout: Any) -> None:
        """Return when it has left, and all that was sent to the same rank before.

        Raises:
            RuntimeError: It cannot be sent.
        """
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self._near is not None:
            self._near.flush(self._rank, timeout.total_seconds())


class Arrival:
    """A message that is awaited.

    Args:
        near: The lines.
        rank: From whom.
        tag: What it is.
        row: Where its bytes go.
    """

    __slots__ = ("_asked", "_near", "_row")

    def __init__(self, near: Near, rank: int, tag: int, row: torch.Tensor) -> None:
        self._near = near
        self._row = row
        self._asked = (rank, tag, row.data_ptr(), row.nbytes)

    def wait(self, timeout: Any) -> None:
        """Return when it is there.

        Raises:
            RuntimeError: It does not come.
        """
        self._near.receive(*self._asked, timeout.total_seconds())


_SENT = Sent()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))


def _check_size(arrived: int, wanted: int) -> None:
    if arrived != wanted:
        raise RuntimeError(f"{arrived} bytes arrived where {wanted} were awaited")


# -------------------------------------------------------------------- forks

_open: weakref.WeakSet[Near] = weakref.WeakSet()


def _close_all() -> None:
    for near in _open:
        near.close()


# Otherwise a line would outlive this process in those that it forked (workers of a DataLoader), and its end go unseen.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
