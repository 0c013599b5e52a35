"""A call of a pipeline, checked and cut before any rank sends a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.batch import Batch, split_batch
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.library import Library
from ppdsl.runtime.options import Options, weights_of
from ppdsl.runtime.outcome import check_outputs

__all__ = ["Call", "Request", "prepare"]


@dataclass(frozen=True)
class Request:
    """What a user asks of a pipeline.

    Attributes:
        args: The model's arguments for the whole batch.
        kwargs: Its keyword arguments.
        targets: What the loss function gets beside the output.
        outputs: `none`, `last` or `all`.
        timeline: Whether to measure.
        with_loss: Whether the loss function runs.
        backward: Whether there is a backward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    outputs: str
    timeline: bool
    with_loss: bool
    backward: bool

    @property
    def mode(self) -> str:
        """What kind of step this is; all ranks make the same."""
        return ("train" if self.backward else "evaluate") + ("" if self.with_loss else " without a loss function")

    @property
    def text(self) -> str:
        """The request beside its tensors; all ranks make the same."""
        return f"outputs={self.outputs}, timeline={self.timeline}"


@dataclass(frozen=True)
class Call:
    """A request that has passed all checks of this process.

    Attributes:
        compiled: What runs.
        batch: The tensors, cut into micro-batches.
        weights: What each micro-batch's loss counts.
        shapes: Names, types and shapes of the tensors; all ranks give the same.
    """

    compiled: Compiled
    batch: Batch
    weights: tuple[float, ...]
    shapes: str


def prepare(request: Request, library: Library, options: Options) -> Call:
    """Check a request against its recording and cut its tensors.

    Raises:
        CallError: The call does not fit.
        RecordingError: The model's state has changed, and cannot be recorded as it is now.
    """
    if request.outputs not in ("none", "last", "all"):
        message = f"outputs is {request.outputs!r}."
        raise CallError(Diagnostic("unknown-outputs", message, help="one of: none, last, all"))
    if request.with_loss and library.targets is None:
        library.learn_targets(request.args, request.kwargs, request.targets)
    compiled = library.compiled(with_loss=request.with_loss, backward=request.backward)
    if request.backward and compiled.graph.loss is None:
        message = "There is no loss to train with: forward returns none, and the pipeline was built without loss=."
        raise CallError(Diagnostic("no-loss", message, help="give loss=, or let forward return a scalar"))
    recording, routes = compiled.recording, compiled.graph.inputs
    leaves = recording.bind(request.args, request.kwargs, request.targets if request.with_loss else ())
    batch = split_batch(routes, leaves, library.microbatches, options.batch_axis)
    for guard in recording.guards:
        for microbatch in batch.microbatches:
            guard.check(microbatch)
    if request.outputs != "none":
        check_outputs(compiled, batch, options.batch_axis)
    names = [route.name for route in routes]
    weights = (0.0,) * library.microbatches
    if compiled.graph.loss is not None:
        weights = weights_of(options.reduction, names, leaves, batch)
    _check_parameters(compiled)
    shapes = ", ".join(f"{n} {str(t.dtype)[6:]}{list(t.shape)}" for n, t in zip(names, leaves, strict=True))
    return Call(compiled, batch, weights, shapes)


def _check_parameters(compiled: Compiled) -> None:
    meta = [name for program in compiled.programs for name, p in program.parameters if p.is_meta]
    if meta:
        message = f"Parameter `{meta[0]}` of this rank's stages is on meta: it has no values."
        advice = "fill it before the first step, for example with model.to_empty() and load_state_dict()"
        raise CallError(Diagnostic("meta-parameter", message, help=advice))
