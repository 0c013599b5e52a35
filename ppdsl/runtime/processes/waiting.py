"""Waiting for another rank's bytes on the CPU, and saying why they do not come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.processes.board import Board
from ppdsl.runtime.processes.near import Near

__all__ = ["destroy", "no_connection", "wait_for"]

_PATIENCE = 0.1
"""Seconds to give a rank that has just closed its connections to say why."""


def wait_for(
    work: Any, peer: int, text: str, board: Board, silent: set[int], *, interrupted: Callable[[], bool]
) -> None:
    """Wait for the moving of bytes with `peer`.

    Args:
        work: What torch returned for it.
        peer: The other rank, as the board counts them.
        text: What moves ("forward of `skip`, stage 0 to 2, micro-batch 1").
        board: Where other ranks publish that they failed.
        silent: A rank that will not say anything any more is added to it.
        interrupted: Whether this process has closed the channels itself.

    Raises:
        RunError: It failed, or took too long.
        lost: The store of torch.distributed failed first.
    """
    started, me, other = time.monotonic(), board.name, board.names[peer]
    board.waits.begin(peer, text)
    try:
        work.wait(timedelta(seconds=board.timeout))
        board.waits.end()
    except RuntimeError as error:
        late = time.monotonic() - started >= board.timeout
        lost = _raise_published(board, f"while waiting for rank {other} ({text})", 0.0 if late else _PATIENCE)
        if lost is not None and interrupted() and not late:
            # The peer may well be there.
            raise lost from error
        chain = board.waits.chain(peer) if late and lost is None else ()
        last = chain[-1].peer if chain else peer
        silent.add(last)
        if late:
            message = f"Rank {me} waited {board.timeout:g} seconds for rank {other} in vain ({text})."
            others = "".join(
                f"rank {board.names[w.rank]} waits for rank {board.names[w.peer]} ({w.text}); " for w in chain
            )
            advice = f"{others}rank {board.names[last]} hangs, or needs longer than timeout= allows"
            if lost is not None:
                advice = f"rank {other} hangs, or the way to it is cut; the store of torch.distributed is lost, too"
            raise RunError(Diagnostic("timed-out", message, help=advice)) from error
        message = f"Rank {other} is gone without a word, while rank {me} waited for it ({text})."
        # With the store gone, the peer may only be one of those that this has ended.
        doubt = "the store of torch.distributed is lost, too: its process may have ended first" if lost else None
        raise RunError(Diagnostic("rank-lost", message, help=doubt)) from error


def no_connection(name: str, error: Exception) -> Diagnostic:
    """Return what to say when torch could not connect the processes of a group; `name` is this rank's."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    message = f"Rank {name} could not connect to the other ranks: {first}"
    advice = "a rank died just now, or gloo's address is wrong; GLOO_SOCKET_IFNAME names the network interface"
    return Diagnostic("not-connected", message, help=advice)


def destroy(groups: list[Any]) -> None:
    """Close lines, and connections and threads of groups; torch itself would keep these until the process ends."""
    while groups:
        group = groups.pop()
        if isinstance(group, Near):
            group.close()
            continue
        # At the end of a process the user, or torch, may have been faster.
        if group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)


def _raise_published(board: Board, waiting: str, patience: float) -> RunError | None:
    """Raise what another rank has published; one that gives up closes its connections a moment before.

    Returns:
        Why nothing can be known, if the store is lost.

    Raises:
        RunError: There is something.
    """
    try:
        board.raise_failure(waiting, patience)
    except RunError as error:
        if error.diagnostics[0].code != "store-lost":
            raise
        return error
    return None
