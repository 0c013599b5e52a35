"""Actions in the text form that PyTorch uses: stage, kind, micro-batch (`2F0`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ppdsl.units import Microbatch, StageIndex

__all__ = ["Action", "ActionKind", "action_of", "parse_action"]


class ActionKind(StrEnum):
    """What a rank does with one stage and one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one rank.

    >>> str(Action(StageIndex(2), ActionKind.FORWARD, Microbatch(0)))
    '2F0'
    """

    stage: StageIndex
    kind: ActionKind
    microbatch: Microbatch

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def action_of(stage: int, kind: ActionKind, microbatch: int) -> Action:
    """Return an action from plain numbers.

    >>> str(action_of(0, ActionKind.BACKWARD, 3))
    '0B3'
    """
    return Action(StageIndex(stage), kind, Microbatch(microbatch))


_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_action(text: str) -> Action:
    """Return the action that `text` names.

    Raises:
        ValueError: `text` is not a stage number, one of F, B, I, W, and a micro-batch number.

    >>> parse_action("13B2")
    Action(stage=13, kind=<ActionKind.BACKWARD: 'B'>, microbatch=2)
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no action; write stage, kind and micro-batch, as in 2F0")
    stage, kind, microbatch = match.groups()
    return action_of(int(stage), ActionKind(kind), int(microbatch))
