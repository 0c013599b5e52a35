"""`pp.pipeline`: a marked model as a pipeline that trains like the plain loop over its micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.messages import MessagePlan
from ppdsl.runtime.batches.batch import BatchAxis
from ppdsl.runtime.calls import Call, Request, prepare
from ppdsl.runtime.checkpoints.parts import ModelParts
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.explanation import explain
from ppdsl.runtime.library import Library
from ppdsl.runtime.moving import recorded_autocast
from ppdsl.runtime.options import Compile, Devices, Options, Reduction, make_world
from ppdsl.runtime.outcome import StepResult, collect_outputs, collect_timeline
from ppdsl.runtime.processes.distributed import agree_on_call
from ppdsl.runtime.randomness import agree_on_seed
from ppdsl.runtime.replicas.averaging import COUNTED, average_gradients, begin_averaging, make_replicas_equal
from ppdsl.runtime.replicas.fleet import MeshLike
from ppdsl.runtime.scaling import GradScaler, scaled
from ppdsl.runtime.settling import settle
from ppdsl.runtime.specs import read_spec, require_contracts
from ppdsl.runtime.tie_checks import keep_equal
from ppdsl.runtime.ties import sum_gradients
from ppdsl.runtime.world import World
from ppdsl.runtime.xla.devices import XlaWorld
from ppdsl.schedule.table import Schedule
from ppdsl.spec.partition import Partition
from ppdsl.timeline import Timeline
from ppdsl.units import counted

__all__ = ["Pipeline", "pipeline"]


def pipeline(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    targets: Any = None,
    spec: str | Path | Partition | None = None,
    spec_params: Mapping[str, int] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    placement: Mapping[int | str, int] | None = None,
    reduction: Reduction | None = None,
    batch_axis: BatchAxis | None = None,
    dynamic: bool = True,
    recompute: bool | Collection[int | str] | None = None,
    seed: int | None = None,
    compile: Compile | None = None,  # noqa: A002 - torch's word for it
    devices: Devices = None,
    timeout: float = 300.0,
    runtime: str | None = None,
    mesh: MeshLike = None,
    transport: str | None = None,
) -> Pipeline:
    """Return a pipeline that runs `model` in the stages it is marked with, or that a spec divides it into.

    Nothing of the model is copied or wrapped: each rank runs its stages on the model's own modules and parameters.

    Args:
        model: The model. On ranks that do not run a stage its parameters may be on `meta`.
        args: Example arguments for one micro-batch.
        kwargs: Example keyword arguments for one micro-batch.
        targets: Example targets for one micro-batch: one tensor, or a tuple for several. Without them the loss is
            recorded at the first step.
        spec: A partition, or the path of a `.ppspec`: it divides the model, whose marks then have no effect. Its
            schedule, micro-batches, placement, loss reduction, batch axis and device hold where no argument says
            otherwise. The parameters of a stage that it freezes get `requires_grad=False`, and stay so.
        spec_params: Values for the spec's own parameters, as `-D` gives them on the command line.
        loss: `loss(output, *targets)`, or None when `forward` returns the loss itself (a scalar, or an output with
            `loss`).
        schedule: `1f1b`, `zbv`, another family's name, `auto`, or a `Schedule`; None: the spec's, or `1f1b`.
        microbatches: Micro-batches in a step; None: the spec's, or as many as there are stage keys.
        placement: Rank of each stage key; None: the spec's, or the loop or the V that the schedule's family goes, or
            one rank for each key, in order.
        reduction: How the micro-batches' losses are added; None: the spec's, or `mean`. `mean` weighs each
            by its share of the rows, `sum` with 1, `token_mean` or a `TokenMean` by its share of the targets that
            are not ignored; a function gets the tensors of the micro-batch and of the whole batch by name and
            returns the weight.
        batch_axis: Axis of the batch by name of an input or output, where shapes do not say it; None for a tensor that
            every micro-batch gets whole.
        dynamic: Whether calls may have other shapes than the example: rows that do not divide evenly go into micro-
            batches that differ by one row, fewer rows than micro-batches make fewer micro-batches, and for other
            shapes the model is recorded again, once for each of the last 16. False: they are an error.
        recompute: Keys of the stages that keep only their inputs between forward and backward, and run forward again
            in backward (activation checkpointing); True: all of them; None: those of the spec, or none.
        seed: What dropout and all other random numbers of torch follow from, with the step, the micro-batch and the
            module that draws them, and nothing else; None: rank 0's `torch.initial_seed()`.
        compile: Keys of the stages that `torch.compile` compiles, or by key what it gets (`{"head": {"mode": ...}}`);
            True: all; None: the spec's, or none. A stage that draws random numbers is not compiled, but warned of.
        devices: In one process, the device of all ranks or of each rank; under torch.distributed this process's
            device. None: parameters stay where they are, or, with NCCL, go to the local CUDA device. `xla`: the
            ranks are the XLA devices of this process, or of all processes when torch.distributed has several.
        timeout: Seconds a rank waits for another one, or for an XLA device, before it ends with an error.
        runtime: `inprocess`, `distributed` or `xla`; None: `xla` for these devices, distributed when
            torch.distributed is initialised.
        mesh: Which processes make up a pipeline, and which ones are its replicas, each with its own share of the batch
            (data parallelism): sizes by name, the first one outermost (`{"dp": 2, "pp": 2}`), or a `DeviceMesh` with
            these dimensions; it can also have `tp`, for tensor-parallel modules inside a stage. None: the spec's, or
            one pipeline of all processes. Losses and gradients are means over the replicas (sums with
            `reduction="sum"`). At the first step all get the first one's parameters and buffers.
        transport: How tensors travel between XLA devices: `permute` (from device to device, by a program that all of
            them run), `host`, or `auto` (None): `permute` if its test at the start succeeds. `explain()` says which.

    Returns:
        The pipeline.

    Raises:
        CallError: An argument is wrong, or ranks disagree.
        GraphError: The stages cannot be placed.
        MarkError: A mark is misplaced.
        RecordingError: The forward pass cannot become a graph of stages.
        ScheduleError: The schedule does not fit the graph.
        SpecError: The spec is wrong, does not fit the model, or a contract in it is broken.
    """
    read = read_spec(spec, spec_params)
    mesh = read.mesh if mesh is None else mesh
    world = make_world(devices if devices is not None else read.device, timeout, runtime, mesh, transport)
    try:
        options = read.options(loss, schedule, microbatches, placement, reduction, batch_axis, recompute=recompute)
        options = replace(options, seed=seed, dynamic=dynamic, compile=read.compiled if compile is None else compile)
        options.check()
        library = Library(model, args, dict(kwargs or {}), _as_tuple(targets), world, options)
        built = Pipeline(library, world, library.options)
    except Exception as error:
        world.refuse("the first step", error)
        raise
    world.agree("the first step", built.facts)
    built.random = agree_on_seed(seed, world)
    return built


class Pipeline(ModelParts):
    """A model that runs in stages; made by `pipeline`.

    `step` trains, `evaluate` and calling it run forward only. Everything else is plain data about the stages, or this
    rank's part of the model under the model's own names.
    """

    def __init__(self, library: Library, world: World, options: Options) -> None:
        super().__init__(library, world)
        require_contracts(self._main.recording, self._main.schedule, options)
        self._options = options
        self._fingerprint = library.fingerprint()
        self._timeline: Timeline | None = None

    # ---------------------------------------------------------------- running

    def step(
        self,
        *args: Any,
        targets: Any = None,
        outputs: str = "none",
        timeline: bool = False,
        reduce: bool = True,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of all micro-batches of a batch and add their gradients to `.grad`.

        Under `torch.no_grad()` it runs forward only.

        Args:
            *args: The model's arguments for the whole batch, the same on every rank of a pipeline; replicas each
                give their own share of the batch.
            targets: What the loss function gets beside the output: one tensor, or a tuple for several.
            outputs: `none`; `last`: the model's output on the rank of the last stage; `all`: on every rank.
            timeline: Whether to measure every computation.
            reduce: Whether replicas take the mean of their gradients at the end. Without it `.grad` is this replica's
                alone until a later step takes the mean of all that has gathered in it: for several steps before one
                of the optimizer.
            scaler: Scales the gradients; its `step` and `update` belong to the loop then, as torch's do.
            **kwargs: The model's keyword arguments.

        Returns:
            The loss on every rank, and what was asked for.

        Raises:
            CallError: The call does not fit the plan, or ranks disagree.
            RunError: A stage failed, or another rank did.
        """
        backward = torch.is_grad_enabled()
        return self._run(
            args, kwargs, _as_tuple(targets), outputs=outputs, timeline=timeline, backward=backward, reduce=reduce,
            scaler=scaler,
        )  # fmt: skip

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
        reduce: bool = True,
        scaler: GradScaler | None = None,
    ) -> StepResult:
        self._steps += 1
        moment = f"step {self._steps}"
        targets_known = targets is not None or self._library.targets == ()
        with_loss = self._options.loss is not None and not model_only and (backward or targets_known)
        request = Request(args, kwargs, targets or (), outputs, timeline, with_loss, backward, reduce)
        try:
            request = scaled(request, scaler)
            with recorded_autocast():
                call = prepare(request, self._library, self._options)
        except Exception as error:
            self._world.refuse(moment, error)
            raise
        own = {"the call": call.shapes, **self._facts(call.compiled), COUNTED: str(call.counted)}
        agree_on_call(self._world, moment, {"the mode": request.mode, "the request": request.text}, own)
        if backward:
            self._main, self.scale = call.base, request.scale
        with self._world.step(), recorded_autocast():
            return self._execute(call, request)

    def _execute(self, call: Call, request: Request) -> StepResult:
        compiled, world = call.compiled, self._world
        compiled.open()
        if not self._ties_equal:
            make_replicas_equal(compiled, world)
        keep_equal(compiled.ties, world, equal=self._ties_equal, training=request.backward)
        self._ties_equal = True
        keep = request.outputs != "none"
        weights, counted = begin_averaging(call, request, self._options.reduction, world)
        compiled.seed(self.random)
        scaled_weights = [weight * request.scale for weight in weights]
        compiled.begin(call.batch.microbatches, scaled_weights, keep_outputs=keep, measure=request.timeline)
        begun = time.perf_counter()
        try:
            with torch.set_grad_enabled(request.backward):
                world.run(compiled.executors)
            if request.backward:
                sum_gradients(compiled.ties, world)
                average_gradients(compiled, world)
            found = settle(compiled, weights, world)
            result = None
            if keep:
                result = collect_outputs(compiled, call.joined, found.own, world, everywhere=request.outputs == "all")
            if request.timeline:
                self._timeline = collect_timeline(compiled, begun, world)
        finally:
            compiled.finish()
        measured = self._timeline if request.timeline else None
        counted = None if found.loss is None else counted
        return StepResult(found.loss, found.losses, result, measured, counted, found.aux, found.metrics)

    # ---------------------------------------------------------------- plain data

    @property
    def module(self) -> torch.nn.Module:
        """The user's model."""
        return self._library.model

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
        given = self._options.reduction
        reduction = "a function" if callable(given) else str(given)
        return {**self._facts(self._main), "the reduction": reduction, "the seed": str(self._options.seed)}

    def _facts(self, compiled: Compiled) -> dict[str, str]:
        model, plan = compiled.described
        return {"the model": f"{model}-{self._fingerprint})", "the plan": plan}

    def explain(self) -> dict[str, Any]:
        """Return what the pipeline does, as plain data: stages, ranks, schedule, edges, ties, bytes, warnings."""
        return explain(self._main) | (self._world.explain() if isinstance(self._world, XlaWorld) else {})

    def timeline(self) -> Timeline | None:
        """Return the times of the last step that was measured, or None."""
        return self._timeline

    def close(self) -> None:
        """Let go of channels and threads; at the latest done when the process ends."""
        self._world.close()

    def __repr__(self) -> str:
        graph, schedule = self.graph, self.schedule
        return (
            f"Pipeline({graph.name}: {counted(len(graph.stages), 'stage')} on {counted(schedule.ranks, 'rank')}, "
            f"{schedule.name}, {counted(self._library.microbatches, 'micro-batch')})"
        )


def _as_tuple(targets: Any) -> tuple[Any, ...] | None:
    if targets is None or isinstance(targets, tuple):
        return targets
    return (targets,)
