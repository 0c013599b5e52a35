"""The stage graph: stages, the values between them, ties and routes. Frozen, printable, without torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from ppdsl.diagnostics import Diagnostic, GraphError
from ppdsl.source import Span
from ppdsl.units import Bytes, Flops, counted

__all__ = ["Edge", "InputRoute", "OutputRoute", "Stage", "StageGraph", "TensorMeta", "Tie"]

_ITEM_SIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor before it exists.

    Attributes:
        shape: Sizes, for one micro-batch.
        dtype: torch's name of the element type (`float32`).
        stride: Elements between neighbours along each axis (`channels_last` shows here).
        requires_grad: Whether autograd would give it a gradient; see `Edge.gradient_from` for whether one flows.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    requires_grad: bool = False

    @property
    def bytes(self) -> Bytes:
        """Size of the elements, without gaps between them."""
        return Bytes(math.prod(self.shape) * _ITEM_SIZE.get(self.dtype, 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Stage:
    """One node of the graph: a visit of a stage the user marked.

    A stage that is left and entered again, with something of another stage in between, has several visits. Each is
    a node of its own (`0`, then `0'`); all visits of one key are placed on the same rank.

    Attributes:
        index: Position along the model, a topological order; what schedules and actions count.
        key: What the user marked it with.
        visit: 0 for the first visit of the key, 1 for the next.
        span: The mark's place; None when the stage was not marked in Python source.
        modules: Dotted names of the modules called whole, in order of their calls.
        operations: Number of torch calls recorded between module calls.
        parameters: Names of the parameters this stage uses.
        buffers: Names of the buffers this stage uses.
        parameter_bytes: Bytes of these parameters.
        trainable: Whether any of these parameters requires a gradient.
        has_backward: Whether the stage takes part in backward at all.
        flops: Floating-point operations of one forward on one micro-batch (as counted by torch's flop formulas).
        says: Whether it says auxiliary losses or metrics (`pp.aux_loss`, `pp.metric`).
    """

    index: int
    key: int | str
    visit: int = 0
    span: Span | None = None
    modules: tuple[str, ...] = ()
    operations: int = 0
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    parameter_bytes: Bytes = Bytes(0)
    trainable: bool = True
    has_backward: bool = True
    flops: Flops = Flops(0)
    says: bool = False

    @property
    def label(self) -> str:
        """The key, with one prime for each visit after the first."""
        return f"{self.key}" + "'" * self.visit


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one stage makes and other stages use.

    Attributes:
        index: Position in `StageGraph.edges`; names the message.
        value: A readable name (`enc0`, `add_2`).
        meta: Shape, dtype, layout and whether gradient flows, for one micro-batch.
        producer: Index of the stage that makes it.
        consumers: Indices of the stages that use it, ascending.
        span: The source line that made the value.
        gradients: Indices of the consumers whose use of the value gives it a gradient; None: of all of them, if the
            value requires one.
    """

    index: int
    value: str
    meta: TensorMeta
    producer: int
    consumers: tuple[int, ...]
    span: Span | None = None
    gradients: tuple[int, ...] | None = None

    @property
    def gradient_from(self) -> tuple[int, ...]:
        """The consumers that give a gradient back, where they take part in backward."""
        if not self.meta.requires_grad:
            return ()
        return self.consumers if self.gradients is None else self.gradients

    @property
    def bytes(self) -> Bytes:
        """Size of one message."""
        return self.meta.bytes


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that several stages use, under one or more names.

    Attributes:
        names: All names the model gives it; the first is the owner's.
        stages: Indices of the stages that use it, ascending; the first owns it.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputRoute:
    """A tensor that the caller gives, and the stages it goes to.

    Attributes:
        name: Path of the argument (`tokens`, `batch['mask']`, `targets[0]`).
        meta: For one micro-batch.
        consumers: Indices of the stages that use it; empty when nobody does.
    """

    name: str
    meta: TensorMeta
    consumers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputRoute:
    """A tensor of the model's output, and the stage that makes it."""

    name: str
    meta: TensorMeta
    producer: int


@dataclass(frozen=True)
class StageGraph:
    """Everything the planner, the schedules and the pictures need to know of a model.

    Attributes:
        stages: In topological order; `stages[i].index == i`.
        edges: Values between stages; `edges[i].index == i`.
        ties: Parameters used by more than one stage.
        inputs: The caller's tensors, in the order of the arguments.
        outputs: The tensors of the model's output, in the order of its leaves.
        loss: Index of the stage that computes the loss, or None when there is none.
        name: Class name of the model.
        warnings: What was noticed while recording.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()
    inputs: tuple[InputRoute, ...] = ()
    outputs: tuple[OutputRoute, ...] = ()
    loss: int | None = None
    name: str = "model"
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        count = len(self.stages)
        wrong = [f"stage {s.index} at position {i}" for i, s in enumerate(self.stages) if s.index != i]
        wrong += [f"edge {e.index} at position {i}" for i, e in enumerate(self.edges) if e.index != i]
        for edge in self.edges:
            if not all(edge.producer < c < count for c in edge.consumers) or not edge.consumers:
                wrong.append(f"edge {edge.index} from stage {edge.producer} to {edge.consumers}")
        if wrong:
            raise GraphError(Diagnostic("broken-graph", f"The stage graph is inconsistent: {'; '.join(wrong)}."))

    def predecessors(self, stage: int) -> tuple[int, ...]:
        """Stages that `stage` receives from, ascending."""
        return tuple(sorted({e.producer for e in self.edges if stage in e.consumers}))

    def successors(self, stage: int) -> tuple[int, ...]:
        """Stages that use what `stage` makes, ascending."""
        return tuple(sorted({c for e in self.edges if e.producer == stage for c in e.consumers}))

    @property
    def digest(self) -> str:
        """A hash of everything ranks must agree on before the first message."""
        text = repr((self.stages, self.edges, self.ties, self.inputs, self.outputs, self.loss))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"{self.name}: {counted(len(self.stages), 'stage')}, {counted(len(self.edges), 'edge')}"]
        lines += [f"  stage {s.label}: {', '.join(s.modules) or 'no modules'}" for s in self.stages]
        for edge in self.edges:
            source = self.stages[edge.producer].label
            targets = ", ".join(self.stages[c].label for c in edge.consumers)
            grad = "" if edge.gradient_from else ", no gradient"
            lines.append(f"  {source} -> {targets}: {edge.value} {edge.meta}{grad}")
        lines += [f"  tied: {' = '.join(tie.names)} in stages {tie.stages}" for tie in self.ties]
        return "\n".join(lines)
