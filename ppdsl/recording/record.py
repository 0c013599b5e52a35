"""Record a model's forward pass: the entry to everything in this package."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic, RecordingError
from ppdsl.graph.ir import StageGraph
from ppdsl.recording import compat
from ppdsl.recording.admission import check_inputs, check_model
from ppdsl.recording.build import build
from ppdsl.recording.checks import check_kept, check_open_frames, check_strict
from ppdsl.recording.compare import difference
from ppdsl.recording.fakes import FakeState
from ppdsl.recording.guards import Guard, guard_of, sharing_guards
from ppdsl.recording.items import collapse
from ppdsl.recording.programs import StageProgram
from ppdsl.recording.randomness import Generators
from ppdsl.recording.recorder import Recorder
from ppdsl.recording.settings import Reads, Setting, settings_of
from ppdsl.recording.signature import CallSignature, check_loss_call
from ppdsl.recording.snapshot import Snapshot, preserved
from ppdsl.recording.structure import Unpacked, fill, hides_tensor, unpack
from ppdsl.recording.tape import Message, Tape, Value

__all__ = ["Recording", "record", "record_call"]

_LOCK = RLock()  # recordings patch classes of the whole process: one at a time


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
    """

    graph: StageGraph
    programs: tuple[StageProgram, ...]
    model: torch.nn.Module
    guards: tuple[Guard | Setting, ...]
    training: tuple[bool, ...]
    digest: str
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
    model: torch.nn.Module, *args: Any, spec: str | None = None, strict: bool = False, **kwargs: Any
) -> StageGraph:
    """Run `model(*args, **kwargs)` once on fake tensors and return its graph of stages.

    Nothing of the model is changed, no gradient is computed, no memory for parameters is needed: they may be on the
    meta device.

    Args:
        model: A module with stage marks; without any mark it is one stage.
        args: One micro-batch of example inputs.
        spec: Path of a partition file (not supported yet).
        strict: Refuse torch calls outside every stage instead of placing them.
        kwargs: More of the example inputs.

    Returns:
        The stage graph; sizes in it are for one micro-batch.

    Raises:
        MarkError: Marks contradict each other or change nothing.
        RecordingError: The forward pass cannot be split into stages as marked.

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
    if spec is not None:
        raise RecordingError(
            Diagnostic("not-supported", "Partition files are not supported yet.", (), "mark the model with pp.begin")
        )
    return record_call(model, args, kwargs, strict=strict).graph


def record_call(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    strict: bool = False,
) -> Recording:
    """Record one call of `model`, or of `loss(model(...), *targets)`, with the programs of its stages.

    Args:
        model: A module with stage marks.
        args: Positional example inputs, one micro-batch.
        kwargs: Named example inputs.
        loss: Called with the model's output and `targets`; must return a scalar tensor.
        targets: Example targets, one micro-batch.
        strict: Refuse torch calls outside every stage.

    Raises:
        CallError: The arguments do not fit `forward`.
        MarkError: Marks contradict each other or change nothing.
        RecordingError: The forward pass cannot be split into stages as marked.
    """
    check_model(model)
    if loss is not None:
        check_loss_call(loss, targets)
    signature = CallSignature.of(model, args, kwargs or {}, targets)
    check_inputs(signature.names, signature.tensors)
    with _LOCK, preserved(model) as snapshot:
        session = _Session(model, signature, loss, snapshot)
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
    output = session.output
    return Recording(built.graph, built.programs, model, guards, training, digest, signature, output)


class _Session:
    """Runs the model on fakes until two recordings agree."""

    def __init__(
        self, model: torch.nn.Module, signature: CallSignature, loss: Callable[..., Any] | None, snapshot: Snapshot
    ) -> None:
        self.model = model
        self.snapshot = snapshot
        self.messages: list[Message] = []
        self.generators = Generators()
        self.reads: Reads = {}
        self.signature = signature
        self.loss = loss
        self.output = unpack(None)
        self.output_names: tuple[str, ...] = ()
        self.left: list[tuple[str, torch.Tensor]] = []
        self.spans: dict[Any, Any] = {}
        self.aliases: dict[int, list[str]] = {}

    def stable_tape(self) -> Tape:
        """Record twice; a third time when the first call built tables which the second found.

        The second recording starts from what the first left on the model, so that state which one micro-batch leaves to
        the next shows as a difference.

        Raises:
            RecordingError: They never agree: something outside torch decides what runs.
        """
        first = self._run(first=True)
        left_behind = bool(self.left)
        collapsed = collapse(first)
        check_kept(first, collapsed)
        second = self._run()
        second.tainted = first.tainted | collapsed.tainted
        apart = difference(first, second)
        if apart is None:
            if not left_behind:
                return second
            first.tainted = second.tainted
            return first
        if difference(first, second, built=True) is not None:
            check_open_frames(second, collapse(second))  # random numbers, say: the better reason, if there is one
            raise apart
        third = self._run()
        third.tainted = second.tainted | collapse(second).tainted
        apart = difference(second, third)
        if apart is not None:
            raise apart
        return third

    def _run(self, *, first: bool = False) -> Tape:
        examples = self.signature.tensors
        fakes = FakeState(self.model)
        # One tensor passed twice is one tensor for `is`, and for whoever writes it.
        twins = {id(tensor): fakes.fake_of(tensor) for tensor in examples}
        fake_inputs = [twins[id(tensor)] for tensor in examples]
        self.generators.begin()
        recorder = Recorder(
            self.model, fakes, examples, fake_inputs, self.signature.names, self.snapshot.holders, self.generators
        )
        for name, tensor in self.left:
            recorder.ledger.inherit(name, tensor, fakes.fake_of(tensor.detach()))
        seen: dict[str, Any] = {}
        base = torch.is_grad_enabled()

        def program() -> Any:
            args, kwargs, targets = self.signature.call(fake_inputs)
            output = self.model(*args, **kwargs)
            seen["output"] = self._note_output(recorder, output)
            if self.loss is None:
                return output
            return self.loss(output, *targets)

        fakes.enter()
        try:
            with torch.enable_grad() if not base else nullcontext(), warnings.catch_warnings():
                # Torch's own, when it turns a parameter that the model does not list into a fake.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                result = recorder.run(program, (), {})
        finally:
            fakes.leave()
            self.left = self.snapshot.put_back_fakes(tensors_only=first)
            recorder.restore_constants()
            self.generators.restore()
        recorder.marking.finish()
        self.messages += recorder.messages
        output, values = seen["output"]
        loss = self._loss_value(recorder, output, values, result)
        self.output = Unpacked(output.template, (), output.paths)
        self.output_names = tuple(_path_text(path) for path in output.paths)
        self.reads = recorder.reads | self.reads
        self.spans, self.aliases = recorder.marking.spans, fakes.aliases
        return Tape(
            recorder.records,
            recorder.frames.root,
            recorder.inputs,
            unpack(None),
            values,
            loss,
            tuple(recorder.marking.optional),
            tuple(self.messages),
        )

    def _note_output(self, recorder: Recorder, output: Any) -> tuple[Unpacked, tuple[Value, ...]]:
        with compat.no_torch_function():
            parts = unpack(output)
            hider = hides_tensor(parts.template)
            if not parts.tensors or hider is not None:
                raise RecordingError(
                    Diagnostic(
                        "no-tensor-output",
                        f"forward of {type(self.model).__name__} returns {_what(output)}, which holds "
                        + (
                            "no tensor."
                            if hider is None
                            else f"tensors inside {_what(hider)}, where they cannot be replaced."
                        ),
                        (),
                        "return a tensor, or a tuple, list, dict, dataclass or named tuple of tensors",
                    )
                )
            return parts, tuple(recorder.ledger.value_of(recorder.ledger.stand_in(t)) for t in parts.tensors)

    def _loss_value(self, recorder: Recorder, output: Unpacked, values: tuple[Value, ...], result: Any) -> Value | None:
        if self.loss is not None:
            if not isinstance(result, torch.Tensor) or result.numel() != 1 or result.dim() > 0:
                raise RecordingError(
                    Diagnostic(
                        "loss-not-scalar",
                        f"The loss function returns {_what(result)} instead of a scalar tensor.",
                        (),
                        "reduce it, for example with .mean()",
                    )
                )
            return recorder.ledger.value_of(recorder.ledger.stand_in(result))
        for path, value in zip(output.paths, values, strict=True):
            scalar = value.meta.shape == () and value.meta.dtype.startswith(("float", "bfloat"))
            if scalar and (path == () or (len(path) == 1 and path[0][1] == "loss")):
                return value
        return None


def _digest(graph: StageGraph, programs: tuple[StageProgram, ...]) -> str:
    text = graph.digest + "".join(program.module.code for program in programs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def _path_text(path: Any) -> str:
    text = "output"
    for kind, key in path:
        text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text
