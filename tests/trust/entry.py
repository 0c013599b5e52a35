"""What a trap is, and the judge: the same model in a pipeline and in a plain loop over its micro-batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ppdsl as pp

__all__ = ["ROWS", "Entry", "Setup", "differences", "keys_of", "part_of", "pipeline_of", "plain_loop"]

ROWS = 2
"""Rows of a micro-batch."""

Loss = Callable[..., Tensor]


@dataclass
class Setup:
    """A model and one step's batch.

    Attributes:
        model: With its marks.
        args, kwargs, targets: For the whole batch; tensors whose first axis has its rows are cut, others are given
            whole.
        loss: Called with output and targets; None when forward returns the loss.
        batch_axis: For inputs that are not cut on their first axis.
        reduction: How the losses are added.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    loss: Loss | None = None
    batch_axis: dict[str, int | None] = field(default_factory=dict)
    reduction: Any = "mean"


@dataclass(frozen=True, slots=True)
class Entry:
    """One trap.

    Attributes:
        name: A short name.
        reports: Ids of the reports it stands for.
        make: Builds it for a number of micro-batches, always with the same numbers.
        exact: Whether every number must be the same bit for bit.
        tolerance: How far a float64 may be off otherwise, relative to the largest of its tensor.
    """

    name: str
    reports: tuple[str, ...]
    make: Callable[[int], Setup]
    exact: bool = False
    tolerance: float = 1e-10

    def unlike(self, what: str, ours: Tensor | None, theirs: Tensor | None) -> list[str]:
        return _unlike(what, ours, theirs, exact=self.exact, tolerance=self.tolerance)


def part_of(setup: Setup, number: int, microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return the arguments and targets of one micro-batch."""
    rows = ROWS * microbatches

    def cut(leaf: Any, axis: int | None) -> Any:
        if not isinstance(leaf, Tensor) or axis is None or leaf.dim() <= axis or leaf.shape[axis] != rows:
            return leaf
        return leaf.narrow(axis, number * ROWS, ROWS)

    def cut_all(tree: Any, name: str = "") -> Any:
        return pytree.tree_map(lambda leaf: cut(leaf, setup.batch_axis.get(name, 0)), tree)

    kwargs = {name: cut_all(value, name) for name, value in setup.kwargs.items()}
    return cut_all(setup.args), kwargs, cut_all(setup.targets)


def plain_loop(setup: Setup, microbatches: int) -> tuple[Tensor, list[Any]]:
    """Train the model over the micro-batches in turn; return the loss and the outputs."""
    total = torch.zeros(())
    outputs = []
    for number in range(microbatches):
        args, kwargs, targets = part_of(setup, number, microbatches)
        with pp.collect_losses() as added:
            output = setup.model(*args, **kwargs)
            loss = setup.loss(output, *targets) if setup.loss is not None else _own_loss(output)
        loss = loss + sum(added) if added else loss
        outputs.append(pytree.tree_map(_detached, output))
        weight = 1.0 if setup.reduction == "sum" else 1.0 / microbatches
        (loss * weight).backward()
        total = total + loss.detach() * weight
    return total, outputs


def pipeline_of(setup: Setup, microbatches: int, **options: Any) -> pp.Pipeline:
    """Return the pipeline of a setup."""
    args, kwargs, targets = part_of(setup, 0, microbatches)
    return pp.pipeline(
        setup.model, args, kwargs, targets=targets if setup.loss is not None else None, loss=setup.loss,
        microbatches=microbatches, batch_axis=setup.batch_axis, reduction=setup.reduction, **options,
    )  # fmt: skip


def keys_of(entry: Entry, microbatches: int) -> list[int | str]:
    """Return the keys of an entry's stages, in order."""
    setup = entry.make(microbatches)
    args, kwargs, _ = part_of(setup, 0, microbatches)
    return list(dict.fromkeys(stage.key for stage in pp.record(setup.model, *args, **kwargs).stages))


def differences(entry: Entry, microbatches: int, *, steps: int = 2, **options: Any) -> list[str]:
    """Train a few steps in a pipeline and in the plain loop; return what differs, in words.

    Compared are the loss, the output's values and containers, every gradient and whether it is None, every buffer, and
    parameters after each step of an optimizer. Under torch.distributed each rank compares what it has.
    """
    setup, plain = entry.make(microbatches), entry.make(microbatches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PpdslWarning)
        pipe = pipeline_of(setup, microbatches, **options)
    mine = dict(pipe.named_parameters())
    optimizer = torch.optim.SGD(list(mine.values()) or [torch.zeros(1)], lr=0.1)
    plain_optimizer = torch.optim.SGD(list(plain.model.parameters()) or [torch.zeros(1)], lr=0.1)
    found: list[str] = []
    for step in range(steps):
        result = pipe.step(*setup.args, targets=setup.targets or None, outputs="all", **setup.kwargs)
        loss, outputs = plain_loop(plain, microbatches)
        said = [
            *replace(entry, exact=False).unlike("loss", result.loss, loss),
            *_outputs(result.outputs, outputs, setup, entry),
        ]
        theirs = dict(plain.model.named_parameters())
        for name, parameter in mine.items():
            said += entry.unlike(f"gradient of {name}", parameter.grad, theirs[name].grad)
        buffers = dict(plain.model.named_buffers())
        for name, value in pipe.state_dict().items():
            if name in buffers:
                said += entry.unlike(f"buffer {name}", value, buffers[name])
        optimizer.step()
        plain_optimizer.step()
        for name, parameter in mine.items():
            said += entry.unlike(f"{name} after the step", parameter, theirs[name])
        found += [f"step {step}: {text}" for text in said]
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    pipe.close()
    return found


def _own_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
    return found


def _outputs(ours: Any, theirs: Sequence[Any], setup: Setup, entry: Entry) -> list[str]:
    """Compare the whole batch's output with the plain loop's micro-batches, containers included."""
    if type(ours) is not type(theirs[0]):
        return [f"output is a {type(ours).__name__}, not a {type(theirs[0]).__name__}"]
    left = _leaves(ours)
    right = [_leaves(one) for one in theirs]
    if len(left) != len(right[0]):
        return [f"output has {len(left)} leaves, not {len(right[0])}"]
    found: list[str] = []
    for index, leaf in enumerate(left):
        parts = [leaves[index] for leaves in right]
        if not isinstance(leaf, Tensor):
            found += [] if leaf == parts[0] else [f"output leaf {index} is {leaf!r}, not {parts[0]!r}"]
        elif leaf.dim() and ROWS in parts[0].shape:
            axis = next(a for a, size in enumerate(parts[0].shape) if leaf.shape[a] == size * len(parts))
            found += entry.unlike(f"output leaf {index}", leaf, torch.cat(parts, axis))
    return found


def _leaves(tree: Any) -> list[Any]:
    if is_dataclass(tree) and not isinstance(tree, Mapping):
        tree = dict(vars(tree))
    return pytree.tree_leaves(tree)


def _unlike(what: str, ours: Tensor | None, theirs: Tensor | None, *, exact: bool, tolerance: float) -> list[str]:
    if ours is None or theirs is None:
        return [] if ours is theirs else [f"{what} is {_word(ours)}, not {_word(theirs)}"]
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return [f"{what} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"]
    ours, theirs = ours.detach().cpu(), theirs.detach()
    if exact or not (ours.is_floating_point() or ours.is_complex()):
        return [] if torch.equal(ours, theirs) else [f"{what} is not the same"]
    if ours.dtype not in (torch.float64, torch.complex128):
        tolerance = max(tolerance, 1e-5)
    apart = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    return [] if apart <= tolerance * max(scale, 1.0) else [f"{what} is off by {apart:.3g} of {scale:.3g}"]


def _word(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def _detached(leaf: Any) -> Any:
    return copy.copy(leaf.detach()) if isinstance(leaf, Tensor) else leaf
