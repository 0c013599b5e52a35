"""The loss of a step, with what stages added to it, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.outcome import share_loss
from ppdsl.runtime.replicas.averaging import average_loss
from ppdsl.runtime.saying import share_said
from ppdsl.runtime.world import World

__all__ = ["Settled", "settle"]


@dataclass(frozen=True)
class Settled:
    """The numbers of a step.

    Attributes:
        loss: The weighted sum of the micro-batches' losses; None when nothing computes one.
        own: The same without auxiliary losses, as the model returns it.
        losses: Each micro-batch's, not weighted.
        aux: What auxiliary losses make of `loss`; None when there are none.
        metrics: The value of each metric.
    """

    loss: torch.Tensor | None
    own: torch.Tensor | None
    losses: tuple[float, ...] = ()
    aux: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def settle(compiled: Compiled, weights: Sequence[float], world: World) -> Settled:
    """Return the numbers of the step that has just run; all ranks must call it.

    Args:
        compiled: What ran.
        weights: What each micro-batch's loss counts.
        world: The ranks.
    """
    own, losses = share_loss(compiled, weights, world)
    said = share_said(compiled, weights, world)
    if own is None or not said.losses:
        own = average_loss(own, world)
        return Settled(own, own, losses, None, said.metrics)
    added = sum(
        (part * weight for part, weight in zip(said.losses, weights, strict=True) if weight),
        start=torch.zeros((), dtype=said.losses[0].dtype),
    )
    each = tuple(loss + float(part) for loss, part in zip(losses, said.losses, strict=True))
    loss, own, aux = (average_loss(number, world) for number in (own + added, own, added))
    return Settled(loss, own, each, aux, said.metrics)
