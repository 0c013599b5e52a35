"""How processes of one machine find each other: each listens at a name, tells it to all, and the higher ranks call.

The name is no file: it is seen in one network namespace alone, which is as far as two processes of one machine reach
each other by network addresses, too. Who calls has to say a word that only processes of this run have been told.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence

from ppdsl.runtime.processes.near import LARGEST, ROOM, Near

__all__ = ["SWITCH", "Gather", "connected"]

SWITCH = "PPDSL_LINES"
"""A variable of the environment: `0` leaves all messages to gloo."""

_HELLO = 10.0
"""Seconds for processes that have found each other to say who they are."""

Gather = Callable[[str], Sequence[str]]
"""Gives a text to all processes and returns everybody's."""


def connected(members: Sequence[int], own: int, gather: Gather, patience: float) -> Near:
    """Return the lines to the other ranks of a pipeline that are on this machine; all processes come here together.

    Args:
        members: For each rank the place of its process's text in what `gather` returns.
        own: This rank.
        gather: Gives a text to all processes and returns everybody's.
        patience: Seconds that a wait may last.

    Raises:
        OSError: A process that was found does not call.
    """
    wanted = os.environ.get(SWITCH) != "0"
    with contextlib.ExitStack() as opened:
        listener, note = _listener(len(members)) if wanted else (None, ("", ""))
        if listener is not None:
            opened.callback(listener.close)
        notes = gather(json.dumps(note))
        # The lower rank listens, the higher one calls.
        called: dict[int, socket.socket] = {}
        for rank in range(own):
            name, word = json.loads(notes[members[rank]])
            line = _call(name, word, own) if wanted else None
            if line is not None:
                called[rank] = line
        reached = [json.loads(text) for text in gather(json.dumps(list(called)))]
        complete = all(len(reached[member]) == rank for rank, member in enumerate(members))
        coming = {rank for rank in range(own + 1, len(members)) if own in reached[members[rank]]}
        heard = _answer(listener, note[1], coming) if listener is not None and coming else {}
        lines = {**called, **heard}
    return Near(lines, patience, complete=complete)


def _listener(ranks: int) -> tuple[socket.socket | None, tuple[str, str]]:
    """Return a socket that listens, its name, and the word that callers have to say; None where there are none."""
    name, word = secrets.token_hex(8), secrets.token_hex(16)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0ppdsl-{name}")
        listener.listen(ranks)
        listener.settimeout(_HELLO)
    except (AttributeError, OSError):
        return None, ("", word)
    return listener, (name, word)


def _call(name: str, word: str, own: int) -> socket.socket | None:
    if not name:
        return None
    try:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError):
        return None
    try:
        line.settimeout(_HELLO)
        line.connect(f"\0ppdsl-{name}")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
        if line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 2 * LARGEST:
            line.send(f"{word} {own}".encode())
            return line
    except OSError:
        pass
    line.close()
    return None


def _answer(listener: socket.socket, word: str, coming: set[int]) -> dict[int, socket.socket]:
    """Return a line to each rank that has called."""
    heard: dict[int, socket.socket] = {}
    while coming - heard.keys():
        line, _ = listener.accept()
        line.settimeout(_HELLO)
        try:
            said, _, rank = line.recv(LARGEST).decode(errors="replace").partition(" ")
        except OSError:
            said = rank = ""
        if secrets.compare_digest(said.encode(), word.encode()) and rank.isdecimal() and int(rank) in coming:
            heard[int(rank)] = line
        else:
            line.close()
    return heard
