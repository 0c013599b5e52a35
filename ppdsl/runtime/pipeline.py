"""`pp.pipeline`: a marked model as a pipeline that trains like the plain loop over its micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ppdsl.graph.ir import StageGraph
from ppdsl.plan.messages import MessagePlan
from ppdsl.runtime.batch import BatchAxis
from ppdsl.runtime.calls import Call, Request, prepare
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.explanation import explain
from ppdsl.runtime.library import Library
from ppdsl.runtime.options import Devices, Options, Reduction, make_world
from ppdsl.runtime.outcome import StepResult, collect_outputs, collect_timeline, share_loss
from ppdsl.runtime.ownership import gather_state, load_owned, local_names, owned_keys
from ppdsl.runtime.ties import copy_from_owner, sum_gradients
from ppdsl.runtime.world import World
from ppdsl.schedule.table import Schedule
from ppdsl.timeline import Timeline
from ppdsl.units import counted

__all__ = ["Pipeline", "pipeline"]


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
    world = make_world(devices, timeout, runtime)
    try:
        options = Options(loss, schedule, microbatches, placement, reduction, dict(batch_axis or {}), spec)
        options.check()
        library = Library(model, args, dict(kwargs or {}), _as_tuple(targets), world, options)
        built = Pipeline(library, world, options)
    except Exception as error:
        world.refuse("the first step", error)
        raise
    world.agree("the first step", built.facts)
    return built


class Pipeline:
    """A model that runs in stages; made by `pipeline`.

    `step` trains, `evaluate` and calling it run forward only. Everything else is plain data about the stages, or this
    rank's part of the model under the model's own names.
    """

    def __init__(self, library: Library, world: World, options: Options) -> None:
        self._library = library
        self._world = world
        self._options = options
        self._main = library.compiled(with_loss=library.loss_is_known, backward=True)
        self._fingerprint = library.fingerprint()
        self._steps = 0
        self._ties_equal = False
        self._timeline: Timeline | None = None

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
        targets_known = targets is not None or self._library.targets == ()
        with_loss = self._options.loss is not None and not model_only and (backward or targets_known)
        request = Request(args, kwargs, targets or (), outputs, timeline, with_loss, backward)
        try:
            call = prepare(request, self._library, self._options)
        except Exception as error:
            self._world.refuse(moment, error)
            raise
        facts = {"the mode": request.mode, **self._facts(call.compiled)}
        self._world.agree(moment, {**facts, "the call": call.shapes, "the request": request.text})
        if backward:
            self._main = call.compiled
        with self._world.step():
            return self._execute(call, request)

    def _execute(self, call: Call, request: Request) -> StepResult:
        compiled, world = call.compiled, self._world
        compiled.open()
        if not self._ties_equal:
            copy_from_owner(compiled.ties, world)
            self._ties_equal = True
        keep = request.outputs != "none"
        compiled.begin(call.batch.microbatches, call.weights, keep_outputs=keep, measure=request.timeline)
        begun = time.perf_counter()
        try:
            with torch.set_grad_enabled(request.backward):
                world.run(compiled.executors)
            if request.backward:
                sum_gradients(compiled.ties, world)
            loss, losses = share_loss(compiled, call.weights, world)
            result = None
            if keep:
                ranks = range(len(compiled.plan.rows)) if request.outputs == "all" else [_last_rank(compiled)]
                result = collect_outputs(compiled, call.batch, self._options.batch_axis, loss, ranks, world)
            if request.timeline:
                self._timeline = collect_timeline(compiled, begun, world)
        finally:
            compiled.finish()
        return StepResult(loss, losses, result, self._timeline if request.timeline else None)

    # ---------------------------------------------------------------- the model's parts on this rank

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and parameter of each parameter that this rank's stages use, in the model's order.

        A tied parameter comes once, under its owner's name; every rank that uses it holds a copy and optimises it, and
        the copies stay equal. Parameters that no stage uses belong to rank 0.
        """
        names = local_names(self._main)
        for name, parameter in self._library.model.named_parameters():
            if name in names:
                yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of `named_parameters`."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the model's state dictionary, under the model's own names."""
        owned = owned_keys(self._main)
        return {key: value for key, value in self._library.model.state_dict().items() if key in owned}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state dictionary, on the CPU of every rank; all ranks must call it.

        Raises:
            CallError: Another rank does something else.
            RunError: Another rank failed.
        """
        self._world.agree("the gathering of the state", self._facts(self._main))
        with self._world.step():
            return gather_state(self._main, self._world)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dictionary, which may be the whole model's.

        Args:
            state: Tensors by the model's own names.
            strict: Whether every name of this rank must be there, and no name that the model does not have.

        Raises:
            CallError: A name is missing or unknown.
        """
        load_owned(self._main, state, strict=strict)
        self._ties_equal = False

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
        reduction = self._options.reduction if isinstance(self._options.reduction, str) else "a function"
        return {**self._facts(self._main), "the reduction": reduction}

    def _facts(self, compiled: Compiled) -> dict[str, str]:
        graph, plan = compiled.graph, compiled.plan
        digest = f"{compiled.recording.digest}-{self._fingerprint}"
        model = f"{graph.name} with {len(graph.stages)} stages ({digest})"
        return {"the model": model, "the plan": f"{plan.schedule.name} ({plan.digest})"}

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
            f"Pipeline({graph.name}: {counted(len(graph.stages), 'stage')} on {counted(schedule.ranks, 'rank')}, "
            f"{schedule.name}, {counted(self._library.microbatches, 'micro-batch')})"
        )


def _last_rank(compiled: Compiled) -> int:
    producers = [route.producer for route in compiled.outputs]
    return compiled.placement[max(producers, default=0)]


def _as_tuple(targets: Any) -> tuple[Any, ...] | None:
    if targets is None or isinstance(targets, tuple):
        return targets
    return (targets,)
