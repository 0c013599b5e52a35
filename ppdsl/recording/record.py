"""Record a model's forward pass: the entry to everything in this package."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.outline import ModelOutline
from ppdsl.recording.admission import check_inputs, check_model
from ppdsl.recording.build import build
from ppdsl.recording.checks import check_strict
from ppdsl.recording.dividing import Divider, Division, ignored_marks
from ppdsl.recording.guards import Guard, guard_of, sharing_guards
from ppdsl.recording.profile import measured_costs
from ppdsl.recording.programs import StageProgram
from ppdsl.recording.session import LOCK, Session, collector_rests
from ppdsl.recording.settings import Setting, settings_of
from ppdsl.recording.signature import CallSignature, check_loss_call
from ppdsl.recording.snapshot import preserved
from ppdsl.recording.structure import Unpacked, fill
from ppdsl.spec.partition import Partition
from ppdsl.spec.resolve import Resolution

__all__ = ["Recording", "record", "record_call"]


@dataclass(frozen=True)
class Recording:
    """A recorded forward pass (with its loss, if one was given).

    Attributes:
        graph: Stages, edges, ties, routes.
        programs: One for each stage, in order.
        model: The user's model.
        guards: What the recording assumed of the numbers in the inputs, and of those on modules.
        training: The `training` flag of each module when it was recorded.
        digest: Equal on ranks that recorded the same model for the same micro-batch.
        outline: Modules, calls and steps, when a spec divided the model.
        resolution: What the spec came to on this model.
    """

    graph: StageGraph
    programs: tuple[StageProgram, ...]
    model: torch.nn.Module
    guards: tuple[Guard | Setting, ...]
    training: tuple[bool, ...]
    digest: str
    outline: ModelOutline | None
    resolution: Resolution | None
    _signature: CallSignature
    _output: Unpacked

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a call, in the order of `graph.inputs`.

        Raises:
            CallError: Arguments are missing, unknown or of another structure, or a value that is no tensor differs from
                the recorded one.
        """
        return self._signature.bind(args, kwargs, targets)

    @property
    def examples(self) -> tuple[torch.Tensor, ...]:
        """The tensors it was recorded with, in the order of `graph.inputs`."""
        return self._signature.tensors

    def call(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Return arguments, keyword arguments and targets of the recorded call, with other tensors."""
        return self._signature.call(leaves)

    def with_examples_of(self, other: Recording) -> Recording:
        """Return this recording without its own example tensors, as those of `other` do for the same call."""
        return replace(self, _signature=other._signature)

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Check the tensors of one micro-batch, in the order of `graph.inputs`, against what was recorded.

        Raises:
            CallError: Another shape or element type, or numbers that would take another way through the model.
        """
        for route, leaf in zip(self.graph.inputs, leaves, strict=True):
            shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
            if shape != route.meta.shape or dtype != route.meta.dtype:
                raise CallError(
                    Diagnostic(
                        "wrong-shape" if dtype == route.meta.dtype else "wrong-dtype",
                        f"Argument `{route.name}` is {dtype}{list(shape)}, but the plan was recorded for {route.meta}.",
                        (),
                        "build another pipeline with an example of this kind",
                    )
                )
        for guard in self.guards:
            guard.check(leaves)

    def rebuild(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Return the model's own output type, from tensors in the order of `graph.outputs`."""
        return fill(self._output.template, leaves)


def record(
    model: torch.nn.Module, *args: Any, spec: str | Path | Partition | None = None, strict: bool = False, **kwargs: Any
) -> StageGraph:
    """Run `model(*args, **kwargs)` once on fake tensors and return its graph of stages.

    Nothing of the model is changed, no gradient is computed, no memory for parameters is needed: they may be on the
    meta device.

    Args:
        model: A module with stage marks; without any mark it is one stage.
        args: One micro-batch of example inputs.
        spec: A partition, or the path of a `.ppspec`: it divides the model, and marks in the code have no effect.
        strict: Refuse torch calls outside every stage instead of placing them.
        kwargs: More of the example inputs.

    Returns:
        The stage graph; sizes in it are for one micro-batch.

    Raises:
        MarkError: Marks contradict each other or change nothing.
        RecordingError: The forward pass cannot be split into stages as marked.
        SpecError: The spec is wrong, or does not fit the model.

    >>> import torch
    >>> import ppdsl as pp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> pp.begin(net[2], 1)
    >>> print(pp.record(net, torch.zeros(3, 4)))
    Sequential: 2 stages, 1 edge
      stage 0: 0, 1
      stage 1: 2
      0 -> 1: 1 float32[3, 8]
    """
    if isinstance(spec, str | Path):
        from ppdsl.spec.load import load_spec  # loads lark

        division: Partition | None = load_spec(spec)
    else:
        division = spec
    costs = measured_costs(division, model, args, kwargs)
    return record_call(model, args, kwargs, strict=strict, spec=division, costs=costs).graph


def record_call(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    strict: bool = False,
    spec: Division | None = None,
    costs: Mapping[str, float] | None = None,
) -> Recording:
    """Record one call of `model`, or of `loss(model(...), *targets)`, with the programs of its stages.

    Args:
        model: A module with stage marks.
        args: Positional example inputs, one micro-batch.
        kwargs: Named example inputs.
        loss: Called with the model's output and `targets`; must return a scalar tensor.
        targets: Example targets, one micro-batch.
        strict: Refuse torch calls outside every stage.
        spec: What divides the model in place of its marks: a partition, or stages worked out already.
        costs: Seconds by module name, for a spec that balances by measured time.

    Raises:
        CallError: The arguments do not fit `forward`.
        MarkError: Marks contradict each other or change nothing.
        RecordingError: The forward pass cannot be split into stages as marked.
        SpecError: The spec does not fit the model.
    """
    check_model(model)
    if loss is not None:
        check_loss_call(loss, targets)
    signature = CallSignature.of(model, args, kwargs or {}, targets)
    check_inputs(signature.names, signature.tensors)
    with LOCK, collector_rests(), preserved(model) as snapshot:
        divider = None if spec is None else Divider(model, spec, costs)
        session = Session(model, signature, loss, snapshot, divider)
        tape = session.stable_tape()
        if strict:
            check_strict(tape)
        built = build(tape, model, session.spans, session.aliases, session.output_names)
        guards: tuple[Guard | Setting, ...] = (
            *sharing_guards(tape, signature.tensors),
            *(guard_of(guard, tape) for guard in built.collapsed.guards),
        )
    guards = (*guards, *settings_of(session.reads, (tape.root, *built.collapsed.open_frames)))
    digest = _digest(built.graph, built.programs)
    training = tuple(module.training for module in model.modules())
    graph, outline = built.graph, None if divider is None else divider.outline
    if divider is not None:
        warnings = (*divider.warnings, *ignored_marks(session.ignored, spec, tape), *graph.warnings)
        graph = replace(graph, warnings=warnings)
    return Recording(
        graph, built.programs, model, guards, training, digest, outline,
        None if divider is None else divider.resolution, signature, session.output,
    )  # fmt: skip


def _digest(graph: StageGraph, programs: tuple[StageProgram, ...]) -> str:
    text = graph.digest + "".join(program.module.code for program in programs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
