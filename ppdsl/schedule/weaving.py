"""One stage's or one rank's order from its forwards and backwards: warm up, alternate, drain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from ppdsl.schedule.action import Action, ActionKind
from ppdsl.units import Microbatch, StageIndex

__all__ = ["actions_of", "weave", "weave_split"]


def actions_of(stage: int, kind: ActionKind, microbatches: int) -> list[Action]:
    """Return a stage's actions of one kind, ascending.

    >>> print(*actions_of(1, ActionKind.FORWARD, 3))
    1F0 1F1 1F2
    """
    index = StageIndex(stage)
    # The inner loop of every family: numbers from range() are micro-batches without being told so one by one.
    return [Action(index, kind, microbatch) for microbatch in cast(Iterable[Microbatch], range(microbatches))]


def weave(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then one forward and one backward as long as there are forwards, then the rest.

    >>> forwards, backwards = (actions_of(0, kind, 4) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
    >>> print(*weave(forwards, backwards, warm_up=2))
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    """
    steady = max(0, len(forwards) - warm_up)
    # Slices are put together by the interpreter itself, several times faster than a loop over the actions.
    woven: list[Action] = [*backwards[:steady], *backwards[:steady]]
    woven[0::2] = forwards[warm_up:]
    woven[1::2] = backwards[:steady]
    return (*forwards[:warm_up], *woven, *backwards[steady:])


def weave_split(
    forwards: Sequence[Action], inputs: Sequence[Action], weights: Sequence[Action], warm_up: int, delay: int
) -> tuple[Action, ...]:
    """Return the same with split backwards: the weight gradients follow the input gradients `delay` steps later.

    >>> kinds = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
    >>> print(*weave_split(*(actions_of(0, kind, 4) for kind in kinds), warm_up=1, delay=1))
    0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3
    """
    count = len(inputs)
    warm_up, delay = min(warm_up, count), min(delay, count)
    steady = count - warm_up
    row = list(forwards[:warm_up])
    for index, action in enumerate(inputs):
        if index < steady:
            row.append(forwards[warm_up + index])
        row.append(action)
        if index >= delay:
            row.append(weights[index - delay])
    row += weights[count - delay :]
    return tuple(row)
