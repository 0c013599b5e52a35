"""A call of a pipeline, checked and cut before any rank sends a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.batches.batch import Batch, cut_batch
from ppdsl.runtime.batches.joining import Joined
from ppdsl.runtime.batches.recorded import check_kinds
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.library import Library
from ppdsl.runtime.options import Options, weights_of

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
        reduce: Whether replicas take the mean of their gradients when it ends.
        scale: What all gradients are multiplied by.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    outputs: str
    timeline: bool
    with_loss: bool
    backward: bool
    reduce: bool = True
    scale: float = 1.0

    @property
    def mode(self) -> str:
        """What kind of step this is; all ranks make the same."""
        return ("train" if self.backward else "evaluate") + ("" if self.with_loss else " without a loss function")

    @property
    def text(self) -> str:
        """The request beside its tensors; all ranks make the same."""
        reduce, scale = "" if self.reduce else ", reduce=False", "" if self.scale == 1.0 else f", scale={self.scale}"
        return f"outputs={self.outputs}, timeline={self.timeline}{reduce}{scale}"


@dataclass(frozen=True)
class Call:
    """A request that has passed all checks of this process.

    Attributes:
        compiled: What runs.
        batch: The tensors, cut into micro-batches.
        weights: What each micro-batch's loss counts.
        shapes: Names, types and shapes of the tensors; all ranks give the same.
        base: What runs a batch like the example in the same state of the model.
        joined: How each output is put together, when there are any to give.
        counted: How many rows or targets the loss is the mean of; None when it is no such mean.
    """

    compiled: Compiled
    batch: Batch
    weights: tuple[float, ...]
    shapes: str
    base: Compiled
    joined: tuple[Joined | None, ...] = ()
    counted: int | None = None


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
    mode = library.mode(with_loss=request.with_loss, backward=request.backward)
    base = library.example_of(mode)
    if request.backward and base.graph.loss is None:
        message = "There is no loss to train with: forward returns none, and the pipeline was built without loss=."
        raise CallError(Diagnostic("no-loss", message, help="give loss=, or let forward return a scalar"))
    routes = base.graph.inputs
    leaves = base.recording.bind(request.args, request.kwargs, request.targets if request.with_loss else ())
    shaped, compiled = library.shapes.find(base, leaves, mode)
    kinds = check_kinds(routes, leaves)
    if kinds:
        raise CallError(*kinds)
    batch = cut_batch(leaves, shaped.split)
    for variant, microbatch in zip(compiled.variants, batch.microbatches, strict=True):
        for guard in compiled.recordings[variant].guards:
            guard.check(microbatch)
    joined = library.shapes.joined(shaped, base, compiled, mode) if request.outputs != "none" else ()
    names = [route.name for route in routes]
    weights: tuple[float, ...] = (0.0,) * len(batch.microbatches)
    counted = None
    if compiled.graph.loss is not None:
        weights, counted = weights_of(options.reduction, names, leaves, batch)
    _check_parameters(compiled)
    shapes = ", ".join(f"{n} {str(t.dtype)[6:]}{list(t.shape)}" for n, t in zip(names, leaves, strict=True))
    return Call(compiled, batch, weights, shapes, base, joined, counted)


def _check_parameters(compiled: Compiled) -> None:
    meta = [name for program in compiled.programs for name, p in program.parameters if p.is_meta]
    if meta:
        message = f"Parameter `{meta[0]}` of this rank's stages is on meta: it has no values."
        advice = "fill it before the first step, for example with model.to_empty() and load_state_dict()"
        raise CallError(Diagnostic("meta-parameter", message, help=advice))
