"""The interpreter of one rank's steps, over any transport.

A plan's steps become a flat list of instructions once; running one only fetches and stores slots of a stage and calls
the transport. Nothing is looked up by name, logged or timed unless a timeline is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, assert_never

import torch

from ppdsl.plan.messages import Compute, Direction, Free, MessagePlan, Recv, Send, Step, Wait
from ppdsl.runtime.device_clock import DeviceClock, Measured
from ppdsl.runtime.failure import Situation, stage_failure
from ppdsl.runtime.stages.stage import StageState
from ppdsl.runtime.transport import Parcel, Transport
from ppdsl.schedule.action import Action, ActionKind

__all__ = ["Around", "Executor", "Measured"]


Around = Callable[[Action, bool, Callable[[int], None]], Callable[[int], None]]
"""Takes an action, whether it completes the gradients of its stage, and what it does; returns what to do instead."""


class _Op(IntEnum):
    COMPUTE = 0
    WAIT = 1
    RECV = 2
    SEND = 3
    FREE = 4


class _Instruction(NamedTuple):
    op: _Op
    microbatch: int
    parcel: Any
    call: Callable[..., Any]
    step: Step


class Executor:
    """Runs one rank's list.

    Args:
        plan: The message plan.
        rank: Whose list.
        stages: The state of each stage of that rank, by stage index; connected to each other here.
        parcels: Every message of the plan with its parcel.
        transport: What carries tensors to and from other ranks.
        device: Where this rank computes; a timeline of a CUDA device is read from its own events.
        by_microbatch: For each micro-batch the state of each stage, where those of some are smaller; None: `stages`.

    Attributes:
        measures: Whether the step's computations are measured.
        measured: Their times; what drives XLA devices fills them in itself.
    """

    def __init__(
        self,
        plan: MessagePlan,
        rank: int,
        stages: Mapping[int, StageState],
        parcels: Mapping[Any, Parcel],
        transport: Transport,
        device: torch.device,
        by_microbatch: Sequence[Mapping[int, StageState]] | None = None,
    ) -> None:
        self.rank = rank
        self.stages = dict(stages)
        self._by_microbatch = by_microbatch or [stages] * plan.schedule.microbatches
        self.plan = plan
        self.device = device
        self._transport = transport
        for states in {id(states): states for states in self._by_microbatch}.values():
            for state in states.values():
                state.connect(dict(states))
        self._instructions = [self._compile(step, parcels) for step in plan.rows[rank]]
        self.position = 0
        self.measures = False
        self.measured: list[Measured] = []
        self._clock: DeviceClock | None = None

    def wrap(self, around: Around) -> None:
        """Put something around every computation, once, before the first step."""
        computations = {
            position: instruction.step.action
            for position, instruction in enumerate(self._instructions)
            if isinstance(instruction.step, Compute)
        }
        last = {action.stage: p for p, action in computations.items() if action.kind is not ActionKind.FORWARD}
        for position, action in computations.items():
            instruction = self._instructions[position]
            call = around(action, last.get(action.stage) == position, instruction.call)
            self._instructions[position] = instruction._replace(call=call)

    @property
    def states(self) -> tuple[StageState, ...]:
        """The state of each stage of this rank, for micro-batches of every size."""
        return tuple({id(s): s for states in self._by_microbatch for s in states.values()}.values())

    def state_of(self, stage: int, microbatch: int) -> StageState:
        """The state of a stage for a micro-batch."""
        return self._by_microbatch[microbatch][stage]

    def begin(self, *, measure: bool) -> None:
        """Go back to the first step of the list."""
        self.position = 0
        self.measures = measure
        self.measured = []
        self._clock = DeviceClock(self.device) if measure and self.device.type == "cuda" else None

    def times(self) -> list[Measured]:
        """Return when the computations of a measured step ran."""
        return self.measured if self._clock is None else self._clock.read()

    def drain(self) -> None:
        """Return when all that this rank sent has left."""
        self._transport.drain()

    def advance(self, stop: int | None = None) -> bool:
        """Run until the end of the list (True) or until a receive is not there yet (False).

        Args:
            stop: Run to this position of the plan's row only, as if the list ended there.

        Raises:
            RunError: A stage failed, or a peer did.
            failure: The `RunError` made of an error in a stage.
        """
        instructions, transport = self._instructions, self._transport
        position, end = self.position, len(self._instructions) if stop is None else stop
        try:
            while position < end:
                op, microbatch, parcel, call, _ = instructions[position]
                if op == _Op.COMPUTE:
                    if self.measures:
                        self._timed(position)
                    else:
                        call(microbatch)
                elif op == _Op.WAIT:
                    if not transport.ready(parcel):
                        return False
                    call(microbatch, transport.wait(parcel))
                elif op == _Op.RECV:
                    transport.recv(parcel)
                elif op == _Op.SEND:
                    transport.send(parcel, call(microbatch))
                else:
                    call(microbatch)
                position += 1
        except Exception as error:
            self.position = position
            failure = stage_failure(error, self.situation)
            if failure is error:
                raise
            raise failure from error
        finally:
            self.position = position
        return True

    def _timed(self, position: int) -> None:
        _, microbatch, _, call, step = self._instructions[position]
        if not isinstance(step, Compute) or self.device.type == "xla":
            call(microbatch)
            return
        if self._clock is not None:
            self._clock.run(step.action, call, microbatch)
            return
        start = time.perf_counter()
        call(microbatch)
        self.measured.append(Measured(step.action, start, time.perf_counter()))

    @property
    def situation(self) -> Situation:
        """Where in its list this rank stands."""
        if self.position >= len(self._instructions):
            return Situation(self.rank)
        step = self._instructions[self.position].step
        match step:
            case Compute(action):
                return Situation(self.rank, self.plan.graph.stages[action.stage], action=action)
            case Send(message) | Recv(message) | Wait(message):
                edge = self.plan.graph.edges[message.edge]
                forward = message.direction is Direction.FORWARD
                sends = isinstance(step, Send)
                index = edge.producer if forward == sends else message.consumer
                return Situation(self.rank, self.plan.graph.stages[index], message=message, value=edge.value)
            case Free(stage, _):
                return Situation(self.rank, self.plan.graph.stages[stage])
            case _:
                assert_never(step)

    # ---------------------------------------------------------------- compiling, once

    def _compile(self, step: Step, parcels: Mapping[Any, Parcel]) -> _Instruction:
        match step:
            case Compute(action):
                return _Instruction(_Op.COMPUTE, action.microbatch, None, self._computation(action), step)
            case Send(message):
                edge = self.plan.graph.edges[message.edge]
                if message.direction is Direction.FORWARD:
                    take = self.state_of(edge.producer, message.microbatch).value_taker(edge.index)
                else:
                    take = self.state_of(message.consumer, message.microbatch).gradient_taker(edge.index)
                return _Instruction(_Op.SEND, message.microbatch, parcels[message], take, step)
            case Recv(message):
                return _Instruction(_Op.RECV, message.microbatch, parcels[message], _nothing, step)
            case Wait(message):
                edge = self.plan.graph.edges[message.edge]
                if message.direction is Direction.FORWARD:
                    put = self.state_of(message.consumer, message.microbatch).value_putter(edge.index)
                else:
                    put = self.state_of(edge.producer, message.microbatch).gradient_putter(edge.index, message.consumer)
                return _Instruction(_Op.WAIT, message.microbatch, parcels[message], put, step)
            case Free(stage, microbatch):
                return _Instruction(_Op.FREE, microbatch, None, self.state_of(stage, microbatch).free, step)
            case _:
                assert_never(step)

    def _computation(self, action: Action) -> Callable[[int], None]:
        state = self.state_of(action.stage, action.microbatch)
        match action.kind:
            case ActionKind.FORWARD:
                return state.forward
            case ActionKind.BACKWARD:
                return state.backward
            case ActionKind.INPUT_GRAD:
                return state.input_gradients
            case ActionKind.WEIGHT_GRAD:
                return state.weight_gradients
            case _:
                assert_never(action.kind)


def _nothing() -> Sequence[torch.Tensor]:
    return ()
