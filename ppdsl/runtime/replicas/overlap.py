"""What replicas put around a stage's computations: parameters are gathered, complete gradients sent on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ppdsl.recording.programs import StageProgram
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.processes.distributed import replicas_of
from ppdsl.runtime.ties import TieGroup
from ppdsl.runtime.world import World
from ppdsl.schedule.action import Action

__all__ = ["join_replicas", "leave_replicas"]


def join_replicas(
    executors: Sequence[Executor], programs: Sequence[StageProgram], ties: Sequence[TieGroup], world: World
) -> None:
    """Let the last backward of each stage, wherever its schedule has it, send the stage's gradients to the replicas.

    So they travel while other stages still work.

    Args:
        executors: The interpreters of this process.
        programs: Its stages.
        ties: Their tied parameters: these have to wait for the other stages.
        world: The ranks.
    """
    replicas = replicas_of(world)
    if replicas is None:
        return
    boxes = replicas.boxes
    if boxes is not None:
        for executor in executors:
            executor.wrap(boxes.around(programs, lambda: replicas.reduces))
    tied = {id(group.parameter) for group in ties}
    trained = {
        program.stage: [
            p
            for _, p in program.parameters
            if p.requires_grad and id(p) not in tied and not (boxes is not None and boxes.holds(p))
        ]
        for program in programs
    }

    def around(action: Action, last: bool, call: Callable[[int], None]) -> Callable[[int], None]:  # noqa: FBT001
        parameters: Sequence[torch.Tensor] = trained[action.stage]
        if not last or not parameters:
            return call

        def both(microbatch: int) -> None:
            call(microbatch)
            replicas.start(parameters)

        return both

    for executor in executors:
        executor.wrap(around)


def leave_replicas(world: World) -> None:
    """Give up what was gathered from replicas for a step, however it ended."""
    replicas = replicas_of(world)
    if replicas is not None and replicas.boxes is not None:
        replicas.boxes.rest()
