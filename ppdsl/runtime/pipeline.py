"""`pp.pipeline`: a marked model as a pipeline that trains like the plain loop over its micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.plan.messages import MessagePlan
from ppdsl.runtime.batch import Batch, BatchAxis, check_names, slice_like, split_batch
from ppdsl.runtime.compiled import Compiled, build_plan
from ppdsl.runtime.distributed import DistributedWorld
from ppdsl.runtime.explanation import explain
from ppdsl.runtime.inprocess import InProcessWorld
from ppdsl.runtime.outcome import StepResult, check_outputs, collect_outputs, collect_timeline, share_loss
from ppdsl.runtime.ownership import local_names, owned_keys
from ppdsl.runtime.ties import copy_from_owner, sum_gradients
from ppdsl.runtime.world import World
from ppdsl.schedule.table import Schedule
from ppdsl.timeline import Timeline

if TYPE_CHECKING:
    from ppdsl.recording.record import Recording

__all__ = ["Pipeline", "Reduction", "pipeline"]

Reduction = str | Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Any]
"""`mean`, `sum`, or a function of a micro-batch's and the whole batch's tensors by name; it returns the weight."""

Devices = str | torch.device | Sequence[str | torch.device] | None


def pipeline(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    targets: Any = None,
    spec: object = None,
    loss: Callable[..., torch.Tensor] | None = None,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    placement: Mapping[int | str, int] | None = None,
    reduction: Reduction = "mean",
    batch_axis: BatchAxis | None = None,
    devices: Devices = None,
    timeout: float = 300.0,
    runtime: str | None = None,
) -> Pipeline:
    """Return a pipeline that runs `model` in the stages it is marked with.

    Nothing of the model is copied or wrapped: each rank runs its stages on the model's own modules and parameters.

    Args:
        model: The marked model. On ranks that do not run a stage its parameters may be on `meta`.
        args: Example arguments for one micro-batch.
        kwargs: Example keyword arguments for one micro-batch.
        targets: Example targets for one micro-batch: one tensor, or a tuple for several. Without them the loss is
            recorded at the first step.
        spec: Not supported yet.
        loss: `loss(output, *targets)`, or None when `forward` returns the loss itself (a scalar, or an output with
            `loss`).
        schedule: `1f1b`, `gpipe`, another family's name, or a `Schedule`.
        microbatches: Micro-batches in a step; None: as many as there are stage keys.
        placement: Rank of each stage key; None: one rank for each key, in order.
        reduction: How the micro-batches' losses are added. `mean` weighs each by its share of the rows, `sum` with 1; a
            function gets the tensors of the micro-batch and of the whole batch by name and returns the weight.
        batch_axis: Axis of the batch by name of an input or output, where shapes do not say it; None for a tensor that
            every micro-batch gets whole.
        devices: In one process, the device of all ranks or of each rank; under torch.distributed this process's
            device. None: parameters stay where they are, or, with NCCL, go to the local CUDA device.
        timeout: Seconds a rank waits for another one before it ends with an error.
        runtime: `inprocess` or `distributed`; None: distributed when torch.distributed is initialised.

    Returns:
        The pipeline.

    Raises:
        CallError: An argument is wrong, or ranks disagree.
        GraphError: The stages cannot be placed.
        MarkError: A mark is misplaced.
        RecordingError: The forward pass cannot become a graph of stages.
        ScheduleError: The schedule does not fit the graph.
    """
    options = _Options(loss, schedule, microbatches, placement, reduction, dict(batch_axis or {}))
    _check_options(options, spec, timeout, runtime)
    world = _make_world(devices, timeout, runtime)
    try:
        built = Pipeline(model, args, dict(kwargs or {}), _as_tuple(targets), world, options)
    except Exception as error:
        world.refuse("the first step", error)
        raise
    world.agree("the first step", built.facts)
    return built


class _Options(NamedTuple):
    loss: Callable[..., torch.Tensor] | None
    schedule: str | Schedule
    microbatches: int | None
    placement: Mapping[int | str, int] | None
    reduction: Reduction
    batch_axis: dict[str, int | None]


class _Call(NamedTuple):
    """A call that has passed all checks."""

    compiled: Compiled
    batch: Batch
    weights: tuple[float, ...]
    outputs: str
    timeline: bool
    shapes: str


class Pipeline:
    """A model that runs in stages; made by `pipeline`.

    `step` trains, `evaluate` and calling it run forward only. Everything else is plain data about the stages, or this
    rank's part of the model under the model's own names.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...] | None,
        world: World,
        options: _Options,
    ) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._targets = targets
        self._world = world
        self._options = options
        self._steps = 0
        self._ties_equal = False
        self._timeline: Timeline | None = None
        self._recordings: dict[Any, Recording] = {}
        self._compiled: dict[Any, Compiled] = {}
        with_loss = options.loss is not None and targets is not None
        first = self._record(with_loss=with_loss)
        keys = len({stage.key for stage in first.graph.stages})
        given = options.schedule.microbatches if isinstance(options.schedule, Schedule) else options.microbatches
        self._microbatches = keys if given is None else given
        check_names(options.batch_axis, first.graph.inputs, first.graph.outputs)
        self._main = self._compile(with_loss=with_loss, backward=True)

    # ---------------------------------------------------------------- running

    def step(
        self, *args: Any, targets: Any = None, outputs: str = "none", timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Run forward and backward of all micro-batches of a batch and add their gradients to `.grad`.

        Under `torch.no_grad()` it runs forward only.

        Args:
            *args: The model's arguments for the whole batch, the same on every rank.
            targets: What the loss function gets beside the output: one tensor, or a tuple for several.
            outputs: `none`; `last`: the model's output on the rank of the last stage; `all`: on every rank.
            timeline: Whether to measure every computation.
            **kwargs: The model's keyword arguments.

        Returns:
            The loss on every rank, and what was asked for.

        Raises:
            CallError: The call does not fit the plan, or ranks disagree.
            RunError: A stage failed, or another rank did.
        """
        backward = torch.is_grad_enabled()
        return self._run(args, kwargs, _as_tuple(targets), outputs=outputs, timeline=timeline, backward=backward)

    def evaluate(
        self, *args: Any, targets: Any = None, outputs: str = "none", timeline: bool = False, **kwargs: Any
    ) -> StepResult:
        """Run forward only, without gradients; the model stays in the mode it is in.

        Args:
            *args: As for `step`.
            targets: As for `step`; without them there is no loss, unless `forward` returns it.
            outputs: As for `step`.
            timeline: As for `step`.
            **kwargs: As for `step`.

        Returns:
            The loss, when there is one, and what was asked for.

        Raises:
            CallError: The call does not fit the plan, or ranks disagree.
            RunError: A stage failed, or another rank did.
        """
        return self._run(args, kwargs, _as_tuple(targets), outputs=outputs, timeline=timeline, backward=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own output for the whole batch, on every rank, without gradients.

        Raises:
            CallError: The call does not fit the plan, or ranks disagree.
            RunError: A stage failed, or another rank did.
        """
        return self._run(args, kwargs, None, outputs="all", timeline=False, backward=False, model_only=True).outputs

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...] | None,
        *,
        outputs: str,
        timeline: bool,
        backward: bool,
        model_only: bool = False,
    ) -> StepResult:
        self._steps += 1
        moment = f"step {self._steps}"
        mode = "train" if backward else "evaluate"
        try:
            loss = None if model_only else self._options.loss
            with_loss = loss is not None and (backward or targets is not None or self._targets == ())
            call = self._prepare(
                args, kwargs, targets or (), outputs=outputs, timeline=timeline, with_loss=with_loss, backward=backward
            )
        except Exception as error:
            self._world.refuse(moment, error)
            raise
        facts = {"the mode": mode, "the number of steps": str(self._steps), **_facts(call.compiled)}
        options = f"outputs={outputs}, timeline={timeline}"
        self._world.agree(moment, {**facts, "the call": call.shapes, "the request": options})
        with self._world.step():
            return self._execute(call, backward=backward)

    def _execute(self, call: _Call, *, backward: bool) -> StepResult:
        compiled, world = call.compiled, self._world
        compiled.open()
        if not self._ties_equal:
            copy_from_owner(compiled.ties, world)
            self._ties_equal = True
        keep = call.outputs != "none"
        compiled.begin(call.batch.microbatches, call.weights, keep_outputs=keep, measure=call.timeline)
        begun = time.perf_counter()
        try:
            with torch.set_grad_enabled(backward):
                world.run(compiled.executors)
            if backward:
                sum_gradients(compiled.ties, world)
            loss, losses = share_loss(compiled, call.weights, world)
            result = None
            if keep:
                ranks = range(len(compiled.plan.rows)) if call.outputs == "all" else [_last_rank(compiled)]
                result = collect_outputs(compiled, call.batch, self._options.batch_axis, loss, ranks, world)
            if call.timeline:
                self._timeline = collect_timeline(compiled, begun, world)
        finally:
            compiled.finish()
        return StepResult(loss, losses, result, self._timeline if call.timeline else None)

    # ---------------------------------------------------------------- checking a call

    def _prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...],
        *,
        outputs: str,
        timeline: bool,
        with_loss: bool,
        backward: bool,
    ) -> _Call:
        if outputs not in ("none", "last", "all"):
            raise CallError(Diagnostic("unknown-outputs", f"outputs is {outputs!r}.", help="one of: none, last, all"))
        if with_loss and self._targets is None:
            self._targets = self._first_targets(args, kwargs, targets)
        compiled = self._compile(with_loss=with_loss, backward=backward)
        if backward and compiled.graph.loss is None:
            message = "There is no loss to train with: forward returns none, and the pipeline was built without loss=."
            raise CallError(Diagnostic("no-loss", message, help="give loss=, or let forward return a scalar"))
        routes, count = compiled.graph.inputs, self._microbatches
        leaves = compiled.recording.bind(args, kwargs, targets if with_loss else ())
        batch = split_batch(routes, leaves, count, self._options.batch_axis)
        for guard in compiled.recording.guards:
            for microbatch in batch.microbatches:
                guard.check(microbatch)
        if outputs != "none":
            check_outputs(compiled, batch, self._options.batch_axis)
        names = [route.name for route in routes]
        weights = self._weights(names, leaves, batch) if compiled.graph.loss is not None else (0.0,) * count
        self._check_parameters(compiled)
        shapes = ", ".join(f"{n} {str(t.dtype)[6:]}{list(t.shape)}" for n, t in zip(names, leaves, strict=True))
        return _Call(compiled, batch, weights, outputs, timeline, shapes)

    def _weights(self, names: Sequence[str], leaves: Sequence[torch.Tensor], batch: Batch) -> tuple[float, ...]:
        count, reduction = self._microbatches, self._options.reduction
        if reduction == "mean":
            return (1.0 / count,) * count
        if isinstance(reduction, str):
            return (1.0,) * count
        whole = dict(zip(names, leaves, strict=True))
        parts = (dict(zip(names, microbatch, strict=True)) for microbatch in batch.microbatches)
        return tuple(float(reduction(part, whole)) for part in parts)

    def _check_parameters(self, compiled: Compiled) -> None:
        meta = [name for program in compiled.programs for name, p in program.parameters if p.is_meta]
        if meta:
            message = f"Parameter `{meta[0]}` of this rank's stages is on meta: it has no values."
            advice = "fill it before the first step, for example with model.to_empty() and load_state_dict()"
            raise CallError(Diagnostic("meta-parameter", message, help=advice))

    # ---------------------------------------------------------------- recording

    def _first_targets(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the first micro-batch's targets, to record the loss with."""
        recording = self._record(with_loss=False)
        leaves = recording.bind(args, kwargs, ())
        batch = split_batch(recording.graph.inputs, leaves, self._microbatches, self._options.batch_axis)
        flat, structure = pytree.tree_flatten(targets)
        cut = [self._cut(f"targets[{i}]", leaf, batch.rows or 1) for i, leaf in enumerate(flat)]
        return tuple(pytree.tree_unflatten(cut, structure))

    def _cut(self, name: str, leaf: Any, rows: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return slice_like(name, leaf, rows, self._microbatches, self._options.batch_axis).detach()

    def _record(self, *, with_loss: bool) -> Recording:
        from ppdsl.recording.record import record_call

        key = (with_loss, self._state_key())
        if key not in self._recordings:
            loss = self._options.loss if with_loss else None
            targets = (self._targets or ()) if with_loss else ()
            self._recordings[key] = record_call(self._model, self._args, self._kwargs, loss=loss, targets=targets)
        return self._recordings[key]

    def _state_key(self) -> tuple[Any, ...]:
        """What a recording depends on beside the shapes: modes of modules, frozen parameters, autocast."""
        training = tuple(module.training for module in self._model.modules())
        frozen = tuple(parameter.requires_grad for parameter in self._model.parameters())
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return training, frozen, autocast

    def _compile(self, *, with_loss: bool, backward: bool) -> Compiled:
        key = (with_loss, backward, self._state_key())
        if key not in self._compiled:
            recording = self._record(with_loss=with_loss)
            schedule = self._options.schedule
            if not backward:
                schedule = "forward_only"
            placement = self._options.placement
            if isinstance(self._options.schedule, Schedule) and not isinstance(schedule, Schedule):
                stages = zip(recording.graph.stages, self._options.schedule.placement, strict=True)
                placement = {stage.key: rank for stage, rank in stages}
            plan = build_plan(recording, self._world, schedule, self._microbatches, placement)
            compiled = Compiled(recording, plan, self._world)
            compiled.move_parameters()
            self._compiled[key] = compiled
        return self._compiled[key]

    # ---------------------------------------------------------------- the model's parts on this rank

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and parameter of each parameter that this rank's stages use, in the model's order.

        A tied parameter comes once, under its owner's name; every rank that uses it holds a copy and optimises it, and
        the copies stay equal. Parameters that no stage uses belong to rank 0.
        """
        names = local_names(self._main)
        for name, parameter in self._model.named_parameters():
            if name in names:
                yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of `named_parameters`."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the model's state dictionary, under the model's own names."""
        owned = owned_keys(self._main)
        return {key: value for key, value in self._model.state_dict().items() if key in owned}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dictionary, which may be the whole model's.

        Args:
            state: Tensors by the model's own names.
            strict: Whether every name of this rank must be there, and no name that the model does not have.

        Raises:
            CallError: A name is missing or unknown.
        """
        owned = owned_keys(self._main)
        if strict:
            known = self._model.state_dict().keys()
            missing = [key for key in known if key in owned and key not in state]
            unknown = [key for key in state if key not in known]
            findings = [
                Diagnostic("missing-state", f"The state has no `{key}`, as this rank needs.") for key in missing
            ]
            findings += [Diagnostic("unknown-state", f"The model has no `{key}`.") for key in unknown]
            if findings:
                raise CallError(*findings)
        self._model.load_state_dict({key: value for key, value in state.items() if key in owned}, strict=False)
        self._ties_equal = False

    # ---------------------------------------------------------------- plain data

    @property
    def module(self) -> torch.nn.Module:
        """The user's model."""
        return self._model

    @property
    def graph(self) -> StageGraph:
        """The stages and the values between them."""
        return self._main.graph

    @property
    def schedule(self) -> Schedule:
        """Each rank's computations in a training step."""
        return self._main.schedule

    @property
    def plan(self) -> MessagePlan:
        """Each rank's computations, sends and receives in a training step."""
        return self._main.plan

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks have to agree on before the first step."""
        reduction = self._options.reduction if isinstance(self._options.reduction, str) else "a function"
        return {**_facts(self._main), "the reduction": reduction}

    def explain(self) -> dict[str, Any]:
        """Return what the pipeline does, as plain data: stages, ranks, schedule, edges, ties, bytes, warnings."""
        return explain(self._main)

    def timeline(self) -> Timeline | None:
        """Return the times of the last step that was measured, or None."""
        return self._timeline

    def close(self) -> None:
        """Let go of channels and threads; at the latest done when the process ends."""
        self._world.close()

    def __repr__(self) -> str:
        graph, schedule = self.graph, self.schedule
        return (
            f"Pipeline({graph.name}: {len(graph.stages)} stages on {schedule.ranks} ranks, {schedule.name}, "
            f"{self._microbatches} micro-batches)"
        )


def _facts(compiled: Compiled) -> dict[str, str]:
    graph, plan = compiled.graph, compiled.plan
    model = f"{graph.name} with {len(graph.stages)} stages ({compiled.recording.digest})"
    return {"the model": model, "the plan": f"{plan.schedule.name} ({plan.digest})"}


def _last_rank(compiled: Compiled) -> int:
    producers = [route.producer for route in compiled.outputs]
    return compiled.placement[max(producers, default=0)]


def _as_tuple(targets: Any) -> tuple[Any, ...] | None:
    if targets is None or isinstance(targets, tuple):
        return targets
    return (targets,)


def _check_options(options: _Options, spec: object, timeout: float, runtime: str | None) -> None:
    findings = []
    if spec is not None:
        message = "spec= is not supported yet."
        findings.append(Diagnostic("no-spec", message, help="mark the model with pp.stage, pp.cutpoint or pp.begin"))
    if isinstance(options.reduction, str) and options.reduction not in ("mean", "sum"):
        message = f"There is no reduction {options.reduction!r}."
        advice = "one of: mean, sum, or a function that returns a micro-batch's weight"
        findings.append(Diagnostic("unknown-reduction", message, help=advice))
    if options.microbatches is not None and options.microbatches < 1:
        message = f"A step of {options.microbatches} micro-batches has nothing to run."
        findings.append(Diagnostic("no-microbatches", message, help="use at least 1 micro-batch"))
    if isinstance(options.schedule, Schedule) and options.microbatches not in (None, options.schedule.microbatches):
        message = f"microbatches is {options.microbatches}, but the schedule has {options.schedule.microbatches}."
        findings.append(Diagnostic("microbatches-differ", message, help="leave microbatches= out"))
    if not timeout > 0:
        findings.append(Diagnostic("wrong-timeout", f"timeout is {timeout} seconds.", help="give more than 0"))
    if runtime not in (None, "inprocess", "distributed"):
        message = f"There is no runtime {runtime!r}."
        findings.append(Diagnostic("unknown-runtime", message, help="one of: inprocess, distributed"))
    if runtime == "distributed" and not _initialised():
        message = "torch.distributed is not initialised."
        advice = "call torch.distributed.init_process_group() first, under torchrun"
        findings.append(Diagnostic("not-initialised", message, help=advice))
    if findings:
        raise CallError(*findings)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _make_world(devices: Devices, timeout: float, runtime: str | None) -> World:
    distributed = runtime == "distributed" or (runtime is None and _initialised())
    if not distributed:
        if devices is None or isinstance(devices, str | torch.device):
            return InProcessWorld(None if devices is None else torch.device(devices))
        return InProcessWorld([torch.device(device) for device in devices])
    if devices is None or isinstance(devices, str | torch.device):
        return DistributedWorld(timeout, None if devices is None else torch.device(devices))
    message = "devices= is a list, but under torch.distributed each process has one device."
    raise CallError(Diagnostic("wrong-devices", message, help="give this process's device, or None"))
