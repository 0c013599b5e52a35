"""One recording made ready to run: its plan, and this process's stages wired to a transport."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ppdsl.graph.ir import OutputRoute, StageGraph, TensorMeta
from ppdsl.plan.lowering import lower
from ppdsl.plan.messages import MessagePlan
from ppdsl.recording.placing import place_program
from ppdsl.recording.programs import StageProgram
from ppdsl.recording.record import Recording
from ppdsl.runtime.choosing import choose_schedule
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout, dtype_of
from ppdsl.runtime.moving import fetched, move_to, weights_on
from ppdsl.runtime.processes.distributed import replica_of
from ppdsl.runtime.randomness import RandomKeys
from ppdsl.runtime.replicas.overlap import join_replicas, leave_replicas
from ppdsl.runtime.stages.compilation import Compilation
from ppdsl.runtime.stages.drawing import drawing_of
from ppdsl.runtime.stages.hearing import Metric
from ppdsl.runtime.stages.stage import StageState, TiedParameter
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
        smaller: The same stages, as recorded for the smaller micro-batches of a batch that does not divide evenly.
        variants: For each micro-batch whether it has `recording` (0) or `smaller` (1); empty: all have `recording`.

    Attributes:
        compilation: Which stages `torch.compile` compiles.
    """

    def __init__(
        self,
        recording: Recording,
        plan: MessagePlan,
        world: World,
        recompute: Collection[int | str] = (),
        smaller: Recording | None = None,
        variants: Sequence[int] = (),
    ) -> None:
        self.recording = recording
        self.recordings = (recording,) if smaller is None else (recording, smaller)
        self.variants = tuple(variants) or (0,) * plan.schedule.microbatches
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
        self.compilation = Compilation()

    @property
    def outputs(self) -> tuple[OutputRoute, ...]:
        """The model's outputs."""
        return self.graph.outputs

    @cached_property
    def described(self) -> tuple[str, str]:
        """The stages, up to the hash of the rest of the model, and the plan, as ranks compare them before each step."""
        digest = "-".join(recording.digest for recording in self.recordings)
        model = f"{self.graph.name} with {len(self.graph.stages)} stages ({digest}"
        return model, f"{self.plan.schedule.name} ({self.plan.digest})"

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
        """Move this process's parameters and buffers to its devices; the objects stay the user's own.

        What several stages use goes to the first one's device.
        """
        placed: set[int] = set()
        for program in self.programs:
            device = self._devices[self.placement[program.stage]]
            if device is None:
                continue
            with torch.no_grad():
                for _, parameter in program.parameters:
                    if not parameter.is_meta and parameter.device != device and id(parameter) not in placed:
                        move_to(parameter, device)
                    placed.add(id(parameter))
                for name in self.graph.stages[program.stage].buffers:
                    buffer = self.recording.model.get_buffer(name)
                    if not buffer.is_meta and buffer.device != device and id(buffer) not in placed:
                        move_to(buffer, device)
                    placed.add(id(buffer))

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

    @property
    def states(self) -> dict[int, StageState]:
        """The run-time state of each stage of this process, by stage index; of a bigger micro-batch's."""
        return self._states_of[0]

    @cached_property
    def _states_of(self) -> tuple[dict[int, StageState], ...]:
        """The same for each recording; they share parameters and what ties keep apart."""
        parts: dict[int, list[TiedParameter]] = {}
        for group in self.ties:
            for stage, part in group.parts.items():
                parts.setdefault(stage, []).append(part)
        found = []
        for recording in self.recordings:
            programs = [recording.programs[program.stage] for program in self.programs]
            for program in programs:
                place_program(program, self.device_of(program.stage))
            found.append({p.stage: self._state(recording.graph, p, parts.get(p.stage, ())) for p in programs})
        return tuple(found)

    def _state(self, graph: StageGraph, program: StageProgram, tied: Sequence[TiedParameter]) -> StageState:
        again = graph.stages[program.stage].key in self.recompute
        count, backward = self.schedule.microbatches, self.backward
        device = self.device_of(program.stage)
        runs = self.compilation.program(graph.stages[program.stage], program, device)
        state = StageState(graph, runs, count, backward=backward, tied=tied, recompute=again)
        state.drawing = drawing_of(program.draws, device)
        self.compilation.settle(state, program, device)
        return state

    @cached_property
    def executors(self) -> tuple[Executor, ...]:
        """The interpreters of this process's ranks."""
        parcels = make_parcels(self.plan, [self.recordings[variant].graph for variant in self.variants])
        executors = []
        for rank in self.local:
            mine = [{s: t for s, t in states.items() if self.placement[s] == rank} for states in self._states_of]
            states = mine[0]
            device = self._devices[rank] or next((self.device_of(s) for s in states), torch.device("cpu"))
            transport = self._world.transport(rank, parcels)
            by_microbatch = [mine[variant] for variant in self.variants]
            executors.append(Executor(self.plan, rank, states, parcels, transport, device, by_microbatch))
        join_replicas(executors, self.programs, self.ties, self._world)
        return tuple(executors)

    @property
    def run_warnings(self) -> list[str]:
        """What this process's stages have said of themselves while they ran."""
        if "_states_of" not in vars(self):
            return []
        texts = [text for states in self._states_of for state in states.values() for text in state.warnings]
        return list(dict.fromkeys(texts))

    # ---------------------------------------------------------------- a step

    def seed(self, random: RandomKeys) -> None:
        """Draw the random numbers of the step that begins by its keys, one for each micro-batch."""
        count, replica = self.schedule.microbatches, replica_of(self._world)
        keys = random.next(training=self.backward, microbatches=count, replica=replica)
        for state in (state for states in self._states_of for state in states.values()):
            if state.drawing is not None:
                state.drawing.keys = keys

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
        moved: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for stage, state in ((s, t) for states in self._states_of for s, t in states.items()):
            device = self.device_of(stage)
            inputs = self._inputs_of(state, microbatches, device, moved)
            gradients = []
            if stage == self.graph.loss and self.backward:
                gradients = weights_on(device, weights, self.loss_dtype)
            shares = []
            if state.stage.says and self.backward:
                # Exact enough for whatever type the stage adds up in.
                exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
                shares = weights_on(device, weights, exact)
            state.begin(inputs, gradients, keep_outputs=keep_outputs, shares=shares)
        for executor in self.executors:
            executor.begin(measure=measure)

    def _inputs_of(
        self,
        state: StageState,
        microbatches: Sequence[Sequence[torch.Tensor]],
        device: torch.device,
        moved: dict[tuple[int, torch.device], list[torch.Tensor]],
    ) -> list[list[Any]]:
        used = [index for _, index in state.inputs_at]
        if not used:
            return []
        for index in used:
            if (index, device) not in moved:
                layouts = self._input_layouts[index]
                whole = (leaves[index].to(device, non_blocking=True) for leaves in microbatches)
                moved[index, device] = [
                    layouts[variant].conform(piece) for variant, piece in zip(self.variants, whole, strict=True)
                ]
        count = len(self.graph.inputs)
        rows: list[list[Any]] = []
        for m in range(len(microbatches)):
            row: list[Any] = [None] * count
            for index in used:
                row[index] = moved[index, device][m]
            rows.append(row)
        return rows

    @cached_property
    def _input_layouts(self) -> tuple[tuple[Layout, ...], ...]:
        """For each input its layout in each recording."""
        metas = ([route.meta for route in recording.graph.inputs] for recording in self.recordings)
        return tuple(tuple(map(Layout.of, each)) for each in zip(*metas, strict=True))

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """Element type of the loss."""
        if self.graph.loss is None:
            return torch.float32
        results = self.recording.programs[self.graph.loss].results
        return next((dtype_of(result.meta.dtype) for result in results if result.loss), torch.float32)

    def losses(self) -> list[torch.Tensor]:
        """Return the loss of each micro-batch; empty in a process that does not compute it."""
        if self.graph.loss is None or self.graph.loss not in self.states:
            return []
        losses = [self._states_of[variant][self.graph.loss].losses[m] for m, variant in enumerate(self.variants)]
        return fetched([loss for loss in losses if loss is not None])

    def said(self, stage: int) -> Iterator[tuple[torch.Tensor | None, Sequence[Metric]]]:
        """Yield for each micro-batch what a stage of this process added to the loss, and its metrics."""
        for m, variant in enumerate(self.variants):
            hearing = self._states_of[variant][stage].hearing
            yield hearing.losses[m], hearing.metrics[m]

    def output_pieces(self, index: int) -> list[torch.Tensor]:
        """Return an output's tensor for each micro-batch; empty in a process that does not make it."""
        producer = self.graph.outputs[index].producer
        if producer not in self.states:
            return []
        outputs = [self._states_of[variant][producer].outputs[m] for m, variant in enumerate(self.variants)]
        return fetched([kept[index] for kept in outputs if index in kept])

    def finish(self) -> None:
        """Let go of the step's tensors."""
        for states in self._states_of:
            for state in states.values():
                state.begin((), (), keep_outputs=False)
        leave_replicas(self._world)
