"""May the stages of a recording run as one batched program? Only if nothing but their weights differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from ppdsl.diagnostics import Diagnostic, GraphError
from ppdsl.graph.ir import StageGraph
from ppdsl.recording.programs import StageProgram
from ppdsl.recording.record import Recording
from ppdsl.units import counted

__all__ = ["EqualStages", "equal_stages"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class EqualStages:
    """Stages that are one program with several sets of weights.

    Attributes:
        program: That of the first stage; it stands for all.
        names: For each parameter and buffer of the first stage its names in the model, stage by stage.
        trained: Names (of the first stage) that get gradients.
        example: For each stage what it takes of the example, stacked.
    """

    program: StageProgram
    names: Mapping[str, tuple[str, ...]]
    trained: frozenset[str]
    example: torch.Tensor

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(next(iter(self.names.values())))

    def run(self, weights: Tensors, x: torch.Tensor) -> torch.Tensor:
        """Run one stage on weights under the first stage's names."""
        made: torch.Tensor = functional_call(self.program.module, dict(weights), (x,))[0]
        return made

    def run_all(self, weights: Tensors, state: torch.Tensor) -> torch.Tensor:
        """Run all stages at once: every tensor has the stages as its first axis."""
        with _Divisible():
            made: torch.Tensor = vmap(self.run)(dict(weights), state)
        return made


class _Divisible(TorchFunctionMode):
    """Spells a layer norm in operations of single elements.

    XLA's own takes all rows together, those of all stages among them, so every device would fetch the whole state.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _layer_norm(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    dims = list(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    made = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def equal_stages(recording: Recording) -> EqualStages:
    """Return the stages of a recording as one program.

    Args:
        recording: Of the model without its loss.

    Raises:
        GraphError: They are no chain of equal stages; the message says in what they differ.
    """
    for reason in _unlike(recording.graph, recording.programs):
        message = f"The stages cannot run as one circular program: {reason}."
        raise GraphError(Diagnostic("stages-differ", message, help="use pp.pipeline(..., devices='xla')"))
    own = [_tensors_of(program) for program in recording.programs]
    names = {name: tuple(list(tensors)[place] for tensors in own) for place, name in enumerate(own[0])}
    trained = frozenset(name for name, tensor in own[0].items() if tensor.requires_grad)
    example = recording.examples[0].detach()
    stages = EqualStages(recording.programs[0], names, trained, torch.stack([example] * len(own)))
    return replace(stages, example=_tried(stages, recording, own))


def _tensors_of(program: StageProgram) -> dict[str, torch.Tensor]:
    return {**dict(program.module.named_parameters()), **dict(program.module.named_buffers())}


# ---------------------------------------------------------------- reasons


def _unlike(graph: StageGraph, programs: Sequence[StageProgram]) -> Iterator[str]:
    """Yield what stands against it, causes before consequences."""
    if len(graph.stages) < 2:
        yield "there is only one stage"
    yield from _no_chain(graph)
    if graph.ties:
        tie = graph.ties[0]
        yield f"{' = '.join(tie.names)} is used in stages {', '.join(map(str, tie.stages))}"
    for program in programs:
        name = graph.stages[program.stage].label
        if program.state:
            module = type(program.state[0][0]).__name__
            yield f"stage {name} changes what a {module} remembers (running statistics?)"
        if program.draws:
            yield f"stage {name} draws random numbers (dropout?)"
    for program in programs[1:]:
        yield from _other_weights(graph, programs[0], program)
        yield from _other_steps(graph, programs[0], program)


def _no_chain(graph: StageGraph) -> Iterator[str]:
    last = len(graph.stages) - 1
    if len(graph.inputs) != 1 or graph.inputs[0].consumers != (0,):
        other = next((route for route in graph.inputs if route.consumers != (0,)), None)
        yield (
            f"input {other.name} goes to stages {', '.join(map(str, other.consumers)) or 'none'}"
            if other is not None
            else f"the first stage takes {counted(len(graph.inputs), 'tensor')}"
        )
    for edge in graph.edges:
        if edge.consumers != (edge.producer + 1,):
            targets = ", ".join(map(str, edge.consumers))
            yield f"{edge.value} goes from stage {edge.producer} to {targets}, and only neighbours may be connected"
    for stage in range(last):
        between = [edge for edge in graph.edges if edge.producer == stage]
        if len(between) != 1:
            yield f"{counted(len(between), 'tensor')} instead of one go from stage {stage} to stage {stage + 1}"
    if [route.producer for route in graph.outputs] != [last]:
        yield "the model's output is not the one tensor of the last stage"
    first = graph.inputs[0].meta if graph.inputs else None
    for producer, meta in [
        *((e.producer, e.meta) for e in graph.edges),
        *((o.producer, o.meta) for o in graph.outputs),
    ]:
        if first is not None and (meta.shape, meta.dtype) != (first.shape, first.dtype):
            yield f"stage {producer} gives {meta}, and the first stage takes {first}"


def _other_weights(graph: StageGraph, first: StageProgram, other: StageProgram) -> Iterator[str]:
    own, its = _tensors_of(first), _tensors_of(other)
    name = graph.stages[other.stage].label
    if len(own) != len(its):
        yield f"stage {name} has {counted(len(its), 'tensor')}, and the first stage {len(own)}"
        return
    for (mine, a), (theirs, b) in zip(own.items(), its.items(), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{theirs} is {_text(b)}, and {mine} is {_text(a)}"
        if a.requires_grad != b.requires_grad:
            frozen, trained = (theirs, mine) if a.requires_grad else (mine, theirs)
            yield f"{frozen} is frozen, and {trained} is not"
        if a.is_meta or b.is_meta:
            yield f"{mine if a.is_meta else theirs} has no values yet (pp.materialize fills it)"


def _other_steps(graph: StageGraph, first: StageProgram, other: StageProgram) -> Iterator[str]:
    mine, theirs = ([_step(program, node) for node in program.module.graph.nodes] for program in (first, other))
    name = graph.stages[other.stage].label
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            yield f"stage {name} runs {b}, and the first stage {a} in its place"
            return
    if len(mine) != len(theirs):
        yield f"stage {name} has {counted(len(theirs), 'step')}, and the first stage {len(mine)}"


def _step(program: StageProgram, node: torch.fx.Node) -> str:
    """Return what a node of a program does, without names that differ from stage to stage."""
    if node.op == "call_module":
        return " ".join(repr(program.module.get_submodule(str(node.target))).split())
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", type(node.target).__name__))
    return f".{node.target}()" if node.op == "call_method" else node.op


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ---------------------------------------------------------------- a try on the host


def _tried(stages: EqualStages, recording: Recording, own: Sequence[Tensors]) -> torch.Tensor:
    """Run the example through every stage, through the first one with the others' weights, and through all at once.

    What a module keeps outside of its weights (a number, a flag) shows only here.

    Returns:
        What each stage took, stacked.

    Raises:
        GraphError: Numbers differ, or the stage cannot be batched.
    """
    taken = [recording.examples[0].detach()]
    names = list(stages.names)
    with torch.no_grad():
        for program, tensors in zip(recording.programs, own, strict=True):
            weights = dict(zip(names, tensors.values(), strict=True))
            right, borrowed = program(taken[-1])[0], stages.run(weights, taken[-1])
            if not torch.equal(right, borrowed) and not (right.isnan() & borrowed.isnan()).any():
                name = recording.graph.stages[program.stage].label
                message = (
                    "The stages cannot run as one circular program: the first stage with the weights of stage "
                    f"{name} gives other numbers than stage {name}."
                )
                help_text = (
                    "look for numbers or flags on its modules that differ, or use pp.pipeline(..., devices='xla')"
                )
                raise GraphError(Diagnostic("stages-differ", message, help=help_text))
            taken.append(right)
        stacked = {name: torch.stack([list(tensors.values())[i] for tensors in own]) for i, name in enumerate(names)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an operation is batched slowly on the host says nothing here
                together = stages.run_all(stacked, torch.stack(taken[:-1]))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            words = str(error).strip().partition("\n")[0].rstrip(".")
            message = f"A stage cannot be batched, so the stages cannot run as one circular program: {words}."
            raise GraphError(
                Diagnostic("stages-not-batched", message, help="use pp.pipeline(..., devices='xla')")
            ) from error
    expected = torch.stack(taken[1:])
    if not torch.allclose(together, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()), equal_nan=True):
        message = "Torch's batching of a stage (torch.func.vmap) gives other numbers than the stages one by one."
        raise GraphError(Diagnostic("stages-not-batched", message, help="use pp.pipeline(..., devices='xla')"))
    return torch.stack(taken[:-1])
