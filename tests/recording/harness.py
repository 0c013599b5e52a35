"""Runs a toy as it is and as stages, one micro-batch after the other, and compares everything that comes out."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ppdsl.diagnostics import PpdslError
from ppdsl.recording.programs import SourceKind
from ppdsl.recording.record import Recording, record_call
from tests.recording.toys.base import Call, Outcome, Toy, weights

__all__ = [
    "Run",
    "Verdict",
    "differences",
    "judge",
    "leaves_of",
    "loss_of",
    "neutral",
    "run_plain",
    "run_split",
    "seed",
]

SEEDS = (11, 12)
"""One per micro-batch; the first one is also the recorded example."""


@dataclass
class Run:
    """What a training step over all micro-batches left behind."""

    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What came of a toy: an outcome, or why it is wrong."""

    outcome: Outcome | None
    text: str = ""
    recording: Recording | None = None


def seed(number: int) -> None:
    """Seed every generator a model may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def neutral(text: str) -> str:
    """Return an error's text without folders, line numbers and columns, which move with every edit."""
    text = re.sub(r"(?:[\w.<>-]*/)*([\w<>]+\.py):\d+(?::\d+)?", r"\1", text)
    text = re.sub(r"^ *\d* \|", " |", text, flags=re.MULTILINE)
    return re.sub(r"^ \| +", " | ", text, flags=re.MULTILINE).strip()


def leaves_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, in the order a reader meets them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves_of(value)
    elif dataclasses.is_dataclass(tree):
        for item in dataclasses.fields(tree):
            yield from leaves_of(getattr(tree, item.name))
    elif _is_object(tree):
        yield from leaves_of(vars(tree))


def loss_of(output: Any) -> Tensor:
    """A loss that weighs every element of every output differently."""
    total: Tensor | None = None
    for leaf in leaves_of(output):
        if not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        real = leaf if leaf.is_floating_point() else leaf.real + 2 * leaf.imag
        term = (real * weights(real)).sum()
        total = term if total is None else total + term
    if total is None:
        raise ValueError("the toy gives no floating-point output")
    return total


def run_plain(model: nn.Module, calls: Sequence[Call], loss: Callable[..., Tensor] | None) -> Run:
    """Train the model as it is, summing gradients over the micro-batches."""
    run = Run()
    for number, (args, kwargs) in enumerate(calls):
        seed(100 + number)
        output = model(*args, **kwargs)
        run.outputs.append(_detached(output))
        if loss is None:
            wanted = [leaf for leaf in leaves_of(output) if leaf.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [_gradient_of(leaf) for leaf in wanted])
        else:
            value = loss(output)
            run.losses.append(value.detach())
            if value.requires_grad:
                value.backward()
    _finish(run, model, calls)
    return run


def run_split(recording: Recording, calls: Sequence[Call], *, with_loss: bool) -> Run:
    """Train the recorded stages one after the other, cut off from each other at every border."""
    run = Run()
    for number, (args, kwargs) in enumerate(calls):
        seed(100 + number)
        _split_step(recording, args, kwargs, run, with_loss)
    _finish(run, recording.model, calls)
    return run


def accept(recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return a micro-batch's tensors, after every check that the recording asks for."""
    given = recording.bind(args, kwargs)
    recording.check(given)
    return given


def _split_step(recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, with_loss: bool) -> None:
    graph = recording.graph
    given = accept(recording, args, kwargs)
    sent: dict[int, Tensor] = {}
    received: dict[tuple[int, int], Tensor] = {}
    outputs: list[Tensor | None] = [None] * len(graph.outputs)
    made: list[tuple[Tensor, ...]] = []
    loss: Tensor | None = None
    for program in recording.programs:
        arguments = []
        for source in program.sources:
            if source.kind is SourceKind.INPUT:
                arguments.append(given[source.index])
                continue
            tensor = sent[source.index].detach().requires_grad_(source.requires_grad)
            received[source.index, program.stage] = tensor
            arguments.append(tensor)
        results = program.module(*arguments)
        made.append(results)
        for result, tensor in zip(program.results, results, strict=True):
            _check_meta(result, tensor, program.stage)
            if result.edge is not None:
                sent[result.edge] = tensor
            for index in result.outputs:
                outputs[index] = tensor
            if result.loss:
                loss = tensor
    for index, route in enumerate(graph.outputs):
        if outputs[index] is None:
            raise ValueError(f"no stage gives output {route.name}")
    run.outputs.append(_detached(recording.rebuild(outputs)))
    if with_loss and loss is not None:
        run.losses.append(loss.detach())
    for program, results in zip(reversed(recording.programs), reversed(made), strict=True):
        tensors, gradients = [], []
        for result, tensor in zip(program.results, results, strict=True):
            parts: list[Tensor] = []
            if result.edge is not None:
                for consumer in graph.edges[result.edge].consumers:
                    gradient = received[result.edge, consumer].grad
                    parts += [] if gradient is None else [gradient]
            if with_loss and result.loss:
                parts.append(torch.ones_like(tensor))
            elif not with_loss:
                parts += [_gradient_of(tensor) for _ in result.outputs]
            if not tensor.requires_grad or not parts:
                continue
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            tensors.append(tensor)
            gradients.append(total)
        if tensors:
            torch.autograd.backward(tensors, gradients)
    if with_loss == (graph.loss is not None):
        _check_flow(recording, received)


def _check_flow(recording: Recording, received: dict[tuple[int, int], Tensor]) -> None:
    """Look whether the recording knows of every gradient: one that it does not know of would never be sent."""
    for (index, consumer), tensor in received.items():
        edge = recording.graph.edges[index]
        if tensor.grad is not None and consumer not in edge.gradient_from:
            raise ValueError(f"stage {consumer} gives `{edge.value}` a gradient that the recording does not know of")


def _check_meta(result: Any, tensor: Tensor, stage: int) -> None:
    meta = result.meta
    if (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) != (tuple(meta.shape), meta.dtype):
        raise ValueError(f"stage {stage} gives {tensor.dtype} {tuple(tensor.shape)}, recorded {meta}")
    if meta.requires_grad != tensor.requires_grad:
        raise ValueError(f"stage {stage} gives requires_grad={tensor.requires_grad}, recorded {meta.requires_grad}")


def _gradient_of(leaf: Tensor) -> Tensor:
    return weights(leaf).to(leaf.dtype)


def _detached(tree: Any) -> Any:
    """A deep copy of an output in which tensors carry no graph but remember whether they had one."""
    memo: dict[int, Any] = {}
    for leaf in leaves_of(tree):
        plain = leaf.detach().clone()
        memo[id(leaf)] = plain.requires_grad_(leaf.requires_grad and (plain.is_floating_point() or plain.is_complex()))
    return copy.deepcopy(tree, memo)


def _finish(run: Run, model: nn.Module, calls: Sequence[Call]) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        run.gradients[name] = parameter.grad
        # A forward may write its parameters too (`max_norm`, a momentum teacher).
        run.buffers[f"parameter {name}"] = parameter.detach()
    for number, (args, kwargs) in enumerate(calls):
        for place, leaf in enumerate(leaves_of((args, kwargs))):
            run.gradients[f"input {place} of micro-batch {number}"] = leaf.grad if leaf.is_leaf else None
    for name, buffer in model.named_buffers():
        run.buffers[name] = buffer.detach()


def differences(split: Run, plain: Run, tolerance: float = 1e-6) -> tuple[list[str], list[str]]:
    """Compare two runs.

    Args:
        split: The run as stages.
        plain: The run of the unsplit model.
        tolerance: Largest relative error of a float32 gradient whose sums were taken in another order.

    Returns:
        What is wrong, and what differs by the order of a sum only.
    """
    wrong: list[str] = []
    rounding: list[str] = []
    _same_tree(split.outputs, plain.outputs, "output", wrong)
    _same_tree(split.losses, plain.losses, "loss", wrong)
    _same_tree(split.buffers, plain.buffers, "buffers", wrong)
    if split.gradients.keys() != plain.gradients.keys():
        wrong.append(f"parameters are called {sorted(split.gradients)}, not {sorted(plain.gradients)}")
        return wrong, rounding
    largest = max((float(g.abs().max()) for g in plain.gradients.values() if g is not None and g.numel()), default=1.0)
    for name, expected in plain.gradients.items():
        found = split.gradients[name]
        if found is None or expected is None:
            if found is not expected:
                wrong.append(f"gradient of {name}: {_brief(found)}, plain {_brief(expected)}")
        elif found.shape != expected.shape or found.dtype != expected.dtype:
            wrong.append(f"gradient of {name}: {_brief(found)}, plain {_brief(expected)}")
        elif not torch.equal(found, expected):
            scale = max(float(expected.abs().max()), 1e-4 * largest)
            error = float((found - expected).abs().max()) / scale
            allowed = 1e-12 if expected.dtype is torch.float64 else tolerance
            (rounding if error <= allowed else wrong).append(f"gradient of {name} is off by {error:.1e}")
    return wrong, rounding


def _same_tree(found: Any, expected: Any, path: str, wrong: list[str]) -> None:
    if type(found) is not type(expected):
        wrong.append(f"{path}: {_brief(found)}, plain {_brief(expected)}")
    elif isinstance(expected, Tensor):
        same = (found.shape, found.dtype, found.requires_grad) == (
            expected.shape,
            expected.dtype,
            expected.requires_grad,
        )
        if not same or not torch.equal(found, expected):
            wrong.append(f"{path}: {_brief(found)}, plain {_brief(expected)}")
    elif isinstance(expected, Mapping):
        if list(found) != list(expected):
            wrong.append(f"{path}: keys {list(found)}, plain {list(expected)}")
            return
        for key, value in expected.items():
            _same_tree(found[key], value, f"{path}[{key!r}]", wrong)
        _same_tree(getattr(found, "__dict__", 0), getattr(expected, "__dict__", 0), f"{path}.__dict__", wrong)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            wrong.append(f"{path}: length {len(found)}, plain {len(expected)}")
            return
        for index, value in enumerate(expected):
            _same_tree(found[index], value, f"{path}[{index}]", wrong)
    elif dataclasses.is_dataclass(expected):
        for item in dataclasses.fields(expected):
            _same_tree(getattr(found, item.name), getattr(expected, item.name), f"{path}.{item.name}", wrong)
    elif _is_object(expected):
        _same_tree(vars(found), vars(expected), path, wrong)
    elif found != expected:
        wrong.append(f"{path}: {found!r}, plain {expected!r}")


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class that keeps what it has in attributes (a key-value cache)."""
    return hasattr(value, "__dict__") and not isinstance(value, (type, Callable, nn.Module, torch.Generator))


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r}"[:80]
    numbers = [round(float(v.real), 6) for v in value.detach().flatten()[:3]]
    grad = ", grad" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{grad} {numbers}..."


def build(toy: Toy) -> nn.Module:
    """Build a toy's model, always with the same numbers."""
    seed(7)
    return toy.make()


def call_of(toy: Toy, number: int) -> Call:
    """Build the arguments of one micro-batch, always with the same numbers."""
    seed(number)
    return toy.inputs()


def mark(model: nn.Module) -> None:
    """Set the toy's outside marks, if it has any."""
    setter = getattr(model, "mark", None)
    if callable(setter):
        setter()


def judge(toy: Toy, *, with_loss: bool) -> Verdict:
    """Record a toy, run it both ways, and say what came of it."""
    loss = loss_of if with_loss else None
    model = build(toy)
    mark(model)
    args, kwargs = call_of(toy, SEEDS[0])
    try:
        recording = record_call(model, args, kwargs, loss=loss)
    except PpdslError as error:
        return Verdict(Outcome.REFUSED, str(error))
    split = run_split(recording, [call_of(toy, number) for number in SEEDS], with_loss=with_loss)
    plain = run_plain(build(toy), [call_of(toy, number) for number in SEEDS], loss)
    wrong, rounding = differences(split, plain)
    if wrong:
        return Verdict(None, "\n".join(wrong), recording)
    return Verdict(Outcome.SUM_ORDER if rounding else Outcome.EQUAL, "\n".join(rounding), recording)


def shape_of(recording: Recording) -> tuple[str, str]:
    """The labels of the stages, and each edge as `producer>consumers`, sorted."""
    labels = [stage.label for stage in recording.graph.stages]
    edges = Counter(f"{labels[e.producer]}>{','.join(labels[c] for c in e.consumers)}" for e in recording.graph.edges)
    return " ".join(labels), " ".join(sorted(edges.elements()))


def on_meta(model: nn.Module) -> nn.Module:
    """Replace parameters and buffers by ones without memory; what was tied stays tied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[name] = memo.setdefault(id(parameter), new)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = memo.setdefault(id(buffer), buffer.to("meta"))
    return model
