"""The message plan: for each rank its computations with their sends, receives and lifetimes.

One plan is compiled for all ranks. It is what `verify` proves, `simulate` prices, the timeline draws and the
executor runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.coded import Coded
from ppdsl.plan.numbered import NumberedRows
from ppdsl.plan.steps import Compute, Direction, Free, Message, Recv, Send, Step, Wait
from ppdsl.schedule.table import Schedule

__all__ = ["Compute", "Direction", "Free", "Message", "MessagePlan", "Recv", "Send", "Step", "Wait"]


@dataclass(frozen=True)
class MessagePlan:
    """All ranks' steps, in order.

    Attributes:
        graph: The stage graph whose edges the messages carry.
        schedule: The computations this plan was lowered from.
        rows: For each rank its steps; of a lowered plan they are made when somebody looks at them (`NumberedRows`).
        coded: The schedule as whole numbers, kept for proofs and simulations of a lowered plan (`coded_of` finds it).
    """

    graph: StageGraph
    schedule: Schedule
    rows: Sequence[tuple[Step, ...]]
    coded: Coded | None = field(default=None, repr=False, compare=False)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of the step, by sending rank, in the order in which it sends them."""
        if isinstance(self.rows, NumberedRows):
            return self.rows.messages
        return tuple(step.message for row in self.rows for step in row if isinstance(step, Send))

    @property
    def digest(self) -> str:
        """A hash of the whole plan; ranks compare it before the first message."""
        lines = self.rows.lines() if isinstance(self.rows, NumberedRows) else (map(str, row) for row in self.rows)
        text = "\n".join(map(" ".join, lines))
        return hashlib.sha256(f"{self.graph.digest}\n{text}".encode()).hexdigest()[:16]
