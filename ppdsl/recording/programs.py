"""One torch.fx program for each visit: the user's modules under their own names, and the torch calls between them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from ppdsl.graph.ir import TensorMeta
from ppdsl.recording.callables import (
    Captured,
    EnterAmbient,
    Fill,
    Pick,
    ReadAttribute,
    SetAttribute,
    close_ambients,
    enter_region,
    exit_ambient,
)
from ppdsl.recording.draws import Draw
from ppdsl.recording.items import Item
from ppdsl.recording.routes import Routes
from ppdsl.recording.spelling import can_be_named, identifier, is_importable, plain_arguments
from ppdsl.recording.structure import Path
from ppdsl.recording.tape import Ambient, Value, ValueKind, origin
from ppdsl.recording.visits import Visit

__all__ = ["Result", "Source", "SourceKind", "StageProgram", "build_module"]


class SourceKind(StrEnum):
    """Where a stage program's argument comes from."""

    INPUT = "input"
    EDGE = "edge"


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor argument of a stage program.

    Attributes:
        kind: The caller's tensor, or the value of an edge.
        index: Position in `StageGraph.inputs` or `StageGraph.edges`.
        requires_grad: Whether a gradient for it must be computed.
    """

    kind: SourceKind
    index: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor result of a stage program.

    Attributes:
        edge: Index of the edge it feeds, or None.
        outputs: Positions among the leaves of the model's output that are this tensor.
        loss: Whether it is the loss.
        meta: Recorded shape, dtype, strides and requires_grad.
    """

    edge: int | None
    outputs: tuple[int, ...]
    loss: bool
    meta: TensorMeta


@dataclass(frozen=True)
class StageProgram:
    """What one stage runs for one micro-batch.

    Attributes:
        stage: Index of the stage.
        module: Takes one tensor for each source, returns a tuple with one tensor for each result.
        sources: In the order of the arguments.
        results: In the order of the returned tuple.
        parameters: (name, parameter) that the stage uses: the user's own objects.
        modules: (name, module) that it calls whole.
        state: (module, attribute) of each buffer and tensor attribute that it changes.
        draws: What in it draws random numbers, in order.
    """

    stage: int
    module: fx.GraphModule
    sources: tuple[Source, ...]
    results: tuple[Result, ...]
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]
    modules: tuple[tuple[str, torch.nn.Module], ...]
    state: tuple[tuple[torch.nn.Module, str], ...] = ()
    draws: tuple[Draw, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage; switches that the model had set are left as they were found, also after an exception."""
        try:
            return self.module.forward(*tensors)  # type: ignore[no-any-return]
        except BaseException:
            close_ambients()
            raise


def build_module(
    visit: Visit, routes: Routes, exports: Sequence[Value], base: Ambient, name: str, names: Mapping[int, str]
) -> tuple[fx.GraphModule, list[Value]]:
    """Return the visit's program and the values it takes, in the order of its arguments.

    Args:
        visit: What to write.
        routes: Where values come from.
        exports: Values to return.
        base: The switches around the model.
        name: Class name of the program.
        names: Names of the edges, by the value's id.
    """
    writer = _Writer(visit, routes, exports, base, names)
    return writer.finish(name), writer.arguments


class _Writer:
    """Writes one fx graph."""

    def __init__(
        self, visit: Visit, routes: Routes, exports: Sequence[Value], base: Ambient, names: Mapping[int, str]
    ) -> None:
        self.visit = visit
        self.names = names
        self.routes = routes
        self.exports = list(exports)
        self.base = base
        self.graph = fx.Graph()
        self.root: dict[str, Any] = {}
        self.nodes: dict[int, fx.Node] = {}
        self.kept: dict[int, fx.Node] = {}  # exported values that are overwritten later: copies
        self.arguments: list[Value] = []
        self.items = routes.items_of(visit)
        self.used = {id(routes.resolve(value)) for item in self.items for value in item.inputs}
        self.used |= {id(value) for value in self.exports}
        self._placeholders()
        self._body()

    def finish(self, name: str) -> fx.GraphModule:
        results = tuple(self.kept.get(id(value)) or self._node(value) for value in self.exports)
        self.graph.output(results)
        return fx.GraphModule(self.root, self.graph, class_name=name)

    # -- arguments ----------------------------------------------------------------------------------------------

    def _placeholders(self) -> None:
        arriving: dict[int, Value] = {}
        for item in self.items:
            for value in item.inputs:
                self._note_arrival(value, arriving)
            for before, _ in item.writes:
                if id(self.routes.resolve(before)) in self.used:
                    self._note_arrival(before, arriving)
        for value in self.exports:
            self._note_arrival(value, arriving)
        written = {self.routes.memory(before, self.visit) for item in self.items for before, _ in item.writes}
        taken: set[str] = set()
        for value in arriving.values():
            name = identifier(self.names.get(id(value)) or value.name)
            while name in taken:
                name += "_"
            taken.add(name)
            self.arguments.append(value)
            self.nodes[id(value)] = self.graph.placeholder(name)
        for value in self.arguments:
            if id(value) in written:
                # Written in place here: never into the sender's memory, and never into a leaf.
                self.nodes[id(value)] = self.graph.call_function(torch.clone, (self.nodes[id(value)],))

    def _note_arrival(self, value: Value, arriving: dict[int, Value]) -> None:
        value = self.routes.same_tensor(self.routes.resolve(value), self.visit)
        if self.routes.arrives(value, self.visit):
            arriving.setdefault(id(value), value)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _body(self) -> None:
        exported = set(map(id, self.exports))
        ambient = _Blocks(self.graph, self.base)
        for item in self.items:
            ambient.switch(item.ambient)
            for before, _ in item.writes:
                before = self.routes.resolve(before)
                if id(before) in exported and id(before) not in self.kept:
                    self.kept[id(before)] = self.graph.call_function(torch.clone, (self._node(before),))
            self._call(item)
        ambient.switch(self.base)

    def _call(self, item: Item) -> None:
        inputs = [self._node(value) for value in item.inputs]
        node = self._call_node(item, inputs)
        for path, value in item.outputs:
            if id(value) in self.used or (value.record >= 0 and self._shared(value)):
                self.nodes[id(value)] = self._picked(node, path)
        for module, name, value in item.attributes:
            if id(value) in self.used:
                self.nodes[id(value)] = self.graph.call_function(ReadAttribute(module, name), (node,))

    def _shared(self, value: Value) -> bool:
        """Whether another version of this tensor is used later (it is written in place)."""
        return any(id(self.routes.resolve(before)) == id(value) for item in self.items for before, _ in item.writes)

    def _call_node(self, item: Item, inputs: list[fx.Node]) -> fx.Node:
        if item.attribute_write:
            module, name = item.target
            return self.graph.call_function(SetAttribute(module, name, item.template), tuple(inputs))
        call = plain_arguments(item.template, inputs)
        if item.is_module and item.module_name is not None:
            path = item.module_name or "model"
            if call is not None and can_be_named(path):
                self.root[path] = item.target
                return self.graph.call_module(path, *call)
        if call is not None and is_importable(item.target):
            return self.graph.call_function(item.target, *call)
        name = identifier(item.module_name or item.name)
        return self.graph.call_function(Fill(item.target, item.template, name), tuple(inputs))

    def _picked(self, node: fx.Node, path: Path) -> fx.Node:
        if any(kind == "node" for kind, _ in path):
            return self.graph.call_function(Pick(path), (node,))
        for kind, key in path:
            node = self.graph.call_function(operator.getitem if kind == "item" else getattr, (node, key))
        return node

    # -- values ---------------------------------------------------------------------------------------------------

    def _node(self, value: Value) -> fx.Node:
        value = self.routes.same_tensor(self.routes.resolve(value), self.visit)
        node = self.nodes.get(id(value))
        if node is None:
            node = self.nodes[id(value)] = self._local(value)
        return node

    def _local(self, value: Value) -> fx.Node:
        start = origin(value)
        if start.kind is ValueKind.PARAMETER:
            if not can_be_named(start.name) and start.tensor is not None:
                return self.graph.call_function(Captured(start.tensor, identifier(start.name)))
            self.root[start.name] = start.tensor
            return self.graph.get_attr(start.name)
        if start.holder is not None:
            return self.graph.call_function(ReadAttribute(*start.holder))
        if start.kind is ValueKind.CONSTANT and start.tensor is not None:
            return self.graph.call_function(Captured(start.tensor, identifier(start.name), fresh=start.fresh))
        raise LookupError(
            f"value {value.name} ({value.kind}) of record {value.record} is not available in stage {self.visit.key}"
        )


class _Blocks:
    """Writes the switches of grad mode, autocast and attention kernels around runs of items that share them."""

    def __init__(self, graph: fx.Graph, base: Ambient) -> None:
        self._graph = graph
        self._base = self._now = base
        self._region: fx.Node | None = None
        self._inner: fx.Node | None = None

    def switch(self, ambient: Ambient) -> None:
        """Leave the present block and enter the one for `ambient`, where they differ."""
        if ambient == self._now:
            return
        if self._inner is not None:
            self._graph.call_function(exit_ambient, (self._inner,))
            self._inner = None
        if ambient.region != self._now.region:
            if self._region is not None:
                self._graph.call_function(exit_ambient, (self._region,))
                self._region = None
            if ambient.region != self._base.region:
                self._region = self._graph.call_function(enter_region)
        if replace(ambient, region=0) != replace(self._base, region=0):
            self._inner = self._graph.call_function(EnterAmbient(ambient, self._base))
        self._now = ambient
