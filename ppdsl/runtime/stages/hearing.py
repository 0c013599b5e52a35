"""What one stage says while it runs, `pp.aux_loss` and `pp.metric`, kept by micro-batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ppdsl.diagnostics import Diagnostic, Label, RunError
from ppdsl.graph.ir import Stage
from ppdsl.recording.side import check_loss, check_metric
from ppdsl.source import Place

__all__ = ["DEAF", "Hearing", "Metric"]


class Metric(NamedTuple):
    """One value of a metric, detached."""

    name: str
    reduce: str
    value: torch.Tensor


class Hearing:
    """Hears a stage's program; the losses of a micro-batch become one.

    Args:
        stage: The stage.
        backward: Whether the step has a backward.

    Attributes:
        losses: For each micro-batch what it adds to the loss, detached; None where nothing was said.
        metrics: For each micro-batch what was reported.
    """

    def __init__(self, stage: Stage, *, backward: bool) -> None:
        self._stage = stage
        self._backward = backward
        self._now = 0
        self._said: list[tuple[torch.Tensor, float]] = []
        self.losses: list[torch.Tensor | None] = []
        self.metrics: list[list[Metric]] = []

    def begin(self, count: int) -> None:
        """Forget the step before, and begin one of `count` micro-batches."""
        self._said = []
        self.losses = [None] * count
        self.metrics = [[] for _ in range(count)]

    def at(self, microbatch: int) -> Hearing:
        """Hear `microbatch` from now on."""
        self._now = microbatch
        self._said.clear()
        return self

    def add_loss(self, tensor: Any, weight: float, place: Place) -> None:
        """Keep an auxiliary loss.

        Raises:
            RunError: There was none, or none with a gradient, when the stage was recorded.
        """
        check_loss(tensor, weight, place)
        gradient = self._backward and tensor.requires_grad
        if not self._stage.says or (gradient and not self._stage.has_backward):
            what = "an auxiliary loss with a gradient" if gradient else "an auxiliary loss"
            raise self._unexpected(what, place)
        self._said.append((tensor, weight))

    def add_metric(self, name: str, tensor: Any, reduce: str, place: Place) -> None:
        """Keep a metric.

        Raises:
            RunError: The stage said nothing when it was recorded.
        """
        check_metric(name, tensor, reduce, place)
        if not self._stage.says:
            raise self._unexpected(f"metric {name!r}", place)
        self.metrics[self._now].append(Metric(name, reduce, tensor.detach()))

    def take(self) -> torch.Tensor | None:
        """Return the loss that was said since `at`, with its graph; None when none was."""
        if not self._said:
            return None
        # Here and not where it was said: that may be inside a block without gradients.
        total: torch.Tensor | None = None
        for tensor, weight in self._said:
            part = tensor * weight
            total = part if total is None else total + part
        self._said.clear()
        if total is not None:
            self.losses[self._now] = total.detach()
        return total

    def _unexpected(self, what: str, place: Place) -> RunError:
        message = (
            f"Stage {self._stage.label} says {what} in micro-batch {self._now}, which it did not when it was recorded."
        )
        advice = "say it in every micro-batch: multiply it by 0 where it does not count"
        return RunError(Diagnostic("not-recorded", message, (Label(place.span),), advice))


class _Deaf:
    """Hears nothing: what runs again in backward has been said."""

    def add_loss(self, tensor: Any, weight: float, place: Place) -> None:
        """Leave a loss alone."""

    def add_metric(self, name: str, tensor: Any, reduce: str, place: Place) -> None:
        """Leave a metric alone."""


DEAF = _Deaf()
