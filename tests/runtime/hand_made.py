"""Recordings written by hand: stage functions and the names of what they take and make, without the recorder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import Edge, InputRoute, OutputRoute, Stage, StageGraph, TensorMeta, Tie
from ppdsl.recording.programs import Result, Source, SourceKind, StageProgram


@dataclass(frozen=True)
class Part:
    """One stage: its key, a function from tensors to a tuple of tensors, and what goes in and out by name."""

    key: int | str
    run: Callable[..., tuple[torch.Tensor, ...]]
    takes: Sequence[str]
    makes: Sequence[str]
    uses: Sequence[str] = ()
    backward: bool = True


@dataclass(frozen=True)
class HandMade:
    """Looks like a `Recording`."""

    graph: StageGraph
    programs: tuple[StageProgram, ...]
    model: torch.nn.Module
    digest: str
    guards: tuple[Any, ...] = ()
    names: tuple[str, ...] = field(default=())

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...] = ()
    ) -> tuple[torch.Tensor, ...]:
        leaves = [*args, *kwargs.values(), *targets]
        if len(leaves) != len(self.graph.inputs):
            raise CallError(Diagnostic("missing-argument", f"Expected {len(self.graph.inputs)} tensors."))
        return tuple(leaves)

    def rebuild(self, leaves: Sequence[torch.Tensor]) -> object:
        return leaves[0] if len(leaves) == 1 else tuple(leaves)


class _Program(torch.nn.Module):
    def __init__(self, run: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(*tensors)


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMeta(tuple(tensor.shape), dtype, tuple(tensor.stride()), tensor.requires_grad)


def hand_made(
    model: torch.nn.Module,
    parts: Sequence[Part],
    inputs: dict[str, torch.Tensor],
    *,
    outputs: Sequence[str] = (),
    loss: str | None = None,
) -> HandMade:
    """Run the parts once on the example inputs and note everything a recorder would."""
    values = dict(inputs)
    producer: dict[str, int] = {}
    for index, part in enumerate(parts):
        for name, value in zip(part.makes, part.run(*(values[n] for n in part.takes)), strict=True):
            values[name] = value
            producer[name] = index
    users = {n: tuple(i for i, p in enumerate(parts) if n in p.takes) for n in values}
    crossing = [n for n in producer if users[n]]
    edges = tuple(
        Edge(number, name, meta_of(values[name]), producer[name], users[name]) for number, name in enumerate(crossing)
    )
    names = list(inputs)
    programs = []
    for index, part in enumerate(parts):
        sources = tuple(
            Source(SourceKind.INPUT, names.index(n), values[n].requires_grad)
            if n in inputs
            else Source(SourceKind.EDGE, crossing.index(n), values[n].requires_grad)
            for n in part.takes
        )
        results = tuple(
            Result(
                crossing.index(n) if n in crossing else None,
                tuple(i for i, o in enumerate(outputs) if o == n),
                n == loss,
                meta_of(values[n]),
            )
            for n in part.makes
        )
        parameters = tuple((n, model.get_parameter(n)) for n in part.uses)
        programs.append(StageProgram(index, _Program(part.run), sources, results, parameters, ()))
    visits: dict[int | str, int] = {}
    stages = []
    for index, part in enumerate(parts):
        visit = visits.get(part.key, 0)
        visits[part.key] = visit + 1
        stages.append(Stage(index, part.key, visit, parameters=tuple(part.uses), has_backward=part.backward))
    ties = tuple(
        Tie((name,), tuple(i for i, p in enumerate(parts) if name in p.uses))
        for name in dict.fromkeys(n for p in parts for n in p.uses)
        if sum(name in p.uses for p in parts) > 1
    )
    graph = StageGraph(
        tuple(stages),
        edges,
        ties,
        tuple(InputRoute(n, meta_of(t), users[n]) for n, t in inputs.items()),
        tuple(OutputRoute(n, meta_of(values[n]), producer[n]) for n in outputs),
        None if loss is None else producer[loss],
        type(model).__name__,
    )
    return HandMade(graph, tuple(programs), model, hashlib.sha256(graph.digest.encode()).hexdigest()[:16])
