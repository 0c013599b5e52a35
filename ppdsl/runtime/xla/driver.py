"""The driver of all XLA devices of a process: it goes through a plan in ticks and starts programs, without waiting."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ppdsl.plan.messages import Message
from ppdsl.plan.ticks import Turn, ticks_of
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.guard import Programs, watched
from ppdsl.runtime.xla.stage import Move, Replicas, XlaStage
from ppdsl.runtime.xla.timing import Stopwatch
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
        executors: Of all ranks of this process.
        parcels: Every message with its parcel.
        mailbox: Where executors leave and find tensors.
        carrier: What moves them; it knows the plan.
        move: Moves a tensor outside the plan to another device.
        order: What is started together; None: the ticks of all ranks.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        parcels: Mapping[Message, Parcel],
        mailbox: XlaMailbox,
        carrier: Carrier,
        move: Move,
        order: Iterable[Sequence[Turn]] | None = None,
    ) -> None:
        # They hold this driver's stages and are held by their owner.
        self._executors = {executor.rank: weakref.proxy(executor) for executor in executors}
        self._mailbox = mailbox
        self._carrier = carrier
        self._ticks = [
            ([parcels[message] for turn in turns for message in turn.needs], turns)
            for turns in (ticks_of(executors[0].plan) if order is None else order)
        ]
        self._devices = {executor.rank: executor.device for executor in executors}
        copies: Replicas = {}
        self._stages = [XlaStage(state, e.device, move, copies) for e in executors for state in e.states]
        self.programs = Programs()
        self._stopwatch: Stopwatch | None = None

    def step(self) -> None:
        """Run all ranks' lists; returns when everything is started, or when a measured step has ended.

        Raises:
            RunError: A stage failed, or an operand is on a wrong device.
        """
        self.programs.steps += 1
        # What the caller left, which may be anything, and the step's inputs.
        for device in self._devices.values():
            xla_adapter.launch(device)
        for stage in self._stages:
            stage.begin()
        for device in self._devices.values():
            self.programs.start(device, f"The making of gradients on {device}")
        measures = any(executor.measures for executor in self._executors.values())
        self._stopwatch = stopwatch = Stopwatch(self._executors.values()) if measures else None
        try:
            with nullcontext() if stopwatch is None else stopwatch.running():
                self._run_ticks()
        finally:
            self._stopwatch = None
            for stage in self._stages:
                stage.end()
        if stopwatch is not None:
            stopwatch.finish()
        self._carrier.settle()

    def _run_ticks(self) -> None:
        for number, (parcels, turns) in enumerate(self._ticks):
            if self._stopwatch is not None:
                self._stopwatch.delivering()
            self.deliver(number, parcels)
            for turn in turns:
                self.run(turn)
        for executor in self._executors.values():
            executor.advance()

    def deliver(self, number: int, parcels: Sequence[Parcel]) -> None:
        """Bring what the turns of a tick need, before they are started; `number` counts the ticks of a step."""
        self._mailbox.deliver(parcels, self._carrier)

    def run(self, turn: Turn) -> None:
        """Start one computation.

        Raises:
            RunError: It failed, or an operand is on a wrong device.
        """
        executor, device, action = self._executors[turn.rank], self._devices[turn.rank], turn.action
        state = executor.state_of(action.stage, action.microbatch)
        what = f"The {_WORDS[action.kind]} of stage {state.stage.label}"
        watch: AbstractContextManager[None] = nullcontext()
        if self._stopwatch is not None:
            watch = self._stopwatch.launching(turn.rank, action, device, waits=bool(turn.needs))
        first = self.programs.steps == 1
        with watched(what, device, self.programs.report) if first else nullcontext():
            executor.advance(turn.stop)
        with watch:
            self.programs.start(device, what, (id(state),), "micro-batches of another size")
