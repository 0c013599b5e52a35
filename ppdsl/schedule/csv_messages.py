"""The communications that PyTorch's runtime wants in a schedule's CSV file, for a chain of stages.

PyTorch runs rows as they stand, so the order of sends and receives has to be one that cannot block. A sender puts the
receive into the receiver's row at the time of its own send, as PyTorch's lowering does; the text equals what it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.csv_cells import Exchange, Sharding, Transfer, cell_text

__all__ = ["with_messages"]

Group = tuple[Action, ...]
_GATHERED = 3


def with_messages(
    rows: Sequence[Sequence[Group]], placement: Sequence[int], microbatches: int
) -> tuple[tuple[str, ...], ...]:
    """Return for each rank the cells of its row with messages and sharding marks.

    Args:
        rows: For each rank the groups of actions that run together.
        placement: For each stage its rank; the stages are a chain.
        microbatches: Number of micro-batches.

    Raises:
        ScheduleError: Ranks wait for each other.

    >>> from ppdsl.schedule.action import parse_action
    >>> rows = [[(parse_action(cell),) for cell in row.split()] for row in ("0F0 0B0", "1F0 1B0")]
    >>> for row in with_messages(rows, (0, 1), 1):
    ...     print(*row)
    0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD
    1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD
    """
    steps = [list(_reduced(_gathered(row), microbatches)) for row in rows]
    last = len(placement) - 1
    written: list[list[str]] = [[] for _ in rows]
    arrived: list[set[Transfer]] = [set() for _ in rows]
    made: set[tuple[bool, int, int]] = set()
    position = [0] * len(rows)
    waiting = [rank for rank, row in enumerate(steps) if row]
    while waiting:
        going = False
        for rank in list(waiting):
            step = steps[rank][position[rank]]
            actions = step if isinstance(step, tuple) else ()
            if not all(_arrived(action, placement, last, arrived[rank], made) for action in actions):
                continue
            written[rank].append(cell_text(step) if isinstance(step, tuple) else str(step))
            for action in actions:
                if action.kind is not ActionKind.WEIGHT_GRAD:
                    made.add((action.kind is ActionKind.FORWARD, action.stage, action.microbatch))
                message = _sent(action, placement, last)
                if message is not None:
                    send, receive = message
                    written[rank].append(str(send))
                    written[placement[receive.stage]].append(str(receive))
                    arrived[placement[receive.stage]].add(receive)
            position[rank] += 1
            if position[rank] == len(steps[rank]):
                waiting.remove(rank)
            going = True
        if not going:
            cell = steps[waiting[0]][position[waiting[0]]]
            text = cell_text(cell) if isinstance(cell, tuple) else str(cell)
            message_ = f"Rank {waiting[0]} waits at {text} for a value that nobody sends before it."
            raise ScheduleError(Diagnostic("deadlock", message_, help="verify the schedule for a chain of stages"))
    return tuple(map(tuple, written))


def _arrived(
    action: Action, placement: Sequence[int], last: int, here: set[Transfer], made: set[tuple[bool, int, int]]
) -> bool:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        giver, exchange = stage - 1, Exchange.RECV_FORWARD
    elif action.kind is ActionKind.WEIGHT_GRAD:
        return True
    else:
        giver, exchange = stage + 1, Exchange.RECV_BACKWARD
    if not 0 <= giver <= last:
        return True
    if placement[giver] == placement[stage]:
        return (action.kind is ActionKind.FORWARD, giver, microbatch) in made
    return Transfer(stage, exchange, microbatch) in here


def _sent(action: Action, placement: Sequence[int], last: int) -> tuple[Transfer, Transfer] | None:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        taker, send, receive = stage + 1, Exchange.SEND_FORWARD, Exchange.RECV_FORWARD
    else:
        taker, send, receive = stage - 1, Exchange.SEND_BACKWARD, Exchange.RECV_BACKWARD
    if action.kind is ActionKind.WEIGHT_GRAD or not 0 <= taker <= last or placement[taker] == placement[stage]:
        return None
    return Transfer(stage, send, microbatch), Transfer(taker, receive, microbatch)


def _gathered(row: Sequence[Group]) -> list[Group | Sharding]:
    """Gather the parameters of the next three stages ahead, and release those of others."""
    coming = _coming(row)
    active: set[int] = set()
    steps: list[Group | Sharding] = []
    for group, following in zip(row, coming, strict=True):
        for stage in sorted(active - set(following)):
            active.remove(stage)
            steps.append(Sharding(stage, "RESHARD"))
        for stage in following:
            if stage not in active:
                active.add(stage)
                steps.append(Sharding(stage, "UNSHARD"))
        steps.append(group)
    return [*steps, *(Sharding(stage, "RESHARD") for stage in sorted(active))]


def _coming(row: Sequence[Group]) -> list[list[int]]:
    """Return for each group the next stages to compute, itself first; found from the end in one pass."""
    found: list[list[int]] = []
    recent: list[int] = []
    for group in reversed(row):
        own = list(dict.fromkeys(action.stage for action in group))
        recent = [*own, *(stage for stage in recent if stage not in own)]
        found.append(recent[:_GATHERED])
    return found[::-1]


def _reduced(steps: Iterable[Group | Sharding], microbatches: int) -> Iterable[Group | Sharding]:
    """Sum a stage's gradients over replicas right after its last backward."""
    done: dict[int, int] = {}
    for step in steps:
        yield step
        for action in step if isinstance(step, tuple) else ():
            if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
                done[action.stage] = done.get(action.stage, 0) + 1
                if done[action.stage] == microbatches:
                    yield Sharding(action.stage, "REDUCE_GRAD")
