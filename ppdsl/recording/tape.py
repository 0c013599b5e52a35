"""What one recording wrote down: values, records and the tree of module calls they belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from ppdsl.annotate import Key
from ppdsl.graph.ir import TensorMeta
from ppdsl.recording import compat
from ppdsl.recording.structure import Path, Template, Unpacked
from ppdsl.source import Place

__all__ = [
    "Ambient",
    "Frame",
    "Message",
    "PassedCutpoint",
    "Record",
    "RecordKind",
    "Tape",
    "Value",
    "ValueKind",
    "ambient_now",
    "memory_of",
    "meta_of",
    "origin",
]


class ValueKind(StrEnum):
    """Where a value comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    RESULT = "result"


@dataclass(slots=True, eq=False)
class Value:
    """A tensor at one point of the recording; writing a tensor in place makes a new value of the same tensor.

    Attributes:
        kind: Where it comes from.
        meta: Shape, dtype, strides, requires_grad.
        name: Qualified name of a parameter or buffer, path of an input, else a hint for people.
        index: Number among the inputs, for an input.
        record: Index of the record that made it; -1 when none did.
        path: Where it stands in that record's result.
        before: The value of the same tensor (or of a tensor that shares its memory) that a write replaced.
        base: The value whose memory it shares since it was made (a view).
        known: It follows from inputs and constants alone, by calls that are pure.
        random: Random numbers went into it.
        tensor: The real tensor, for a constant.
        fresh: A constant that forward makes anew each time, by a call that was not seen.
        holder: (module, attribute) for a constant or buffer that is read from a module.
    """

    kind: ValueKind
    meta: TensorMeta
    name: str = ""
    index: int = -1
    record: int = -1
    path: Path = ()
    before: Value | None = None
    base: Value | None = None
    known: bool = False
    random: bool = False
    tensor: torch.Tensor | None = None
    fresh: bool = False
    holder: tuple[Any, str] | None = None


def origin(value: Value) -> Value:
    """Return the value that this tensor had before the first write."""
    while value.before is not None:
        value = value.before
    return value


def memory_of(value: Value) -> Value:
    """Return the first value of the tensor that this value shares its memory with."""
    value = origin(value)
    while value.base is not None:
        value = origin(value.base)
    return value


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return shape, dtype, strides and requires_grad of a tensor."""
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return TensorMeta(tuple(tensor.shape), _name_of(tensor.dtype), tuple(stride), tensor.requires_grad)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Ambient:
    """Global switches that change what a call does, as they stood at the call.

    `region` counts outermost autocast blocks: each has its own cache of cast weights.
    """

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    autocast_cache: bool = True
    attention: tuple[bool, ...] = ()
    dtype: torch.dtype = torch.float32
    region: int = 0


def ambient_now(region: int = 0) -> Ambient:
    """Return the switches as they stand, in autocast block number `region`."""
    cuda = torch.backends.cuda
    switches = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        compat.autocast_state(),
        torch.is_autocast_cache_enabled(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.get_default_dtype(),
        region,
    )
    return _ambient(*switches)


@functools.lru_cache(256)
def _ambient(*switches: Any) -> Ambient:
    return Ambient(*switches)


class RecordKind(StrEnum):
    """What a record does when it is run again."""

    CALL = "call"
    IDENTITY = "identity"
    ATTRIBUTE = "attribute"
    GUARD = "guard"
    INPUTS = "inputs"  # a guard on strides or flags of all inputs: no use of them
    MODULE = "module"


@dataclass(slots=True, eq=False)
class Record:
    """One call.

    Attributes:
        index: Position on the tape.
        kind: See `RecordKind`.
        target: The callable; for an attribute record (module, name); for a guard what it is about.
        template: (args, kwargs) with holes.
        inputs: For each hole its value.
        outputs: (path in the result, value) of each tensor that it made.
        writes: (before, after) of each tensor it wrote in place, and of each tensor that shares memory with one.
        stage: The stage mark in force, or None.
        ambient: The global switches.
        place: The user's line.
        frame: The module call it belongs to.
        effect: It must run even if nobody uses its result.
        random: It draws random numbers.
        drawing: The torch functions that draw them, one for each call of one.
        flops: Floating-point operations.
        parameters: Values of parameters and buffers used by code that was not recorded call by call.
        expected: What a guard expects.
    """

    index: int
    kind: RecordKind
    target: Any
    template: Template
    inputs: tuple[Value, ...]
    stage: Key | None
    ambient: Ambient
    place: Place | None
    frame: Frame
    outputs: list[tuple[Path, Value]] = field(default_factory=list)
    writes: list[tuple[Value, Value]] = field(default_factory=list)
    effect: bool = False
    random: bool = False
    drawing: tuple[Any, ...] = ()
    flops: int = 0
    parameters: tuple[Value, ...] = ()
    expected: Any = None


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a module (or of `checkpoint`), with the records made inside it.

    Attributes:
        module: The module; None for the outermost frame and for calls of functions.
        function: What to call when it is no module.
        name: Dotted name of the module, or of the function.
        parent: The frame it was called from.
        call: Which call of this module it is, from 0.
        start, end: Its records are `start` to `end - 1`.
        arguments: (args, kwargs), taken apart.
        inputs: Values of the tensors among the arguments, as they were at the call.
        result: What it returned, taken apart.
        outputs: Values of the tensors in the result.
        parts: Records and frames directly inside, in order.
        attributes: (module, name, value) of each tensor attribute set inside.
        marked: A stage mark was passed inside.
        keep_open: Why it can't be called whole, or None.
        forced: It was run on real tensors alone, so that it can only be called whole.
        registered: The module is one of the model's, under `name`.
        depth: Position of the class whose `__call__` runs, in the order of method resolution.
        drew: Python's or numpy's random numbers were drawn directly inside.
        held: Ids of values that a module inside can reach by itself, whatever it is given.
        changed: What its code changed on modules: (module's id, entry) to the module; see `Upkeep`.
        kept: (module, entry) of tensors, tables and submodules that its code left changed without a record.
        saved_hooks: Where saved-tensor hooks were entered directly inside.
        foreign_mode: Where torch was called inside a TorchDispatchMode of the user's, directly inside.
        seeded: Where torch's random numbers were seeded, directly inside.
        collectives: Those of torch.distributed that were called directly inside.
        read_grad: Where `.grad` of a parameter was read, directly inside, and was None.
        said: Auxiliary losses and metrics of code that was not recorded call by call, directly inside: for each whether
            it has a gradient.
    """

    module: Any
    name: str
    parent: Frame | None
    start: int
    arguments: Unpacked
    inputs: tuple[Value, ...]
    ambient: Ambient
    place: Place | None
    stage: Key | None = None
    function: Callable[..., Any] | None = None
    call: int = 0
    end: int = -1
    result: Unpacked | None = None
    outputs: tuple[Value, ...] = ()
    parts: list[Record | Frame] = field(default_factory=list)
    attributes: list[tuple[Any, str, Value]] = field(default_factory=list)
    marked: bool = False
    keep_open: str | None = None
    forced: bool = False
    registered: bool = True
    depth: int = -1
    drew: bool = False
    held: set[int] = field(default_factory=set)
    changed: dict[tuple[int, str], Any] = field(default_factory=dict)
    kept: list[tuple[Any, str]] = field(default_factory=list)
    saved_hooks: Place | None = None
    foreign_mode: Place | None = None
    seeded: Place | None = None
    collectives: list[Any] = field(default_factory=list)
    read_grad: Place | None = None
    said: list[bool] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Message:
    """A plain Python value that forward wrote to a module's attribute: another stage may read it."""

    module: Any
    attribute: str
    stage: Key | None
    place: Place | None
    frame: Frame
    records: int


@dataclass(frozen=True, slots=True)
class PassedCutpoint:
    """A `pp.cutpoint` that forward passed, with the number of records made before it."""

    name: str | None
    optional: bool
    records: int
    place: Place


@dataclass(slots=True, eq=False)
class Tape:
    """A finished recording.

    Attributes:
        records: In the order of the calls.
        root: The outermost frame.
        inputs: The caller's tensors.
        result: What the model (or the loss) returned, taken apart.
        outputs: Values of the tensors in the model's output.
        loss: The value of the loss, or None.
        messages: Python values written to attributes.
        tainted: Ids of modules that code between modules changes, as far as an earlier recording found.
        cutpoints: Cutpoints that the model passed.
        divided: A spec gave the records their stages, not marks.
        repeated: Indices of records that run in every stage that needs them, because a spec replicates their module.
        flow: The ways of the gradients: (value's id, index of the record that gives it a gradient).
        sides: Indices of the records that say auxiliary losses or metrics: whether one of them has a gradient.
    """

    records: list[Record]
    root: Frame
    inputs: tuple[Value, ...]
    result: Unpacked
    outputs: tuple[Value, ...]
    loss: Value | None
    cutpoints: tuple[PassedCutpoint, ...] = ()
    messages: tuple[Message, ...] = ()
    tainted: frozenset[int] = frozenset()
    divided: bool = False
    repeated: frozenset[int] = frozenset()
    flow: frozenset[tuple[int, int]] = frozenset()
    sides: dict[int, bool] = field(default_factory=dict)
