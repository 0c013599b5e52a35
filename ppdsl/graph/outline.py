"""What a recording knows before it is divided: modules, their calls and the steps inside, without torch.

A spec is resolved against an outline: selections name modules, modules have calls, calls hold steps, and the data flow
between steps says which order of stages is possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.source import Span
from ppdsl.units import Bytes, Flops

__all__ = ["Assignment", "Cutpoint", "ModelOutline", "ModuleCall", "ModuleInfo", "ParameterInfo", "Step"]


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module of the model, called or not.

    Attributes:
        name: Dotted name; empty for the model itself.
        types: Class names in the order of method resolution, the module's own first, without `Module` and `object`.
        parameters: First names of the parameters that are directly its own.
        aliases: Other dotted names of the same module object.
    """

    name: str
    types: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter under all its names, the first in the model's order first."""

    names: tuple[str, ...]
    count: int
    bytes: Bytes
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module.

    Attributes:
        index: Position in `ModelOutline.calls`, which is the order in which calls began.
        module: Dotted name.
        number: Which call of this module it is, from 0.
        parent: Index of the call it was made from; None for the model's own call.
        start, end: Its steps are `start` to `end - 1`, those of inner calls included.
    """

    index: int
    module: str
    number: int
    parent: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded torch call.

    Attributes:
        index: Position in the recording.
        call: Index of the innermost module call it happened in; None outside the model (in the loss).
        name: A short readable name.
        needs: Indices of the steps whose results it uses.
        parameters: First names of the parameters it uses.
        flops: Floating-point operations of the forward on one micro-batch.
        bytes: Bytes of what it makes.
        span: The user's line, if known.
    """

    index: int
    call: int | None
    name: str
    needs: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    flops: Flops = Flops(0)
    bytes: Bytes = Bytes(0)
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Cutpoint:
    """A `pp.cutpoint` that forward passed: steps from `step` on come after it."""

    name: str | None
    step: int
    optional: bool
    span: Span | None = None


@dataclass(frozen=True)
class ModelOutline:
    """Everything a spec can speak of.

    Attributes:
        name: Class name of the model.
        modules: In the order of `named_modules`; the model itself first.
        parameters: In the model's order, each once.
        calls: In the order in which they began; the model's own call first.
        steps: In recorded order.
        cutpoints: In the order in which they were passed.
    """

    name: str
    modules: tuple[ModuleInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    calls: tuple[ModuleCall, ...]
    steps: tuple[Step, ...]
    cutpoints: tuple[Cutpoint, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """Which stage each call and step was given to, when a spec was resolved.

    Attributes:
        keys: Stage keys, in the order in which the spec declares them.
        steps: For each step its key; None where the data flow decides, as for code outside every mark.
        calls: For each call its key, or None; a call without steps of its own has one too.
        spans: For each key where the spec declares it.
        repeated: Steps that run in every stage that needs them (`replicate`).
    """

    keys: tuple[int | str, ...]
    steps: tuple[int | str | None, ...]
    calls: tuple[int | str | None, ...]
    spans: tuple[Span, ...]
    repeated: frozenset[int] = frozenset()
