"""What a toy is: a model with one trap, the inputs it is given, and what recording it must lead to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TOYS", "Call", "Net", "Outcome", "Toy", "matrix", "tensors", "toy"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one micro-batch: positional, then by name."""


class Outcome(StrEnum):
    """What must come of a toy."""

    EQUAL = "equal"
    """Outputs, gradients and buffers bit-equal to the plain model."""
    SUM_ORDER = "sum-order"
    """Outputs and buffers bit-equal; gradients equal up to the order of their sums."""
    REFUSED = "refused"
    """Recording raises the error that stands in `errors.txt`."""


@dataclass(frozen=True)
class Toy:
    """One model with one trap.

    Attributes:
        name: Of the model's class, in words.
        rows: The rows of the design page it stands for (`3.6`: section 3, row 6).
        make: Builds the model.
        inputs: Builds the arguments of one micro-batch from torch's current seed.
        outcome: What must come of it.
        outcome_with_loss: What must come of it when a loss is recorded after it, if that is another thing.
        stages: Labels of the stages in order, or None when they do not matter.
        edges: `producer>consumers` of each edge, sorted, or None when they do not matter.
        warns: Codes of the warnings expected.
        violates: Builds a micro-batch that the recording must not accept.
        lazy: Whether a first call leaves new attributes or hooks on the model by the user's own intention.
    """

    name: str
    rows: tuple[str, ...]
    make: Callable[[], nn.Module]
    inputs: Callable[[], Call]
    outcome: Outcome = Outcome.EQUAL
    outcome_with_loss: Outcome | None = None
    stages: str | None = None
    edges: str | None = None
    warns: tuple[str, ...] = ()
    violates: Callable[[], Call] | None = None
    lazy: bool = False


TOYS: dict[str, Toy] = {}
"""All toys by name, in the order they were written."""


def tensors(*shapes: tuple[int, ...], **named: tuple[int, ...]) -> Callable[[], Call]:
    """Return a maker of normal random tensors: positional ones, then named ones."""

    def make() -> Call:
        return tuple(torch.randn(*s) for s in shapes), {name: torch.randn(*s) for name, s in named.items()}

    return make


matrix = tensors((4, 4))
"""One 4 x 4 matrix, what most toys take."""


class Net(nn.Module):
    """Four linear layers `a` to `d`; a toy writes `forward` and, if it needs more, `setup` and `mark`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.setup()

    def setup(self) -> None:
        """Build what the toy has besides the four layers."""

    def mark(self) -> None:
        """Set the marks that are set from outside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the toy."""
        raise NotImplementedError


def toy(
    *rows: str, inputs: Callable[[], Call] = matrix, outcome: Outcome = Outcome.EQUAL, **expected: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register the decorated model class as a toy for the given rows of the design page."""

    def register(model: type[nn.Module]) -> type[nn.Module]:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", model.__name__).lower()
        if name in TOYS:
            raise ValueError(f"two toys are called {name}")
        TOYS[name] = Toy(name, rows, model, inputs, Outcome(outcome), **expected)
        return model

    return register


def weights(tensor: Tensor) -> Tensor:
    """Fixed numbers in the shape of a tensor, all different: the gradient that a toy's output gets."""
    dtype = tensor.dtype if tensor.dtype.is_floating_point else torch.float32
    return torch.linspace(0.5, 1.5, max(1, tensor.numel()), dtype=dtype)[: tensor.numel()].reshape(tensor.shape)
