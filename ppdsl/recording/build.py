"""From a tape to the frozen stage graph and its programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.graph.ir import Edge, InputRoute, OutputRoute, Stage, StageGraph, Tie
from ppdsl.recording.checks import check_borders, check_open_frames, order_warnings, warnings_of
from ppdsl.recording.claims import claim_parameters
from ppdsl.recording.draws import Draws
from ppdsl.recording.findings import error_at
from ppdsl.recording.items import Collapsed, Item, collapse
from ppdsl.recording.programs import Result, Source, SourceKind, StageProgram, build_module
from ppdsl.recording.routes import Routes
from ppdsl.recording.shared_state import written_attributes
from ppdsl.recording.tape import Tape, Value, ValueKind, origin
from ppdsl.recording.typechecks import type_warnings
from ppdsl.recording.visits import Visit, assign_visits
from ppdsl.source import Span
from ppdsl.units import Bytes, Flops

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """A stage graph with its programs and guards' records."""

    graph: StageGraph
    programs: tuple[StageProgram, ...]
    collapsed: Collapsed


def build(
    tape: Tape,
    model: torch.nn.Module,
    spans: dict[Any, Span],
    aliases: dict[int, list[str]],
    output_names: tuple[str, ...],
) -> Built:
    """Return the stage graph and one program for each of its stages.

    Args:
        tape: The recording.
        model: The recorded model.
        spans: Where each stage key was marked.
        aliases: All names of each parameter and buffer, by id.
        output_names: Paths of the tensors in the model's output.
    """
    collapsed = collapse(tape)
    check_open_frames(tape, collapsed)
    outputs = [*tape.outputs, *((tape.loss,) if tape.loss is not None else ())]
    visits, repeating = assign_visits(collapsed, outputs)
    check_borders(visits, collapsed)
    routes = Routes(collapsed, visits, repeating, outputs)
    position = {id(visit): index for index, visit in enumerate(visits)}
    flow = _Flow(tape, routes, visits)
    edges = _edges(routes, position, collapsed, flow)
    edge_of = {id(value): edge.index for value, edge in edges}
    names = {id(value): edge.value for value, edge in edges}
    results = _results(tape, routes, visits, edge_of)
    draws = Draws(tape, collapsed)
    programs = []
    stages = []
    consumers: dict[int, set[int]] = {}
    items_of_visits = [routes.items_of(visit) for visit in visits]
    claims = claim_parameters(items_of_visits, routes, aliases)
    for index, visit in enumerate(visits):
        exports, described = results[index]
        name = f"Stage_{index}"
        module, arguments = build_module(visit, routes, exports, tape.root.ambient, name, names)
        items, parameters = items_of_visits[index], claims[index]
        sources = tuple(_source(value, edge_of) for value in arguments)
        for source in sources:
            if source.kind is SourceKind.INPUT:
                consumers.setdefault(source.index, set()).add(index)
        state = written_attributes(items)
        drawn = draws.of(items)
        programs.append(StageProgram(index, module, sources, described, parameters, _modules(items), state, drawn))
        gradient = any(
            (d.meta.requires_grad and (d.loss or (tape.loss is None and bool(d.outputs))))
            or (d.edge is not None and bool(edges[d.edge][1].gradient_from))
            for d in described
        )
        stages.append(_stage(index, visit, items, parameters, spans, tape.sides, gradient=gradient))
    _check_parameter_hooks(programs)
    graph = StageGraph(
        stages=tuple(stages),
        edges=tuple(edge for _, edge in edges),
        ties=_ties(programs, aliases),
        inputs=tuple(
            InputRoute(value.name, value.meta, tuple(sorted(consumers.get(value.index, ())))) for value in tape.inputs
        ),
        outputs=tuple(
            OutputRoute(name, value.meta, _home(routes.resolve(value), routes, position, len(visits)))
            for name, value in zip(output_names, tape.outputs, strict=True)
        ),
        loss=None if tape.loss is None else _home(routes.resolve(tape.loss), routes, position, len(visits)),
        name=type(model).__name__,
        warnings=(
            *warnings_of(tape, collapsed),
            *order_warnings(visits),
            *type_warnings(collapsed),
            *_edge_warnings(edges, collapsed),
        ),
    )
    return Built(graph, tuple(programs), collapsed)


class _Flow:
    """Answers whether a gradient of a value comes from a visit that uses it."""

    def __init__(self, tape: Tape, routes: Routes, visits: list[Visit]) -> None:
        self._records = {
            id(visit): {number for item in routes.items_of(visit) for number in item.records} for visit in visits
        }
        self._uses: dict[int, set[int]] = {}
        for record in tape.records:
            for value in (*record.inputs, *(before for before, _ in record.writes)):
                if (id(value), record.index) in tape.flow:
                    self._uses.setdefault(id(routes.resolve(value)), set()).add(record.index)

    def comes(self, value: Value, visit: Visit) -> bool:
        return not self._uses.get(id(value), set()).isdisjoint(self._records[id(visit)])


def _edges(routes: Routes, position: dict[int, int], collapsed: Collapsed, flow: _Flow) -> list[tuple[Value, Edge]]:
    makers = {id(value): item for item in collapsed.items for value in _made(item)}
    found = sorted(
        routes.crossing.values(), key=lambda entry: (position[id(entry[1])], entry[0].record, str(entry[0].path))
    )
    names: dict[str, int] = {}
    edges = []
    for index, (value, home, users) in enumerate(found):
        item = makers.get(id(value))
        name = (item.module_name or item.name) if item is not None else value.name
        count = names[name] = names.get(name, -1) + 1
        span = item.place.span if item is not None and item.place is not None else None
        edge = Edge(
            index,
            name if count == 0 else f"{name}_{count}",
            value.meta,
            position[id(home)],
            tuple(sorted(position[id(user)] for user in users)),
            span,
            tuple(sorted(position[id(user)] for user in users if flow.comes(value, user))),
        )
        edges.append((value, edge))
    return edges


def _made(item: Item) -> list[Value]:
    return [v for _, v in item.outputs] + [v for _, v in item.writes] + [v for _, _, v in item.attributes]


def _results(
    tape: Tape, routes: Routes, visits: list[Visit], edge_of: dict[int, int]
) -> list[tuple[list[Value], tuple[Result, ...]]]:
    loss = None if tape.loss is None else id(routes.resolve(tape.loss))
    leaves: dict[int, list[int]] = {}
    for leaf, value in enumerate(tape.outputs):
        leaves.setdefault(id(routes.resolve(value)), []).append(leaf)
    found = []
    for visit in visits:
        exports = list(routes.exports[id(visit)].values())
        described = tuple(
            Result(edge_of.get(id(value)), tuple(leaves.get(id(value), ())), id(value) == loss, value.meta)
            for value in exports
        )
        found.append((exports, described))
    return found


def _source(value: Value, edge_of: dict[int, int]) -> Source:
    if id(value) in edge_of:
        return Source(SourceKind.EDGE, edge_of[id(value)], value.meta.requires_grad)
    return Source(SourceKind.INPUT, value.index, value.meta.requires_grad)


def _check_parameter_hooks(programs: list[StageProgram]) -> None:
    """A hook on a parameter gets the whole gradient; two stages would each give it a part."""
    stages: dict[int, list[int]] = {}
    for program in programs:
        for name, parameter in program.parameters:
            stages.setdefault(id(parameter), []).append(program.stage)
            hooked = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooked and len(stages[id(parameter)]) > 1:
                raise error_at(
                    "parameter-hook",
                    f"Parameter `{name}` has a gradient hook and is used in stages "
                    f"{', '.join(map(str, stages[id(parameter)]))}: the hook would run on a part of the gradient.",
                    None,
                    "do what the hook does after the step, or use the parameter in one stage",
                )


def _home(value: Value, routes: Routes, position: dict[int, int], count: int) -> int:
    home = routes.home(value)
    return count - 1 if home is None else position[id(home)]


def _modules(items: list[Item]) -> tuple[tuple[str, torch.nn.Module], ...]:
    return tuple((item.module_name, item.target) for item in items if item.module_name is not None)


def _stage(
    index: int,
    visit: Visit,
    items: list[Item],
    parameters: tuple[tuple[str, torch.nn.Parameter], ...],
    spans: dict[Any, Span],
    sides: dict[int, bool],
    *,
    gradient: bool,
) -> Stage:
    buffers: dict[str, None] = {}
    for item in items:
        for value in (*item.buffers_read, *item.inputs):
            start = origin(value)
            if start.kind is ValueKind.BUFFER:
                buffers[start.name] = None
    whole = [item for item in items if item.is_module]
    said = [sides[number] for item in items for number in item.records if number in sides]
    return Stage(
        index=index,
        key=visit.key,
        visit=visit.number,
        span=spans.get(visit.key),
        modules=tuple(item.module_name or item.name for item in whole),
        operations=len(items) - len(whole),
        parameters=tuple(name for name, _ in parameters),
        buffers=tuple(buffers),
        parameter_bytes=Bytes(sum(p.numel() * p.element_size() for _, p in parameters)),
        trainable=any(p.requires_grad for _, p in parameters),
        has_backward=gradient or any(said),
        flops=Flops(sum(item.flops for item in items)),
        says=bool(said),
    )


def _ties(programs: list[StageProgram], aliases: dict[int, list[str]]) -> tuple[Tie, ...]:
    users: dict[int, tuple[str, list[int]]] = {}
    for program in programs:
        for name, parameter in program.parameters:
            users.setdefault(id(parameter), (name, []))[1].append(program.stage)
    return tuple(
        Tie(tuple(aliases.get(key, [name])), tuple(stages)) for key, (name, stages) in users.items() if len(stages) > 1
    )


def _edge_warnings(edges: list[tuple[Value, Edge]], collapsed: Collapsed) -> tuple[Diagnostic, ...]:
    """Edges that depend on parameters alone carry the same numbers for every micro-batch."""
    moving: set[int] = set()
    for item in collapsed.items:
        sources = [collapsed.resolve(value) for value in item.inputs]
        if any(origin(v).kind is ValueKind.INPUT or id(v) in moving for v in sources) or item.random:
            moving.update(id(value) for value in _made(item))
    return tuple(
        Diagnostic(
            "constant-edge",
            f"Edge `{edge.value}` depends on no input, but is sent with every micro-batch.",
            () if edge.span is None else (Label(edge.span),),
            "compute it in the stage that uses it",
        )
        for value, edge in edges
        if id(value) not in moving
    )
