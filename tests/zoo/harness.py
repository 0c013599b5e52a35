"""Examines one model of the zoo: records it, runs it as stages and as it is, and says how far they agree."""

from __future__ import annotations

import copy
import dataclasses
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from ppdsl.diagnostics import PpdslError
from ppdsl.recording.record import Recording, record_call
from tests.recording.harness import Run, differences, run_plain, run_split, seed
from tests.zoo.case import Case

__all__ = [
    "GRADIENT_TOLERANCE",
    "Finding",
    "Status",
    "build",
    "build_on_meta",
    "digest_on_meta",
    "examine",
    "gradient_error",
]

GRADIENT_TOLERANCE = 5e-6
"""Largest accepted `gradient_error` in float32; it stems from the order of sums alone."""

MICROBATCHES = 2


class Status(StrEnum):
    """What came of a model."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    REFUSED = "refused"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured on one model in one mode.

    Attributes:
        model: Name of the case.
        train: Train mode, otherwise eval mode.
        status: Bit-equal, equal up to the order of gradient sums, refused, wrong, or skipped.
        seconds: CPU seconds of the recording.
        stages: Number of stages.
        modules: Number of modules called whole.
        operations: Number of torch calls between them.
        edges: Number of values that cross stages.
        gradient_error: Largest error of a gradient, 0 when all are bit-equal.
        meta: Whether a recording with parameters on meta has the same digest; None when not tried.
        text: Why it is refused, wrong or skipped.
    """

    model: str
    train: bool
    status: Status
    seconds: float = 0.0
    stages: int = 0
    modules: int = 0
    operations: int = 0
    edges: int = 0
    gradient_error: float = 0.0
    meta: bool | None = None
    text: str = ""


def build(case: Case, *, train: bool) -> nn.Module:
    """Build the model of a case with its marks set, always with the same numbers."""
    seed(7)
    model = case.build()
    case.mark(model)
    return model.train(train)


def build_on_meta(case: Case) -> nn.Module:
    """Build the model of a case in eval mode with its marks set, without memory for parameters."""
    seed(7)
    try:
        with torch.device("meta"):
            model = case.build()
    except (NotImplementedError, RuntimeError):  # a constructor that reads the values of its tensors
        model = case.build().to("meta")
    case.mark(model)
    return model.eval()


def record_case(case: Case, model: nn.Module) -> Recording:
    """Record the first micro-batch of a case."""
    seed(5)
    call = case.call(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return record_call(model, call.args, dict(call.kwargs), loss=case.loss)


def digest_on_meta(case: Case) -> str:
    """Return the digest of the case recorded in eval mode without memory for parameters."""
    return record_case(case, build_on_meta(case)).digest


def examine(case: Case, *, train: bool, with_meta: bool = False) -> Finding:
    """Record a case, train it as stages and as it is over two micro-batches, and compare.

    Errors are part of the finding and are not raised.

    Args:
        case: The model.
        train: Train mode (dropout on), otherwise eval mode.
        with_meta: Also record with parameters on meta.
    """
    if case.skip_reason is not None:
        return Finding(case.name, train, Status.SKIPPED, text=case.skip_reason)
    model = build(case, train=train)
    plain_model = copy.deepcopy(model)
    before = _state(model)
    start = time.process_time()
    try:
        recording = record_case(case, model)
    except PpdslError as error:
        return Finding(case.name, train, Status.REFUSED, time.process_time() - start, text=_without_folders(str(error)))
    except Exception:
        return Finding(case.name, train, Status.WRONG, time.process_time() - start, text=traceback.format_exc())
    seconds = time.process_time() - start
    graph = recording.graph
    finding = Finding(
        model=case.name,
        train=train,
        status=Status.EQUAL,
        seconds=seconds,
        stages=len(graph.stages),
        modules=sum(len(stage.modules) for stage in graph.stages),
        operations=sum(stage.operations for stage in graph.stages),
        edges=len(graph.edges),
    )
    try:
        changed = _changes(before, _state(model))
        split, plain = _runs(case, recording, plain_model)
        wrong, rounding = differences(split, plain, GRADIENT_TOLERANCE)
        meta = digest_on_meta(case) == recording.digest if with_meta else None
    except Exception:
        return dataclasses.replace(finding, status=Status.WRONG, text=traceback.format_exc())
    if changed:
        wrong.append(f"recording changed {', '.join(changed)}")
    if meta is False:
        wrong.append("recorded differently with parameters on meta")
    status = Status.WRONG if wrong else Status.ROUNDING if rounding else Status.EQUAL
    error = gradient_error(split, plain)
    return dataclasses.replace(finding, status=status, gradient_error=error, meta=meta, text="\n".join(wrong))


def _without_folders(text: str) -> str:
    """Cut the folders of installed packages from an error: they are this machine's own."""
    return re.sub(r"(--> ).*/site-packages/", r"\1", text)


def gradient_error(split: Run, plain: Run) -> float:
    """Return the largest error of a gradient.

    The error of one gradient is `max|a - b| / max(max|b|, 1e-4 x largest gradient of the model)`: a gradient that is
    zero by its mathematics (the bias of a key projection) is compared with the others, not with its own rounding.
    """
    pairs = [
        (found, expected)
        for name, expected in plain.gradients.items()
        if expected is not None and (found := split.gradients.get(name)) is not None and expected.numel()
    ]
    largest = max((float(expected.abs().max()) for _, expected in pairs), default=0.0)
    errors = [
        float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-4 * largest)
        for found, expected in pairs
        if not torch.equal(found, expected)
    ]
    return max(errors, default=0.0)


def _runs(case: Case, recording: Recording, plain_model: nn.Module) -> tuple[Run, Run]:
    calls = [case.call(number) for number in range(MICROBATCHES)]
    split = run_split(recording, [(call.args, dict(call.kwargs)) for call in calls], with_loss=True)
    calls = [case.call(number) for number in range(MICROBATCHES)]
    loss: Callable[[Any], Tensor] = case.loss or _own_loss
    plain = run_plain(plain_model, [(call.args, dict(call.kwargs)) for call in calls], loss)
    return split, plain


def _own_loss(output: Any) -> Tensor:
    """Return the loss that the model computed itself."""
    loss: Tensor = output.loss
    return loss


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of all that a recording must leave as it was."""
    state: dict[str, Tensor | None] = {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    state |= {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
    state |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return state


def _changes(before: dict[str, Tensor | None], after: dict[str, Tensor | None]) -> list[str]:
    changed = [name for name in before.keys() | after.keys() if (name in before) != (name in after)]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        same = old is new if old is None or new is None else torch.equal(old, new)
        if not same:
            changed.append(name)
    return sorted(changed)
