"""The loss over many batches: a mean over their rows or targets, not over the batches."""

from __future__ import annotations

from collections.abc import Iterable

from ppdsl.runtime.outcome import StepResult

__all__ = ["mean_loss"]


def mean_loss(results: Iterable[StepResult]) -> float:
    """Return the mean of the losses of several batches, each weighed by the rows or targets it is the mean of.

    The last batch of a data set may be smaller than the others, or batches may have different numbers of targets that
    count (`reduction="token_mean"`): the mean of their losses would weigh what is in them unequally. A batch of which
    nothing counts is left out.

    Args:
        results: What `evaluate` or `step` gave for each batch, with `reduction="mean"` or `token_mean`.

    Raises:
        ValueError: There is no loss, or one is no mean over a known number of rows.

    >>> import torch
    >>> from ppdsl.runtime.outcome import StepResult
    >>> mean_loss([StepResult(torch.tensor(3.0), counted=1), StepResult(torch.tensor(7 / 6), counted=6)])
    1.428571...
    """
    total, count = 0.0, 0
    for number, result in enumerate(results):
        if result.loss is None or result.counted is None:
            what = "no loss" if result.loss is None else "a loss that is no mean over a known number of rows"
            raise ValueError(f"result {number} has {what}; its pipeline needs several micro-batches and mean losses")
        if result.counted:
            total += float(result.loss) * result.counted
            count += result.counted
    if count == 0:
        raise ValueError("there is no batch with anything that counts")
    return total / count
