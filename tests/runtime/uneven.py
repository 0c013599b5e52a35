"""Batches of any size in a pipeline, and in the plain loop over the same micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ppdsl as pp
from tests.runtime.models import Case, batch_of, first

__all__ = ["apart", "make", "plain_uneven", "rows_of", "sizes_of"]


def sizes_of(rows: int, microbatches: int) -> list[int]:
    """Return the rows of each micro-batch, by counting rows out in turn."""
    sizes = [0] * min(rows, microbatches)
    for row in range(rows):
        sizes[row % len(sizes)] += 1
    return sizes


def rows_of(case: Case, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return inputs and targets of that many rows, the same at every call."""
    torch.manual_seed(7)
    return case.inputs(rows), case.targets(rows)


def make(case: Case, model: nn.Module, microbatches: int = 4, **options: Any) -> pp.Pipeline:
    """Return a pipeline built with an example of two rows."""
    inputs, targets = batch_of(case, microbatches)
    example = first(targets) if case.loss is not None else None
    return pp.pipeline(model, first(inputs), targets=example, loss=case.loss, microbatches=microbatches, **options)


def plain_uneven(case: Case, model: nn.Module, rows: int, microbatches: int) -> tuple[Tensor, list[Any]]:
    """Train the model over the micro-batches in turn; each counts as much as its share of the rows."""
    inputs, targets = rows_of(case, rows)
    total, outputs, start = torch.zeros((), dtype=torch.float64), [], 0
    for size in sizes_of(rows, microbatches):
        part = slice(start, start + size)
        start += size
        output = model(*(tensor[part] for tensor in inputs))
        loss = output["loss"] if case.loss is None else case.loss(output, *(tensor[part] for tensor in targets))
        (loss * (size / rows)).backward()
        total = total + loss.detach() * (size / rows)
        outputs.append(output)
    return total, outputs


def apart(pipe: pp.Pipeline, result: Any, plain: nn.Module, loss: Tensor, outputs: Sequence[Any]) -> list[str]:
    """Return what differs of a step, in words; gradients and buffers of this rank's stages."""
    said = [] if torch.allclose(result.loss, loss, rtol=1e-10, atol=1e-12) else [f"loss {result.loss}, not {loss}"]
    for name, parameter in pipe.named_parameters():
        theirs = plain.get_parameter(name).grad
        if (parameter.grad is None) != (theirs is None):
            said.append(f"gradient of {name} is {'None' if parameter.grad is None else 'there'}")
        elif theirs is not None and not torch.allclose(parameter.grad, theirs, rtol=1e-10, atol=1e-12):
            said.append(f"gradient of {name}")
    buffers, state = dict(plain.named_buffers()), pipe.state_dict()
    said += [name for name in buffers if name in state and not torch.equal(state[name], buffers[name])]
    if isinstance(result.outputs, Tensor) and not torch.equal(result.outputs, torch.cat(list(outputs)).detach()):
        said.append("outputs")
    return said
