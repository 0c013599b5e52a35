"""What ran when on which rank: predicted by the simulator or measured in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppdsl.schedule.action import Action
from ppdsl.units import Seconds

__all__ = ["Event", "Timeline"]


@dataclass(frozen=True, slots=True)
class Event:
    """One computation of one rank, in seconds from the start of the step."""

    rank: int
    action: Action
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """Events of one step.

    Attributes:
        events: Sorted by start, then rank.
        ranks: Number of ranks, also those without an event.
        measured: False for a prediction.
        stage_labels: For each stage index the label to draw.
    """

    events: tuple[Event, ...]
    ranks: int
    measured: bool = False
    stage_labels: tuple[str, ...] = ()

    @property
    def makespan(self) -> Seconds:
        """Time from the first start to the last end."""
        if not self.events:
            return Seconds(0.0)
        return Seconds(max(e.end for e in self.events) - min(e.start for e in self.events))

    @property
    def busy(self) -> tuple[Seconds, ...]:
        """For each rank the time it computes."""
        total = [0.0] * self.ranks
        for event in self.events:
            total[event.rank] += event.end - event.start
        return tuple(Seconds(t) for t in total)

    @property
    def spans(self) -> tuple[Seconds, ...]:
        """For each rank the time from its first start to its last end; 0 for a rank without an event."""
        first, last = [math.inf] * self.ranks, [-math.inf] * self.ranks
        for event in self.events:
            first[event.rank] = min(first[event.rank], event.start)
            last[event.rank] = max(last[event.rank], event.end)
        return tuple(Seconds(max(0.0, end - start)) for start, end in zip(first, last, strict=True))

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in the step in which they wait, from 0 to 1."""
        span = self.makespan * self.ranks
        return 0.0 if span == 0 else 1.0 - sum(self.busy) / span
