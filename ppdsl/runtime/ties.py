"""Parameters that several stages use: one gradient for each stage, added in the order of stages on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.moving import start
from ppdsl.runtime.stages.stage import TiedParameter
from ppdsl.runtime.world import World

__all__ = ["FLAG", "TieGroup", "copy_from_owner", "pairs_of", "sum_gradients"]

FLAG = Layout(torch.Size((1,)), torch.uint8, (1,))
"""One byte that says whether there is something to send."""


@dataclass(frozen=True)
class TieGroup:
    """One tied parameter as this process sees it.

    Attributes:
        name: The owner's name of the parameter.
        parameter: This process's parameter object; None when it holds none of the stages.
        stages: The stages that use it, ascending; the first one owns it.
        ranks: For each of these stages its rank.
        parts: The gradients that the stages of this process keep apart, by stage.
        trainable: Whether it requires a gradient.
        layout: How the parameter and its gradient lie on the wire.
        device: Where this process holds the parameter.
    """

    name: str
    parameter: torch.nn.Parameter | None
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: Mapping[int, TiedParameter]
    trainable: bool
    layout: Layout
    device: torch.device

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold the parameter, ascending."""
        return tuple(sorted(set(self.ranks)))


def pairs_of(groups: Sequence[TieGroup]) -> list[tuple[int, int]]:
    """Return the ordered pairs of ranks between which tied parameters and their gradients travel."""
    return sorted({(a, b) for group in groups for a in group.holders for b in group.holders if a != b})


def sum_gradients(groups: Sequence[TieGroup], world: World) -> None:
    """Add the gradients of all stages to `.grad` of every rank's copy, in the order of stages.

    Every holder gets every stage's own gradient and adds them itself, so the copies stay equal to the last bit and the
    sum does not depend on the placement. A stage without gradient adds nothing; where no stage has one, `.grad` stays
    as it is.
    """
    for group in groups:
        if not group.trainable:
            continue
        total: torch.Tensor | None = None
        for stage, rank in zip(group.stages, group.ranks, strict=True):
            part = _part_of(group, stage, rank, world)
            if part is not None:
                total = part if total is None else total + part
        if total is None or group.parameter is None:
            continue
        if group.parameter.grad is None:
            group.parameter.grad = total
        else:
            group.parameter.grad.add_(total)
        start(group.device)


def _part_of(group: TieGroup, stage: int, rank: int, world: World) -> torch.Tensor | None:
    """Return one stage's own gradient, after giving it to the other holders.

    Raises:
        RunError: The gradient is sparse and other ranks need it.
    """
    tied = group.parts.get(stage)
    part = None if tied is None else tied.gradient
    if tied is not None:
        tied.gradient = None
    if all(world.holds(holder) for holder in group.holders):
        return None if part is None else world.share(part, rank, group.holders, group.layout, group.device)
    if part is not None and part.layout != torch.strided:
        message = f"The tied parameter `{group.name}` has a sparse gradient, which cannot be added across ranks."
        raise RunError(Diagnostic("sparse-tie", message, help="use sparse=False for the embedding"))
    cpu = torch.device("cpu")
    flag = torch.tensor([part is not None], dtype=torch.uint8) if tied is not None else None
    present = world.share(flag, rank, group.holders, FLAG, cpu)
    if present is None or not bool(present.item()):
        return None
    return world.share(part, rank, group.holders, group.layout, group.device)


def copy_from_owner(groups: Sequence[TieGroup], world: World) -> None:
    """Make every rank's copy of a tied parameter equal to that of the rank that owns it."""
    for group in groups:
        owner = group.ranks[0]
        if all(world.holds(holder) for holder in group.holders):
            continue
        mine = group.parameter.detach() if group.parameter is not None and world.holds(owner) else None
        value = world.share(mine, owner, group.holders, group.layout, group.device)
        if value is not None and group.parameter is not None and not world.holds(owner):
            with torch.no_grad():
                group.parameter.copy_(value)
