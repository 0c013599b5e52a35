"""Cells of schedule CSV files: computations, pairs that run together, messages, and PyTorch's sharding marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ppdsl.schedule.action import Action, ActionKind, action_of

__all__ = ["Cell", "Exchange", "Sharding", "Transfer", "cell_text", "joined", "parse_cell", "why_not"]


class Exchange(StrEnum):
    """What a rank does with a message; the stage is the sender's in a send and the receiver's in a receive."""

    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or a receive.

    >>> str(Transfer(3, Exchange.SEND_BACKWARD, 0))
    '3SEND_B0'
    """

    stage: int
    exchange: Exchange
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.exchange.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mark about a stage's parameters (`UNSHARD`, `RESHARD`, `REDUCE_GRAD`)."""

    stage: int
    word: str

    def __str__(self) -> str:
        return f"{self.stage}{self.word}"


Cell = tuple[Action, ...] | Transfer | Sharding
"""One action, two that run together, a message, or a sharding mark."""

_SIMPLE = re.compile(r"([0-9]{1,9})([FBIW]|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,9})")
_SHARDING = re.compile(r"([0-9]{1,9})(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_PART = re.compile(r"\s*([0-9]{1,9})([FB])([0-9]{1,9})\s*")


def parse_cell(text: str) -> Cell | None:
    """Return what a cell says, or None when it says nothing that a schedule can hold; the whole text must match.

    >>> parse_cell("1F0junk") is None, str(parse_cell("0SEND_F3")), [str(a) for a in parse_cell("(0F7;7B3)OVERLAP_F_B")]
    (True, '0SEND_F3', ['0F7', '7B3'])
    """
    if match := _SIMPLE.fullmatch(text):
        stage, kind, microbatch = int(match[1]), match[2], int(match[3])
        if len(kind) == 1:
            return (action_of(stage, ActionKind(kind), microbatch),)
        return Transfer(stage, Exchange(kind), microbatch)
    if match := _SHARDING.fullmatch(text):
        return Sharding(int(match[1]), match[2])
    if match := _PAIR.fullmatch(text):
        parts = [_PART.fullmatch(part) for part in match.groups()]
        if parts[0] and parts[1] and parts[0][2] == "F" and parts[1][2] == "B":
            return tuple(action_of(int(part[1]), ActionKind(part[2]), int(part[3])) for part in parts if part)
    return None


def joined(row: Sequence[Action], overlaps: Sequence[int]) -> list[tuple[Action, ...]]:
    """Return a row as groups of actions that run together: two where `overlaps` says so, else one.

    >>> [len(group) for group in joined([action_of(0, ActionKind.FORWARD, m) for m in range(3)], [1])]
    [1, 2]
    """
    starts, second = set(overlaps), {position + 1 for position in overlaps}
    return [tuple(row[at : at + 1 + (at in starts)]) for at in range(len(row)) if at not in second]


def cell_text(group: tuple[Action, ...]) -> str:
    """Return the cell of an action, or of two that run together.

    >>> cell_text((action_of(0, ActionKind.FORWARD, 1), action_of(3, ActionKind.BACKWARD, 0)))
    '(0F1;3B0)OVERLAP_F_B'
    """
    return str(group[0]) if len(group) == 1 else f"({';'.join(map(str, group))})OVERLAP_F_B"


def why_not(text: str) -> str:
    """Return what to write in place of a cell that says nothing.

    >>> why_not("0SEND_F"), why_not("2f0")
    ('give the micro-batch: 0SEND_F0', 'did you mean 2F0?')
    """
    if re.fullmatch(r"[0-9]+([FBIW]|(SEND|RECV)_[FB])", text):
        return f"give the micro-batch: {text}0"
    if "OVERLAP" in text:
        return "write a forward and a backward that run together as (0F1;3B0)OVERLAP_F_B"
    if parse_cell(text.upper()) is not None:
        return f"did you mean {text.upper()}?"
    if re.fullmatch(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]+", text):
        return f"leave the micro-batch out: {text.rstrip('0123456789')}"
    return "write stage, kind (F, B, I or W) and micro-batch, as in 2F0"
