"""Run a model on fakes until two recordings agree."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording import compat
from ppdsl.recording.checks import check_kept, check_open_frames
from ppdsl.recording.collectives import check_collectives, explained
from ppdsl.recording.compare import difference
from ppdsl.recording.dividing import Divider, undivided
from ppdsl.recording.fakes import FakeState
from ppdsl.recording.flowing import flow_of_gradients, sides_of
from ppdsl.recording.items import collapse
from ppdsl.recording.randomness import Generators
from ppdsl.recording.recorder import Recorder
from ppdsl.recording.settings import Reads
from ppdsl.recording.signature import CallSignature
from ppdsl.recording.snapshot import Snapshot, preserved
from ppdsl.recording.structure import Unpacked, hides_tensor, unpack
from ppdsl.recording.tape import Message, Tape, Value
from ppdsl.source import Span

__all__ = ["LOCK", "Session", "collector_rests", "record_tape"]

LOCK = RLock()
"""Recordings patch classes of the whole process: one at a time."""


@contextmanager
def collector_rests() -> Iterator[None]:
    """Keep the garbage collector from looking, again and again, through the many objects that a recording keeps."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()


def record_tape(
    model: torch.nn.Module, signature: CallSignature, loss: Callable[..., Any] | None, divider: Divider | None = None
) -> Tape:
    """Return a recording of the model without its marks, undivided unless something divides it.

    Args:
        model: The user's model.
        signature: The example call.
        loss: The loss function, or None.
        divider: What gives the records their stages; None: nothing, they have none.
    """
    with LOCK, collector_rests(), preserved(model) as snapshot:
        return Session(model, signature, loss, snapshot, divider or Divider(model, undivided)).stable_tape()


class Session:
    """Runs the model on fakes until two recordings agree.

    Args:
        model: The user's model.
        signature: The example call.
        loss: The loss function, or None.
        snapshot: What the model was before.
        divider: Divides each recording by a spec; None: the marks do.

    Attributes:
        output: The model's output, taken apart.
        output_names: Paths of its tensors.
        reads: Numbers and flags that the code read from modules.
        spans: Where each stage key was marked or declared.
        aliases: All names of each parameter and buffer, by id.
        ignored: Marks without effect, because a spec divides the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        signature: CallSignature,
        loss: Callable[..., Any] | None,
        snapshot: Snapshot,
        divider: Divider | None = None,
    ) -> None:
        self.model = model
        self.snapshot = snapshot
        self.messages: list[Message] = []
        self.generators = Generators()
        self.reads: Reads = {}
        self.signature = signature
        self.loss = loss
        self.divider = divider
        self.output = unpack(None)
        self.output_names: tuple[str, ...] = ()
        self.left: list[tuple[str, torch.Tensor]] = []
        self.spans: dict[Any, Any] = {}
        self.aliases: dict[int, list[str]] = {}
        self.ignored: list[Span] = []

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
        check_collectives(first.root, collapsed.open_frames)
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
            self.model, fakes, examples, fake_inputs, self.signature.names, self.snapshot.holders, self.generators,
            heed_marks=self.divider is None,
        )  # fmt: skip
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
            grad = torch.enable_grad() if not base else nullcontext()
            with grad, compat.compiled_code_runs_eagerly(), warnings.catch_warnings():
                # Torch's own, when it turns a parameter that the model does not list into a fake, or copies one.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
                result = recorder.run(program, (), {})
        except (RecordingError, *compat.DATA_ERRORS) as error:
            raise (explained(error, recorder.frames.root) or error) from error.__cause__
        finally:
            fakes.leave()
            self.left = self.snapshot.put_back_fakes(tensors_only=first)
            recorder.restore_constants()
            self.generators.restore()
        recorder.marking.finish()
        output, values = seen["output"]
        loss = self._loss_value(recorder, output, values, result)
        self.output = Unpacked(output.template, (), output.paths)
        self.output_names = tuple(_path_text(path) for path in output.paths)
        self.reads = recorder.reads | self.reads
        self.spans, self.aliases = recorder.marking.spans, fakes.aliases
        self.ignored = recorder.marking.ignored
        tape = Tape(
            recorder.records,
            recorder.frames.root,
            recorder.inputs,
            unpack(None),
            values,
            loss,
            tuple(recorder.marking.cutpoints),
        )
        tape.flow, tape.sides = flow_of_gradients(tape, recorder.ledger), sides_of(tape)
        if self.divider is not None:
            self.spans = self.divider.divide(tape, recorder.messages)
        self.messages += recorder.messages
        tape.messages = tuple(self.messages)
        return tape

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


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def _path_text(path: Any) -> str:
    text = "output"
    for kind, key in path:
        text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text
