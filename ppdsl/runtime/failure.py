"""What a failure says: which rank, stage, micro-batch and direction, which source line, and the text."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from ppdsl.diagnostics import Diagnostic, Label, PpdslError, RunError
from ppdsl.graph.ir import Stage
from ppdsl.plan.messages import Direction, Message
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.source import Span

__all__ = ["Situation", "stage_failure", "user_span"]

_OWN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


@dataclass(frozen=True, slots=True)
class Situation:
    """Where in its list a rank stands.

    Attributes:
        rank: Who.
        stage: The stage it works for; None between stages.
        action: The computation it runs, or None.
        message: The message it sends or waits for, or None.
        value: Name of the message's value.
    """

    rank: int
    stage: Stage | None = None
    action: Action | None = None
    message: Message | None = None
    value: str = ""

    @property
    def text(self) -> str:
        """What it does, to follow a rank in a sentence (`in the forward of stage 1, micro-batch 2`)."""
        if self.action is not None and self.stage is not None:
            words = {
                ActionKind.FORWARD: "forward",
                ActionKind.BACKWARD: "backward",
                ActionKind.INPUT_GRAD: "input gradient",
                ActionKind.WEIGHT_GRAD: "weight gradient",
            }
            return f"in the {words[self.action.kind]} of stage {self.stage.label}, micro-batch {self.action.microbatch}"
        if self.message is not None and self.stage is not None:
            what = "the forward of" if self.message.direction is Direction.FORWARD else "the gradient of"
            return f"at {what} `{self.value}` for stage {self.stage.label}, micro-batch {self.message.microbatch}"
        return "between two steps of its list"


def stage_failure(error: Exception, situation: Situation) -> RunError:
    """Return the error to raise instead of `error`, which happened in `situation`.

    An error of ppdsl itself already says what is wrong and is returned as it is, as a `RunError`.
    """
    if isinstance(error, RunError):
        return error
    if isinstance(error, PpdslError):
        return RunError(*error.diagnostics)
    span = user_span(error) or (situation.stage.span if situation.stage else None)
    text = str(error).strip() or "no text"
    message = f"Rank {situation.rank} failed {situation.text}: {type(error).__name__}: {text}"
    labels = (Label(span, "raised here"),) if span else ()
    return RunError(Diagnostic("stage-failed", message, labels))


def user_span(error: BaseException) -> Span | None:
    """Return the innermost line of an error's traceback that is neither torch's nor ppdsl's, or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OWN) or frame.filename.startswith("<") or frame.lineno is None:
            continue
        start, last = (frame.colno or 0) + 1, frame.end_lineno or frame.lineno
        return Span(frame.filename, frame.lineno, start, last, (frame.end_colno or start) + 1)
    return None
