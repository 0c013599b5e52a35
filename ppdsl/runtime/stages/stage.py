"""One stage while it runs: forward and backward of a micro-batch, and what is kept between them.

All state is indexed by micro-batch; nothing is "the latest". Around one micro-batch of a stage::

    put(source) ... put(source)          received values become leaves of this stage's own autograd graph
        forward                          values -> consumers of this rank, or taken by the executor's sends
    put_gradient(root) ...               one for each consumer that gives one back
        backward                         gradients of the leaves -> producers of this rank, or taken by the sends
    free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppdsl.annotate import hear
from ppdsl.graph.ir import Edge, StageGraph
from ppdsl.recording import compat
from ppdsl.recording.programs import SourceKind, StageProgram
from ppdsl.runtime.layout import Layout, alone
from ppdsl.runtime.stages.drawing import Drawing, drawn_by
from ppdsl.runtime.stages.exits import exits_of, unexpected_gradient, unexpected_output
from ppdsl.runtime.stages.hearing import DEAF, Hearing
from ppdsl.runtime.stages.recompute import Recomputed
from ppdsl.runtime.stages.splitting import Postponed, Splitter, warn_of_whole
from ppdsl.runtime.stages.tied import TiedParameter, apart
from ppdsl.schedule.flow import carries_gradient

__all__ = ["StageState", "TiedParameter"]

Deliver = Callable[[int, torch.Tensor], None]
"""Hand a tensor of a micro-batch to another stage of this rank."""
Program = Callable[..., Sequence[torch.Tensor]]


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
        self.drawing: Drawing | None = None
        self._program: Program = Recomputed(program) if recompute else program
        self._microbatches = microbatches
        self._step_has_backward = backward
        self.runs_backward = backward and self.stage.has_backward
        self._entry_of: dict[int, int] = {}
        self.inputs_at: list[tuple[int, int]] = []
        self._leaf: list[bool] = []
        self._entries: list[tuple[int, Edge, Layout]] = []
        self._silent: list[tuple[int, Edge]] = []
        self._trace_sources(graph)
        self._leaves_at = [place for place, *_ in self._entries] + [place for place, _ in self._silent]
        self._exits = exits_of(graph, program.results, backward=backward)
        self._root_of = {exit_.edge.index: number for number, exit_ in enumerate(self._exits)}
        self._loss_at = next((i for i, result in enumerate(program.results) if result.loss), None)
        self._outputs_at = [(i, index) for i, result in enumerate(program.results) for index in result.outputs]
        self._value_targets: list[list[Deliver]] = [[] for _ in self._exits]
        self._gradient_targets: list[Deliver | None] = [None] * len(self._entries)
        self._takes = [len(exit_.consumers) for exit_ in self._exits]
        self.splitter = Splitter(self._report_whole)
        self.hearing = Hearing(self.stage, backward=backward)
        self.warnings: list[str] = []
        self.begin((), (), keep_outputs=False)

    def _trace_sources(self, graph: StageGraph) -> None:
        for position, source in enumerate(self.program.sources):
            if source.kind is SourceKind.INPUT:
                self.inputs_at.append((position, source.index))
                self._leaf.append(False)
                continue
            edge = graph.edges[source.index]
            self._entry_of[edge.index] = position
            self._leaf.append(source.requires_grad and self._step_has_backward)
            if self._leaf[-1] and carries_gradient(graph, edge, self.program.stage):
                self._entries.append((position, edge, Layout.of(edge.meta)))
            elif self._leaf[-1] and self.runs_backward:
                self._silent.append((position, edge))

    # ---------------------------------------------------------------- wiring, once

    def wrap(self, around: Callable[[Program], Program]) -> None:
        """Run `around` of what the stage runs in its place."""
        self._program = around(self._program)

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
        shares: Sequence[torch.Tensor] = (),
    ) -> None:
        """Forget the step before and take the next one's inputs.

        Args:
            inputs: For each micro-batch the caller's tensors, in the order of the graph's inputs.
            weights: For each micro-batch the gradient of its loss; empty when there is no backward.
            keep_outputs: Whether the model's outputs are kept for the caller.
            shares: For each micro-batch the gradient of what the stage adds to its loss.
        """
        count, sources = self._microbatches, len(self._leaf)
        self._inputs = inputs
        self._weights = weights
        self._shares = shares
        self.hearing.begin(count)
        self._keep_outputs = keep_outputs
        self.losses: list[torch.Tensor | None] = [None] * count
        self.outputs: list[dict[int, torch.Tensor]] = [{} for _ in range(count)]
        self._arguments: list[list[Any]] = [[None] * sources for _ in range(count)]
        self._leaves: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._roots: list[list[Any]] = [[] for _ in range(count)]
        self._ends: list[list[tuple[Any, torch.Tensor]]] = [[] for _ in range(count)]
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
        inputs = self._inputs[microbatch] if self.inputs_at else ()
        for position, index in self.inputs_at:
            arguments[position] = inputs[index]
        with drawn_by(self.drawing, microbatch), hear(self.hearing.at(microbatch)):
            results = self._program(*arguments)
        added = self.hearing.take()
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
        if self.runs_backward:
            self._keep_for_backward(microbatch, results, added)
        if self._loss_at is not None:
            self.losses[microbatch] = alone(results[self._loss_at])
        if self._keep_outputs:
            self.outputs[microbatch] = {index: results[i].detach() for i, index in self._outputs_at}
        self._arguments[microbatch] = []

    def _keep_for_backward(self, microbatch: int, results: Sequence[torch.Tensor], added: torch.Tensor | None) -> None:
        # The graph's edge, not the tensor: what was sent may die before its backward comes.
        self._roots[microbatch] = [
            get_gradient_edge(results[exit_.position]) if exit_.gradients else None for exit_ in self._exits
        ]
        if self._loss_at is not None and results[self._loss_at].requires_grad:
            end = get_gradient_edge(results[self._loss_at])
            self._ends[microbatch].append((end, self._weights[microbatch].reshape(())))
        if added is not None and added.requires_grad:
            share = self._shares[microbatch].reshape(()).to(added.dtype)
            self._ends[microbatch].append((get_gradient_edge(added), share))
        arguments = self._arguments[microbatch]
        self._leaves[microbatch] = [arguments[position] for position in self._leaves_at]

    def backward(self, microbatch: int) -> None:
        """Run autograd from the stage's values to its parameters and leaves, and hand the leaves' gradients on.

        Raises:
            unexpected_gradient: A value gets a gradient that got none when it was recorded.
        """
        roots, gradients = self._incoming(microbatch)
        if roots:
            with apart(self.tied), drawn_by(self.drawing, microbatch), hear(DEAF):
                compat.run_backward(roots, gradients)
        found = [leaf.grad for leaf in self._leaves[microbatch]]
        for (_, edge), gradient in zip(self._silent, found[len(self._entries) :], strict=True):
            if gradient is not None:
                raise unexpected_gradient(self.stage, edge, microbatch)
        self._hand_gradients_back(microbatch, found)

    def input_gradients(self, microbatch: int) -> None:
        """Run autograd from the stage's values to its leaves alone, and hand their gradients on."""
        roots, gradients = self._incoming(microbatch)
        found: list[torch.Tensor | None] = [None] * len(self._entries)
        if roots:
            with apart(self.tied), drawn_by(self.drawing, microbatch), hear(DEAF):
                found, self._postponed[microbatch] = self.splitter.input_gradients(
                    roots, gradients, self._leaves[microbatch][: len(self._entries)]
                )
        self._hand_gradients_back(microbatch, found)

    def weight_gradients(self, microbatch: int) -> None:
        """Add the gradients of the stage's parameters that `input_gradients` has left."""
        postponed, self._postponed[microbatch] = self._postponed[microbatch], None
        if postponed is not None:
            with apart(self.tied), drawn_by(self.drawing, microbatch), hear(DEAF):
                self.splitter.weight_gradients(postponed)

    def _incoming(self, microbatch: int) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return where the backward of a micro-batch starts, and with which gradients."""
        roots, gradients = [], []
        for root, parts in zip(self._roots[microbatch], self._gradients[microbatch], strict=True):
            if root is not None:
                roots.append(root)
                gradients.append(_sum_in_order(parts))
        for end, weight in self._ends[microbatch]:
            roots.append(end)
            gradients.append(weight)
        return roots, gradients

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
        self._ends[microbatch] = []
        self._gradients[microbatch] = []

    def _report_whole(self, nodes: Sequence[str]) -> None:
        self.warnings.append(warn_of_whole(self.stage.label, nodes))

    def free(self, microbatch: int) -> None:
        """Drop everything that is kept of a micro-batch, except its loss and the outputs for the caller."""
        self._arguments[microbatch] = []
        self._leaves[microbatch] = []
        self._roots[microbatch] = []
        self._ends[microbatch] = []
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
