"""Auxiliary losses and metrics: a stage in the middle says them where it computes them. No-ops when nobody listens.

In a plain loop `collect_losses` listens, in a recording the recorder, in a pipeline the stage that runs.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Protocol, TypeVar

from ppdsl.source import Place, caller_place

__all__ = ["REDUCTIONS", "LossListener", "aux_loss", "collect_losses", "hear", "metric"]

_T = TypeVar("_T")

REDUCTIONS = ("mean", "sum", "max", "min")
"""How the values of a metric can be combined."""


class LossListener(Protocol):
    """What becomes of what a model says beside its output."""

    def add_loss(self, tensor: Any, weight: float, place: Place) -> None:
        """`pp.aux_loss(tensor, weight)` was called."""

    def add_metric(self, name: str, tensor: Any, reduce: str, place: Place) -> None:
        """`pp.metric(name, tensor, reduce)` was called."""


# Keyed by thread: a stage must not hear what a model says in another thread.
_listeners: dict[int, LossListener] = {}


class hear:  # noqa: N801 - reads as a verb where it is used: `with hear(listener)`
    """Send the losses and metrics that this thread says to `listener`, within a `with` block."""

    __slots__ = ("_listener", "_outer")

    def __init__(self, listener: LossListener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        me = get_ident()
        self._outer = _listeners.get(me)
        _listeners[me] = self._listener

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            del _listeners[get_ident()]
        else:
            _listeners[get_ident()] = self._outer


def aux_loss(tensor: _T, weight: float = 1.0) -> _T:
    """Add `weight * tensor` to the loss, from anywhere inside the model, as often as there is something to add.

    In a pipeline its gradient starts in the stage that computes it, and counts as much as the loss of its micro-batch
    does: the step trains as a plain loop would in which the sum of all `weight * tensor` is added to each micro-batch's
    loss. In a plain loop `collect_losses` gives what was added; without it the call does nothing.

    Args:
        tensor: A scalar tensor.
        weight: What it counts beside the loss.

    Returns:
        `tensor` itself.

    Raises:
        MarkError: In a recording or a pipeline: `tensor` is no scalar tensor.

    >>> import torch
    >>> from ppdsl import collect_losses
    >>> with collect_losses() as losses:
    ...     balance = aux_loss(torch.tensor(3.0), weight=0.5)
    >>> losses
    [tensor(1.5000)]
    """
    if _listeners:
        listener = _listeners.get(get_ident())
        if listener is not None:
            listener.add_loss(tensor, weight, caller_place())
    return tensor


def metric(name: str, tensor: Any, reduce: str = "mean") -> None:
    """Report a number from anywhere inside the model; a step gives it in `result.metrics`. No gradient flows from it.

    The values of all micro-batches become one: `mean` weighs each micro-batch as the step weighs its loss; `sum`, `max`
    and `min` are over all of them. Where a forward pass reports one name several times, the values of the pass are
    combined in the same way first, with equal weights.

    Args:
        name: Name of the metric.
        tensor: A scalar tensor.
        reduce: `mean`, `sum`, `max` or `min`.

    Raises:
        MarkError: In a recording or a pipeline: `tensor` is no scalar tensor, or there is no such `reduce`.

    >>> metric("accuracy", 0.5)
    """
    if _listeners:
        listener = _listeners.get(get_ident())
        if listener is not None:
            listener.add_metric(name, tensor, reduce, caller_place())


class collect_losses:  # noqa: N801 - used as a context manager, like contextlib.suppress
    """Collect the auxiliary losses of a plain forward pass, each times its weight.

    The list that it gives is filled when the block ends. Metrics are not collected.

    >>> with collect_losses() as losses:
    ...     aux_loss(2.0, weight=0.25)
    2.0
    >>> sum(losses)
    0.5
    """

    def __init__(self) -> None:
        self._said: list[tuple[Any, float]] = []
        self._losses: list[Any] = []
        self._hear = hear(self)

    def __enter__(self) -> list[Any]:
        self._hear.__enter__()
        return self._losses

    def __exit__(self, *error: object) -> None:
        self._hear.__exit__(*error)
        # Not before: the call may stand in a block without gradients.
        self._losses += [tensor * weight for tensor, weight in self._said]
        self._said.clear()

    def add_loss(self, tensor: Any, weight: float, place: Place) -> None:
        """Keep a loss that was said."""
        self._said.append((tensor, weight))

    def add_metric(self, name: str, tensor: Any, reduce: str, place: Place) -> None:
        """Leave a metric alone."""
