"""One recording made ready to run: its plan, and this process's stages wired to a transport."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ppdsl.graph.ir import OutputRoute, StageGraph, TensorMeta
from ppdsl.plan.lowering import lower
from ppdsl.plan.messages import MessagePlan
from ppdsl.recording.placing import place_program
from ppdsl.recording.programs import SourceKind, StageProgram
from ppdsl.recording.record import Recording
from ppdsl.runtime.choosing import choose_schedule
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout, dtype_of
from ppdsl.runtime.stage import StageState, TiedParameter
from ppdsl.runtime.ties import TieGroup, pairs_of
from ppdsl.runtime.transport import make_parcels
from ppdsl.runtime.world import World
from ppdsl.schedule.registry import build_schedule
from ppdsl.schedule.table import Schedule

__all__ = ["Compiled", "build_plan"]


def build_plan(
    recording: Recording,
    world: World,
    schedule: str | Schedule,
    microbatches: int,
    placement: Mapping[int | str, int] | None,
    *,
    backward: bool = True,
) -> MessagePlan:
    """Return the plan of a step.

    Args:
        recording: The stages.
        world: The ranks.
        schedule: A family's name, `auto`, or a schedule.
        microbatches: Number of micro-batches.
        placement: Rank of each stage key; None: as the schedule's family goes.
        backward: Whether the step has a backward; without it the forward-only schedule runs on the same placement.

    Raises:
        GraphError: The placement does not fit the stages.
        ScheduleError: The schedule does not fit the graph.
    """
    graph = recording.graph
    if isinstance(schedule, Schedule):
        if backward:
            return lower(schedule, graph)
        rows = build_schedule("forward_only", graph, schedule.placement, microbatches, schedule.ranks)
        return lower(rows, graph)
    return lower(choose_schedule(schedule, graph, microbatches, world, placement, backward=backward), graph)


class Compiled:
    """A recording with a plan, ready to run on this process's ranks.

    Args:
        recording: The stage programs.
        plan: The message plan of all ranks.
        world: The ranks.
        recompute: Keys of the stages that run forward again in backward.
    """

    def __init__(
        self, recording: Recording, plan: MessagePlan, world: World, recompute: Collection[int | str] = ()
    ) -> None:
        self.recording = recording
        self.plan = plan
        self._world = world
        self.graph: StageGraph = recording.graph
        self.schedule = plan.schedule
        self.placement = plan.schedule.placement
        self.backward = not plan.schedule.forward_only
        self.local = tuple(rank for rank in range(len(plan.rows)) if world.holds(rank))
        self.programs = tuple(p for p in recording.programs if self.placement[p.stage] in self.local)
        self.loss_rank = None if self.graph.loss is None else self.placement[self.graph.loss]
        self._devices = {rank: world.device(rank) for rank in self.local}
        self._opened = False
        self.recompute = frozenset(recompute)

    @property
    def outputs(self) -> tuple[OutputRoute, ...]:
        """The model's outputs."""
        return self.graph.outputs

    def device_of(self, stage: int) -> torch.device:
        """Return where a stage of this process computes."""
        given = self._devices[self.placement[stage]]
        if given is not None:
            return given
        program = self.recording.programs[stage]
        for _, parameter in program.parameters:
            found: torch.device = parameter.device
            return found
        for name in self.graph.stages[stage].buffers:
            buffer: torch.Tensor = self.recording.model.get_buffer(name)
            return buffer.device
        return torch.device("cpu")

    def move_parameters(self) -> None:
        """Move this process's parameters and buffers to its devices; the objects stay the user's own."""
        for program in self.programs:
            device = self._devices[self.placement[program.stage]]
            if device is None:
                continue
            with torch.no_grad():
                for _, parameter in program.parameters:
                    if not parameter.is_meta and parameter.device != device:
                        parameter.data = parameter.data.to(device)
                        if parameter.grad is not None:
                            parameter.grad = parameter.grad.to(device)
                for name in self.graph.stages[program.stage].buffers:
                    buffer = self.recording.model.get_buffer(name)
                    if not buffer.is_meta and buffer.device != device:
                        buffer.data = buffer.data.to(device)

    # ---------------------------------------------------------------- wiring, at the first step

    def open(self) -> None:
        """Open the plan's channels; every rank has to come here."""
        if not self._opened:
            self._world.connect(self.plan, pairs_of(self.ties))
            self._opened = True

    @cached_property
    def ties(self) -> tuple[TieGroup, ...]:
        """The tied parameters, in the order of their owners' names on all ranks."""
        groups = []
        for tie in sorted(self.graph.ties, key=lambda tie: tie.names[0]):
            parameter = self.recording.model.get_parameter(tie.names[0])
            ranks = tuple(self.placement[stage] for stage in tie.stages)
            held = [stage for stage, rank in zip(tie.stages, ranks, strict=True) if rank in self.local]
            dtype = str(parameter.dtype).removeprefix("torch.")
            layout = Layout.of(TensorMeta(tuple(parameter.shape), dtype, tuple(parameter.stride())))
            trainable = parameter.requires_grad
            parts = {stage: TiedParameter(parameter) for stage in held} if trainable else {}
            device = self.device_of(held[0]) if held else torch.device("cpu")
            mine = parameter if held else None
            groups.append(TieGroup(tie.names[0], mine, tie.stages, ranks, parts, trainable, layout, device))
        return tuple(groups)

    @cached_property
    def states(self) -> dict[int, StageState]:
        """The run-time state of each stage of this process, by stage index."""
        parts: dict[int, list[TiedParameter]] = {}
        for group in self.ties:
            for stage, part in group.parts.items():
                parts.setdefault(stage, []).append(part)
        for program in self.programs:
            place_program(program, self.device_of(program.stage))
        return {p.stage: self._state(p, parts.get(p.stage, ())) for p in self.programs}

    def _state(self, program: StageProgram, tied: Sequence[TiedParameter]) -> StageState:
        again = self.graph.stages[program.stage].key in self.recompute
        count, backward = self.schedule.microbatches, self.backward
        return StageState(self.graph, program, count, backward=backward, tied=tied, recompute=again)

    @cached_property
    def executors(self) -> tuple[Executor, ...]:
        """The interpreters of this process's ranks."""
        parcels = make_parcels(self.plan)
        executors = []
        for rank in self.local:
            states = {s: state for s, state in self.states.items() if self.placement[s] == rank}
            device = self._devices[rank] or next((self.device_of(s) for s in states), torch.device("cpu"))
            transport = self._world.transport(rank, parcels)
            executors.append(Executor(self.plan, rank, states, parcels, transport, device))
        return tuple(executors)

    @property
    def run_warnings(self) -> list[str]:
        """What this process's stages have said of themselves while they ran."""
        return [text for state in self.states.values() for text in state.warnings] if "states" in vars(self) else []

    # ---------------------------------------------------------------- a step

    def begin(
        self,
        microbatches: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[float],
        *,
        keep_outputs: bool,
        measure: bool,
    ) -> None:
        """Give the inputs of a step to the stages that use them, on their devices."""
        for group in self.ties:
            for part in group.parts.values():
                # What a failed step left behind.
                part.gradient = None
        loss_dtype = self._loss_dtype()
        moved: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for stage, state in self.states.items():
            device = self.device_of(stage)
            inputs = self._inputs_of(state, microbatches, device, moved)
            gradients = []
            if stage == self.graph.loss and self.backward:
                gradients = [torch.tensor(weight, dtype=loss_dtype, device=device) for weight in weights]
            state.begin(inputs, gradients, keep_outputs=keep_outputs)
        for executor in self.executors:
            executor.begin(measure=measure)

    def _inputs_of(
        self,
        state: StageState,
        microbatches: Sequence[Sequence[torch.Tensor]],
        device: torch.device,
        moved: dict[tuple[int, torch.device], list[torch.Tensor]],
    ) -> list[list[Any]]:
        used = [source.index for source in state.program.sources if source.kind is SourceKind.INPUT]
        for index in used:
            if (index, device) not in moved:
                layout = Layout.of(self.graph.inputs[index].meta)
                whole = (leaves[index].to(device, non_blocking=True) for leaves in microbatches)
                moved[index, device] = [layout.conform(piece) for piece in whole]
        count = len(self.graph.inputs)
        rows: list[list[Any]] = []
        for m in range(len(microbatches)):
            row: list[Any] = [None] * count
            for index in used:
                row[index] = moved[index, device][m]
            rows.append(row)
        return rows

    def _loss_dtype(self) -> torch.dtype:
        if self.graph.loss is None:
            return torch.float32
        results = self.recording.programs[self.graph.loss].results
        return next((dtype_of(result.meta.dtype) for result in results if result.loss), torch.float32)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Element type of the loss."""
        return self._loss_dtype()

    def losses(self) -> list[torch.Tensor]:
        """Return the loss of each micro-batch; empty in a process that does not compute it."""
        if self.graph.loss is None or self.graph.loss not in self.states:
            return []
        return [loss for loss in self.states[self.graph.loss].losses if loss is not None]

    def output_pieces(self, index: int) -> list[torch.Tensor]:
        """Return an output's tensor for each micro-batch; empty in a process that does not make it."""
        producer = self.graph.outputs[index].producer
        if producer not in self.states:
            return []
        return [kept[index] for kept in self.states[producer].outputs if index in kept]

    def finish(self) -> None:
        """Let go of the step's tensors."""
        for state in self.states.values():
            state.begin((), (), keep_outputs=False)
