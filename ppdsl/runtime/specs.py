"""What a spec chooses about a pipeline: schedule, micro-batches, placement, reduction, device, frozen stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ppdsl.contracts.check import check_contracts, parameter_counts
from ppdsl.diagnostics import Diagnostic, Label, PpdslError, SpecError
from ppdsl.recording.profile import measured_costs
from ppdsl.recording.record import Recording
from ppdsl.runtime.batches.batch import BatchAxis
from ppdsl.runtime.choosing import search_schedule
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.runtime.options import Options, Reduction
from ppdsl.runtime.spec_plan import room_of, schedule_of, spec_placement
from ppdsl.runtime.world import World
from ppdsl.runtime.xla.devices import XlaWorld
from ppdsl.schedule.registry import is_searched
from ppdsl.schedule.table import Schedule
from ppdsl.simulation.costs import flop_costs
from ppdsl.source import Span
from ppdsl.spec.partition import Options as StageOptions
from ppdsl.spec.partition import Partition
from ppdsl.spec.placing import known_ranks
from ppdsl.units import counted, format_bytes

__all__ = ["ReadSpec", "freeze", "read_spec", "require_contracts", "shared_costs", "with_model"]

Key = int | str


@dataclass(frozen=True)
class ReadSpec:
    """What `spec=` came to, before there are ranks to tell of an error.

    Attributes:
        partition: The spec, or None.
        device: Where it wants to run; None: where the parameters are.
        mesh: Sizes of the mesh that it wants; None: it has no replicas.
        error: What is wrong; all ranks have to be told before it is raised.
    """

    partition: Partition | None = None
    device: str | None = None
    mesh: Mapping[str, int] | None = None
    error: PpdslError | None = None

    def options(
        self,
        loss: Callable[..., Any] | None,
        schedule: str | Schedule | None,
        microbatches: int | None,
        placement: Mapping[Key, int] | None,
        reduction: Reduction | None,
        batch_axis: BatchAxis | None,
        *,
        recompute: bool | Collection[Key] | None,
    ) -> Options:
        """Return the caller's choices, with what the spec says where the caller said nothing.

        Raises:
            SpecError: The spec is wrong, or asks for something that has no effect here.
            ScheduleError: Its CSV file or its order is no schedule.
        """
        if self.error is not None:
            raise self.error
        partition, axes = self.partition, dict(batch_axis or {})
        if partition is None:
            return Options(
                loss,
                schedule or "1f1b",
                microbatches,
                placement,
                reduction or "mean",
                axes,
                recompute=recompute or False,
            )
        _refuse_unsupported(partition)
        settings = partition.settings
        if schedule is None and partition.schedule is not None:
            schedule = schedule_of(partition.schedule, Path(partition.file).parent)
        if microbatches is None and not isinstance(schedule, Schedule):
            microbatches = settings.microbatches
        declared = settings.batch_axis
        return Options(
            loss,
            schedule or "1f1b",
            microbatches,
            placement,
            reduction or settings.loss or "mean",
            axes or (dict(declared) if isinstance(declared, tuple) else {}),
            partition,
            declared if isinstance(declared, int) else None,
            _recomputed(partition) if recompute is None else recompute,
        )

    @property
    def compiled(self) -> tuple[Key, ...]:
        """Keys of the stages that the spec wants compiled."""
        if self.partition is None:
            return ()
        return tuple(key for key, options, _ in _stage_options(self.partition) if options.compile)


def read_spec(spec: object, parameters: Mapping[str, int] | None) -> ReadSpec:
    """Read what `spec=` gives: a partition, the path of a `.ppspec`, or None.

    Args:
        spec: As the user gave it.
        parameters: Values for the spec's own parameters, in place of those in the file.
    """
    try:
        partition = _partition_of(spec, parameters)
        return ReadSpec(partition, _device_of(partition), _mesh_of(partition))
    except PpdslError as error:
        return ReadSpec(error=error)


def _partition_of(spec: object, parameters: Mapping[str, int] | None) -> Partition | None:
    if isinstance(spec, str | Path):
        from ppdsl.spec.load import load_spec  # loads lark

        return load_spec(spec, dict(parameters or {}))
    if parameters:
        what = "no spec" if spec is None else "a spec that is checked already"
        advice = "give the path of the file as spec="
        raise SpecError(Diagnostic("unused-parameters", f"spec_params are given with {what}.", help=advice))
    if spec is None or isinstance(spec, Partition):
        return spec
    message = f"spec= is neither a path nor a partition, but {spec!r}."
    raise SpecError(Diagnostic("no-spec", message, help="give the path of a .ppspec file"))


def _device_of(partition: Partition | None) -> str | None:
    if partition is None:
        return None
    device = partition.settings.device
    if device == "cuda" and not torch.cuda.is_available():
        message, advice = "The spec asks for device cuda, but torch finds none.", "write device = cpu to try it without"
        raise SpecError(Diagnostic("no-device", message, _labels(partition, "device"), advice))
    return device


def _mesh_of(partition: Partition | None) -> dict[str, int] | None:
    """Return the mesh of a spec that has replicas; without them `pp` only says how many ranks are used."""
    mesh = None if partition is None else partition.settings.mesh
    sizes = {} if mesh is None else dict(mesh.axes)
    if partition is None or sizes.get("dp", 1) == 1:
        return None
    ranks = known_ranks(partition)
    return sizes if ranks is None else {**sizes, "pp": ranks}


def _labels(partition: Partition, setting: str) -> tuple[Label, ...]:
    spans = dict(partition.settings.spans)
    return (Label(spans[setting]),) if setting in spans else ()


def with_model(options: Options, recording: Recording, world: World) -> Options:
    """Return the options with what can be said once the model is recorded: ranks of its stages, axes of its inputs.

    Raises:
        SpecError: The spec is for more ranks than there are.
    """
    partition, graph = options.spec, recording.graph
    if partition is None or recording.resolution is None:
        return options
    axis, axes = options.default_axis, dict(options.batch_axis)
    if axis is not None:
        routes = [(route.name, route.meta) for route in graph.inputs]
        routes += [(route.name, route.meta) for route in graph.outputs]
        axes = {**{name: axis for name, meta in routes if len(meta.shape) > axis}, **axes}
    options = replace(options, batch_axis=axes)
    ranks = _ranks(partition, world)
    if isinstance(options.schedule, Schedule) or options.placement is not None:
        if partition.schedule is not None and partition.schedule.family is None and options.placement is None:
            spec_placement(partition, graph, recording.resolution.placement, options.schedule)  # the two must agree
        return options
    placement = spec_placement(partition, graph, recording.resolution.placement, options.schedule, ranks)
    if not is_searched(options.schedule):
        return replace(options, placement=placement)
    count = options.count_microbatches(len(placement))
    ranks_of = tuple(placement[stage.key] for stage in graph.stages)
    ranks = max(known_ranks(partition) or ranks or 1, max(ranks_of) + 1)
    room = room_of(partition, graph, ranks_of, ranks)
    found = search_schedule(options.schedule, graph, ranks_of, count, ranks, world, flop_costs(graph), room)
    return replace(options, schedule=found, microbatches=None)


def require_contracts(recording: Recording, schedule: Schedule, options: Options) -> None:
    """Check the contracts of the spec on the plan of a training step.

    Raises:
        SpecError: One is broken.
    """
    if options.spec is None or recording.outline is None:
        return
    counts = parameter_counts(recording.outline)
    report = check_contracts(options.spec, recording.graph, schedule.placement, schedule, counts=counts)
    if report.findings:
        raise SpecError(*report.findings)
    room = room_of(options.spec, recording.graph, schedule.placement, schedule.ranks)
    over = None if room is None else room.excess(schedule, recording.graph)
    if room is not None and over is not None:
        message = (
            f"Rank {over.rank} holds {format_bytes(int(over.size))} of values between stages under {schedule.name}, "
            f"but the limit leaves {format_bytes(int(room.limits[over.rank]))} beside parameters and gradients."
        )
        advice = "write schedule = auto, which keeps the limit, or use fewer or smaller micro-batches"
        raise SpecError(Diagnostic("does-not-fit", message, _labels(options.spec, "memory"), advice))


def _ranks(partition: Partition, world: World) -> int | None:
    """Number of processes; None when all ranks live in this one and there can be as many as are wanted.

    Raises:
        SpecError: The spec is for more.
    """
    if isinstance(world, InProcessWorld | XlaWorld):
        return None
    there = world.ranks_for(1, None)
    wanted = known_ranks(partition) or there
    if wanted > there:
        noun = "process" if there == 1 else "processes"
        message = f"The spec is for {wanted} ranks, but there {'is' if there == 1 else 'are'} {there} {noun}."
        advice = f"start {wanted} processes, or write the spec for {counted(there, 'rank')}"
        raise SpecError(Diagnostic("too-few-processes", message, _labels(partition, "ranks"), advice))
    return there


def shared_costs(
    partition: Partition | None, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], world: World
) -> dict[str, float] | None:
    """Return the seconds that a spec needs; measured ones are those of rank 0, so that all ranks divide alike.

    Raises:
        CallError: Another rank cannot measure.
        RecordingError: A module cannot run alone.
        SpecError: A cost file is wrong.
    """
    # On XLA devices the first run of a module would measure its compilation.
    here = world.holds(0) and not isinstance(world, XlaWorld)
    costs = measured_costs(partition, model, args, kwargs, device=world.device(0) if here else None)
    if costs is not None:
        world.agree("the measured times", {})
        costs = {str(name): float(seconds) for name, seconds in json.loads(world.gather(json.dumps(costs))[0]).items()}
    return costs


def freeze(recording: Recording, partition: Partition) -> bool:
    """Stop the gradients of the parameters of stages that the spec freezes; return whether any was trainable.

    Raises:
        SpecError: Another stage trains one of them.
    """
    frozen = {key: span for key, options, span in _stage_options(partition) if options.freeze}
    users: dict[int, tuple[str, torch.nn.Parameter, set[Key]]] = {}
    for stage, program in zip(recording.graph.stages, recording.programs, strict=True):
        for name, parameter in program.parameters:
            users.setdefault(id(parameter), (name, parameter, set()))[2].add(stage.key)
    changed = False
    for name, parameter, keys in users.values():
        others = sorted(map(str, keys - frozen.keys()))
        mine = sorted(map(str, keys & frozen.keys()))
        if mine and others:
            message = f"Stage {mine[0]} freezes `{name}`, which stage {others[0]} trains: it is one parameter."
            span = next(span for key, span in frozen.items() if str(key) == mine[0])
            raise SpecError(Diagnostic("frozen-tie", message, (Label(span),), "freeze both stages, or neither"))
        if mine and parameter.requires_grad:
            parameter.requires_grad_(False)
            changed = True
    return changed


def _stage_options(partition: Partition) -> Iterator[tuple[Key, StageOptions, Span]]:
    for stage in partition.stages:
        yield stage.key, stage.options, stage.span
    for split in partition.splits:
        for key in split.keys:
            yield key, split.options, split.span


def _recomputed(partition: Partition) -> tuple[Key, ...]:
    return tuple(key for key, options, _ in _stage_options(partition) if options.recompute == "full")


def _refuse_unsupported(partition: Partition) -> None:
    findings = []
    for key, options, span in _stage_options(partition):
        modules = options.recompute if isinstance(options.recompute, tuple) else None
        wanted = {"recompute": modules, "dtype": options.dtype}
        for name, value in wanted.items():
            if value not in (None, "none", False):
                message = f"Option `{name}` of stage {key} is not supported by the runtime yet."
                findings.append(Diagnostic("not-supported", message, (Label(span),), "leave it out"))
    if findings:
        raise SpecError(*findings)
