"""One stage while it runs: forward and backward of a micro-batch, and what is kept between them.

All state is indexed by micro-batch; nothing is "the latest". Around one micro-batch of a stage::

    put(source) ... put(source)          received values become leaves of this stage's own autograd graph
        forward                          values -> consumers of this rank, or taken by the executor's sends
    put_gradient(root) ...               one for each consumer that gives one back
        backward                         gradients of the leaves -> producers of this rank, or taken by the sends
    free
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, render_plain
from ppdsl.graph.ir import Edge, StageGraph
from ppdsl.recording.programs import SourceKind, StageProgram
from ppdsl.runtime.exits import exits_of, unexpected_output
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.recompute import Recomputed
from ppdsl.runtime.splitting import Postponed, Splitter
from ppdsl.schedule.flow import carries_gradient

__all__ = ["StageState", "TiedParameter"]

Deliver = Callable[[int, torch.Tensor], None]
"""Hand a tensor of a micro-batch to another stage of this rank."""


class TiedParameter:
    """A parameter that several stages use, as one of them sees it: it keeps this stage's own gradient apart.

    The order in which gradients of several stages are added would otherwise depend on the schedule and the placement.
    """

    __slots__ = ("gradient", "parameter")

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.gradient: torch.Tensor | None = None

    def exchange(self) -> None:
        """Swap `parameter.grad` with this stage's own gradient; called before and after a backward."""
        self.gradient, self.parameter.grad = self.parameter.grad, self.gradient


class StageState:
    """The run-time state of one stage on the rank that holds it.

    Args:
        graph: The stage graph.
        program: What the recorder made of this stage.
        microbatches: Number of micro-batches in a step.
        backward: Whether the step has a backward.
        tied: The parameters whose gradients this stage keeps apart.
        recompute: Whether backward runs the program again instead of keeping what autograd saves.
    """

    def __init__(
        self,
        graph: StageGraph,
        program: StageProgram,
        microbatches: int,
        *,
        backward: bool,
        tied: Sequence[TiedParameter] = (),
        recompute: bool = False,
    ) -> None:
        self.stage = graph.stages[program.stage]
        self.program = program
        self.tied = tuple(tied)
        self._program: Callable[..., Sequence[torch.Tensor]] = Recomputed(program) if recompute else program
        self._microbatches = microbatches
        self._step_has_backward = backward
        self._backward = backward and self.stage.has_backward
        self._entry_of: dict[int, int] = {}
        self._inputs_at: list[tuple[int, int]] = []
        self._leaf: list[bool] = []
        self._entries: list[tuple[int, Edge, Layout]] = []
        self._trace_sources(graph)
        self._exits = exits_of(graph, program.results, backward=backward)
        self._root_of = {exit_.edge.index: number for number, exit_ in enumerate(self._exits)}
        self._loss_at = next((i for i, result in enumerate(program.results) if result.loss), None)
        self._outputs_at = [(i, index) for i, result in enumerate(program.results) for index in result.outputs]
        self._value_targets: list[list[Deliver]] = [[] for _ in self._exits]
        self._gradient_targets: list[Deliver | None] = [None] * len(self._entries)
        self._takes = [len(exit_.consumers) for exit_ in self._exits]
        self._splitter = Splitter(self._report_whole)
        self.warnings: list[str] = []
        self.begin((), (), keep_outputs=False)

    def _trace_sources(self, graph: StageGraph) -> None:
        for position, source in enumerate(self.program.sources):
            if source.kind is SourceKind.INPUT:
                self._inputs_at.append((position, source.index))
                self._leaf.append(False)
                continue
            edge = graph.edges[source.index]
            self._entry_of[edge.index] = position
            self._leaf.append(source.requires_grad and self._step_has_backward)
            if self._leaf[-1] and carries_gradient(graph, edge, self.program.stage):
                self._entries.append((position, edge, Layout.of(edge.meta)))

    # ---------------------------------------------------------------- wiring, once

    def connect(self, producers: dict[int, StageState]) -> None:
        """Hand over by reference what this stage receives from stages of its own rank (`producers`, by stage index)."""
        for producer in producers.values():
            producer.hand_values_to(self)
        for number, (_, edge, _) in enumerate(self._entries):
            if edge.producer in producers:
                self._gradient_targets[number] = producers[edge.producer].gradient_putter(edge.index, self.stage.index)

    def hand_values_to(self, consumer: StageState) -> None:
        """Give every value that `consumer` uses to it by reference instead of waiting for a send to take it."""
        for number, exit_ in enumerate(self._exits):
            if consumer.stage.index in exit_.consumers:
                self._value_targets[number].append(consumer.value_putter(exit_.edge.index))
                self._takes[number] -= 1

    def _putter(self, position: int) -> Deliver:
        def put(microbatch: int, value: torch.Tensor) -> None:
            self.put(position, microbatch, value)

        return put

    def gradient_putter(self, edge: int, consumer: int) -> Deliver:
        """Return the function that takes the gradient of `edge` from `consumer`."""
        number = self._root_of[edge]
        place = self._exits[number].gradients.index(consumer)

        def put(microbatch: int, gradient: torch.Tensor) -> None:
            self._gradients[microbatch][number][place] = gradient

        return put

    def value_putter(self, edge: int) -> Deliver:
        """Return the function that takes the value of `edge`."""
        return self._putter(self._entry_of[edge])

    def value_taker(self, edge: int) -> Callable[[int], torch.Tensor]:
        """Return the function that gives the value of `edge` for one of its sends."""
        number = self._root_of[edge]

        def take(microbatch: int) -> torch.Tensor:
            value, left = self._values[microbatch][number]
            self._values[microbatch][number] = (value, left - 1) if left > 1 else _TAKEN
            return value

        return take

    def gradient_taker(self, edge: int) -> Callable[[int], torch.Tensor]:
        """Return the function that gives this stage's gradient of `edge` for its send."""
        number = next(n for n, (_, entry, _) in enumerate(self._entries) if entry.index == edge)

        def take(microbatch: int) -> torch.Tensor:
            gradient = self._outgoing[microbatch][number]
            self._outgoing[microbatch][number] = _NOTHING
            return gradient

        return take

    # ---------------------------------------------------------------- a step

    def begin(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[torch.Tensor],
        *,
        keep_outputs: bool,
    ) -> None:
        """Forget the step before and take the next one's inputs.

        Args:
            inputs: For each micro-batch the caller's tensors, in the order of the graph's inputs.
            weights: For each micro-batch the gradient of its loss; empty when there is no backward.
            keep_outputs: Whether the model's outputs are kept for the caller.
        """
        count, sources = self._microbatches, len(self._leaf)
        self._inputs = inputs
        self._weights = weights
        self._keep_outputs = keep_outputs
        self.losses: list[torch.Tensor | None] = [None] * count
        self.outputs: list[dict[int, torch.Tensor]] = [{} for _ in range(count)]
        self._arguments: list[list[Any]] = [[None] * sources for _ in range(count)]
        self._leaves: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._roots: list[list[Any]] = [[] for _ in range(count)]
        self._values: list[list[tuple[torch.Tensor, int]]] = [[_TAKEN] * len(self._exits) for _ in range(count)]
        self._gradients: list[list[list[torch.Tensor]]] = [
            [[_NOTHING] * len(exit_.gradients) for exit_ in self._exits] for _ in range(count)
        ]
        self._outgoing: list[list[torch.Tensor]] = [[_NOTHING] * len(self._entries) for _ in range(count)]
        self._postponed: list[Postponed | None] = [None] * count

    def put(self, position: int, microbatch: int, value: torch.Tensor) -> None:
        """Take a received value as a leaf of this stage's own autograd graph."""
        leaf = value.detach()
        if self._leaf[position]:
            leaf.requires_grad_(True)
        self._arguments[microbatch][position] = leaf

    def forward(self, microbatch: int) -> None:
        """Run the stage's program and hand its values on.

        Raises:
            unexpected_output: A value has another shape, element type or `requires_grad` than recorded.
        """
        arguments = self._arguments[microbatch]
        inputs = self._inputs[microbatch] if self._inputs_at else ()
        for position, index in self._inputs_at:
            arguments[position] = inputs[index]
        results = self._program(*arguments)
        values, watch = self._values[microbatch], self._step_has_backward
        for number, exit_ in enumerate(self._exits):
            result = results[exit_.position]
            if (result.shape, result.dtype, result.requires_grad and watch) != exit_.meta:
                raise unexpected_output(self.stage, exit_, result, microbatch)
            value = exit_.layout.conform(result.detach())
            for deliver in self._value_targets[number]:
                deliver(microbatch, value)
            if self._takes[number]:
                values[number] = (value, self._takes[number])
        if self._backward:
            self._keep_for_backward(microbatch, results)
        if self._loss_at is not None:
            self.losses[microbatch] = results[self._loss_at].detach()
        if self._keep_outputs:
            self.outputs[microbatch] = {index: results[i].detach() for i, index in self._outputs_at}
        self._arguments[microbatch] = []

    def _keep_for_backward(self, microbatch: int, results: Sequence[torch.Tensor]) -> None:
        # The graph's edge, not the tensor: what was sent may die before its backward comes.
        self._roots[microbatch] = [
            get_gradient_edge(results[exit_.position]) if exit_.gradients else None for exit_ in self._exits
        ]
        if self._loss_at is not None and results[self._loss_at].requires_grad:
            self._roots[microbatch].append(get_gradient_edge(results[self._loss_at]))
        arguments = self._arguments[microbatch]
        self._leaves[microbatch] = [arguments[position] for position, _, _ in self._entries]

    def backward(self, microbatch: int) -> None:
        """Run autograd from the stage's values to its parameters and leaves, and hand the leaves' gradients on."""
        roots, gradients = self._incoming(microbatch)
        if roots:
            with self._apart():
                torch.autograd.backward(roots, gradients)
        self._hand_gradients_back(microbatch, [leaf.grad for leaf in self._leaves[microbatch]])

    def input_gradients(self, microbatch: int) -> None:
        """Run autograd from the stage's values to its leaves alone, and hand their gradients on."""
        roots, gradients = self._incoming(microbatch)
        found: list[torch.Tensor | None] = [None] * len(self._entries)
        if roots:
            with self._apart():
                found, self._postponed[microbatch] = self._splitter.input_gradients(
                    roots, gradients, self._leaves[microbatch]
                )
        self._hand_gradients_back(microbatch, found)

    def weight_gradients(self, microbatch: int) -> None:
        """Add the gradients of the stage's parameters that `input_gradients` has left."""
        postponed, self._postponed[microbatch] = self._postponed[microbatch], None
        if postponed is not None:
            with self._apart():
                self._splitter.weight_gradients(postponed)

    def _incoming(self, microbatch: int) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return where the backward of a micro-batch starts, and with which gradients."""
        roots, gradients = [], []
        for root, parts in zip(self._roots[microbatch], self._gradients[microbatch], strict=False):
            if root is not None:
                roots.append(root)
                gradients.append(_sum_in_order(parts))
        if len(self._roots[microbatch]) > len(self._exits):
            roots.append(self._roots[microbatch][-1])
            gradients.append(self._weights[microbatch])
        return roots, gradients

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep this stage's gradients of tied parameters apart while the body runs."""
        for tied in self.tied:
            tied.exchange()
        try:
            yield
        finally:
            for tied in self.tied:
                tied.exchange()

    def _hand_gradients_back(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        leaves = self._leaves[microbatch]
        for number, (_, _, layout) in enumerate(self._entries):
            gradient = gradients[number]
            gradient = layout.conform(torch.zeros_like(leaves[number]) if gradient is None else gradient)
            deliver = self._gradient_targets[number]
            if deliver is None:
                self._outgoing[microbatch][number] = gradient
            else:
                deliver(microbatch, gradient)
        self._leaves[microbatch] = []
        self._roots[microbatch] = []
        self._gradients[microbatch] = []

    def _report_whole(self, nodes: Sequence[str]) -> None:
        names = ", ".join(f"`{name}`" for name in nodes)
        message = (
            f"Stage {self.stage.label} cannot split the backward of {names}: its weight gradients are computed with "
            "the input gradients."
        )
        self.warnings.append(message)
        warnings.warn(
            PpdslWarning(render_plain([Diagnostic("backward-not-split", message, severity=Severity.WARNING)])),
            stacklevel=2,
        )

    def free(self, microbatch: int) -> None:
        """Drop everything that is kept of a micro-batch, except its loss and the outputs for the caller."""
        self._arguments[microbatch] = []
        self._leaves[microbatch] = []
        self._roots[microbatch] = []
        self._values[microbatch] = []
        self._gradients[microbatch] = []
        self._outgoing[microbatch] = []
        self._postponed[microbatch] = None


_NOTHING = torch.empty(0)
_TAKEN = (_NOTHING, 0)


def _sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
