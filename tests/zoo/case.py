"""What a model of the zoo is: how to build it, where it is cut, and what it is called with."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

import ppdsl as pp
from ppdsl.annotate import MarkKind

__all__ = ["Call", "Case", "Mark", "cuts", "weighted_squares"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A stage begins at, or is, one module.

    Attributes:
        module: Dotted name inside the model.
        key: Key of the stage.
        kind: From this call on, or exactly this call.
        call: Which call of a module that is called several times, from 0; None for the only one.
    """

    module: str
    key: int
    kind: MarkKind = MarkKind.BEGIN
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one micro-batch."""

    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the zoo.

    Attributes:
        name: Its row in the table.
        build: Makes the model with random weights.
        call: Makes the arguments of the micro-batch with the given number.
        marks: Where the stages begin.
        loss: Makes a scalar of the output; None when the model's output holds its own loss.
        packages: What has to be importable.
        refused_in_eval: Codes of the errors with which recording in eval mode may end, and must; empty when it works.
        refused_in_train: The same for train mode.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[int], Call]
    marks: tuple[Mark, ...]
    loss: Callable[..., torch.Tensor] | None = None
    packages: tuple[str, ...] = ()
    refused_in_eval: tuple[str, ...] = ()
    refused_in_train: tuple[str, ...] = ()

    @property
    def skip_reason(self) -> str | None:
        """Why the model cannot be built in this environment, or None."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            return f"{' and '.join(missing)} not installed beside torch {torch.__version__}"
        return None

    def mark(self, model: nn.Module) -> None:
        """Set the marks on `model`."""
        for mark in self.marks:
            module = model.get_submodule(mark.module)
            match mark.kind:
                case MarkKind.BEGIN:
                    pp.begin(module, mark.key, call=mark.call)
                case MarkKind.PLACE:
                    pp.place(module, mark.key, call=mark.call)


def cuts(*modules: str) -> tuple[Mark, ...]:
    """Return marks that begin stage 1 at the first module, stage 2 at the second, and so on."""
    return tuple(Mark(module, key) for key, module in enumerate(modules, start=1))


def weighted_squares(output: object) -> torch.Tensor:
    """Return the sum over all float tensors of an output of their mean square, elements weighted differently.

    Without the weights the gradient through a last normalisation layer would be zero, up to rounding.
    """
    total: torch.Tensor | None = None
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        weights = torch.cos(torch.arange(math.prod(leaf.shape), dtype=leaf.dtype)).reshape(leaf.shape)
        part = (weights * leaf.square()).mean()
        total = part if total is None else total + part
    if total is None:
        raise TypeError("the output holds no float tensor")
    return total
