"""How the processes of a test say something on the pipe that all of them share."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

__all__ = ["keep_others_apart", "say"]

_channel = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1


def keep_others_apart() -> None:
    """From now on only `say` writes to the standard output; gloo, which prints in pieces, writes to standard error."""
    global _channel
    sys.stdout.flush()
    _channel = os.dup(1)
    os.dup2(2, 1)


def say(text: object) -> None:
    """Write each line with this rank's mark, all lines in one go."""
    rank = dist.get_rank()
    lines = "".join(f"<{rank}> {line}\n" for line in str(text).splitlines()).encode()
    while lines:
        lines = lines[os.write(_channel, lines) :]
