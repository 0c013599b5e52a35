"""The driver of all XLA devices of a process: it goes through a plan in ticks and starts programs, without waiting."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from ppdsl.plan.messages import Message
from ppdsl.plan.ticks import Turn, ticks_of
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.guard import Programs, watched
from ppdsl.runtime.xla.stage import Move, Replicas, XlaStage
from ppdsl.runtime.xla.transport import Carrier, XlaMailbox
from ppdsl.schedule.action import ActionKind

__all__ = ["Driver"]

_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}


class Driver:
    """Runs the steps of one plan.

    Args:
        executors: Of all ranks.
        parcels: Every message with its parcel.
        mailbox: Where executors leave and find tensors.
        carrier: What moves them.
        move: Moves a tensor outside the plan to another device.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        parcels: Mapping[Message, Parcel],
        mailbox: XlaMailbox,
        carrier: Carrier,
        move: Move,
    ) -> None:
        # They hold this driver's stages and are held by their owner.
        self._executors = tuple(weakref.proxy(executor) for executor in executors)
        self._mailbox = mailbox
        self._carrier = carrier
        self._ticks = [
            ([parcels[message] for turn in turns for message in turn.needs], turns)
            for turns in ticks_of(executors[0].plan)
        ]
        carrier.plan(parcels.values())
        self._devices = [executor.device for executor in executors]
        copies: Replicas = {}
        self._stages = [XlaStage(state, e.device, move, copies) for e in executors for state in e.states]
        self.programs = Programs()

    def step(self) -> None:
        """Run all ranks' lists; returns when everything is started.

        Raises:
            RunError: A stage failed, or an operand is on a wrong device.
        """
        self.programs.steps += 1
        # What the caller left, which may be anything, and the step's inputs.
        for device in self._devices:
            xla_adapter.launch(device)
        for stage in self._stages:
            stage.begin()
        for device in self._devices:
            self.programs.start(device, f"The making of gradients on {device}")
        try:
            for parcels, turns in self._ticks:
                self._mailbox.deliver(parcels, self._carrier)
                for turn in turns:
                    self._run(turn)
            for executor in self._executors:
                executor.advance()
        finally:
            for stage in self._stages:
                stage.end()
        self._carrier.settle()

    def _run(self, turn: Turn) -> None:
        executor, device, action = self._executors[turn.rank], self._devices[turn.rank], turn.action
        state = executor.state_of(action.stage, action.microbatch)
        what = f"The {_WORDS[action.kind]} of stage {state.stage.label}"
        first = self.programs.steps == 1
        with watched(what, device, self.programs.report) if first else nullcontext():
            executor.advance(turn.stop)
        self.programs.start(device, what, (id(state),), "micro-batches of another size")
