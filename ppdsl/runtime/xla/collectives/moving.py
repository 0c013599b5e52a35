"""The collectives that move tensors from device to device: send and recv, collective_permute, scatter and gather.

Who takes part: only the devices that a tensor leaves or reaches; receivers need no tensor. The other local devices run
the same small program with zeros, which ppdsl sees to. No device ever takes zeros for data: there is a result for each
tensor that was moved, and none besides.

`transport` says how: `permute` is XLA's collective-permute. `all_reduce` adds the tensor to zeros at the receiver, for
backends without permute; it is one program for each pair, and turns -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.xla.collectives.checking import Place, position_of, positions_of, same_everywhere
from ppdsl.runtime.xla.collectives.operations import Gather, Permute, Scatter, apply
from ppdsl.runtime.xla.collectives.testing import require

__all__ = ["Sent", "collective_permute", "gather", "recv", "scatter", "send"]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A tensor on its way.

    Attributes:
        source: Position of the device that it leaves.
        target: Position of the device that it reaches.
        arriving: The tensor on the target, computed or not.
    """

    source: int
    target: int
    arriving: torch.Tensor


def send(tensor: torch.Tensor, target: Place, transport: str = "permute") -> Sent:
    """Launch the transfer of one tensor to another device, and return at once.

    Args:
        tensor: On the device that sends.
        target: The device that receives.
        transport: `permute` or `all_reduce`.

    Returns:
        What `recv` takes.

    Raises:
        CallError: The tensor cannot be sent, or there is no such device or transport.
        RunError: The transport does not work here (`self_test`).
    """
    source, to = positions_of([tensor], "send")[0], position_of(target)
    by_sum = _is_by_sum(transport, "send")
    require("send by all_reduce" if by_sum else "send")
    return Sent(source, to, apply(Permute(((source, to),), by_sum), [tensor])[0])


def recv(sent: Sent, target: Place) -> torch.Tensor:
    """Return a sent tensor on the device that it was sent to.

    Args:
        sent: What `send` returned.
        target: The device that receives, as the sender named it.

    Returns:
        The tensor; its gradient goes back to the sender.

    Raises:
        CallError: It was sent to another device.
    """
    if position_of(target) != sent.target:
        message = f"xla:{position_of(target)} waits for a tensor that xla:{sent.source} sent to xla:{sent.target}."
        raise CallError(Diagnostic("wrong-receiver", message, help=f"receive it on xla:{sent.target}"))
    return sent.arriving


def collective_permute(
    tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[Place, Place]], transport: str = "permute"
) -> Tensors:
    """Move several tensors at once, each along its pair of devices.

    Args:
        tensors: The k-th on the source of the k-th pair, all of one shape and element type.
        pairs: (source, target); every device at most once as source and once as target.
        transport: `permute` (one program for all pairs) or `all_reduce`.

    Returns:
        The k-th tensor on the target of the k-th pair.

    Raises:
        CallError: A pair's source has no tensor, a device is named twice, or the tensors do not fit.
        RunError: The transport does not work here (`self_test`).
    """
    positions = positions_of(tensors, "collective_permute")
    wanted = tuple((position_of(source), position_of(target)) for source, target in pairs)
    by_sum = _is_by_sum(transport, "collective_permute")
    require("send by all_reduce" if by_sum else "collective_permute")
    sources = [source for source, _ in wanted]
    targets = [target for _, target in wanted]
    for side, places in (("source", sources), ("target", targets)):
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice is not None:
            message = f"xla:{twice} is the {side} of {places.count(twice)} pairs of collective_permute."
            raise CallError(Diagnostic("replica-twice", message, help="call it once for each of them"))
    if list(positions) != sources:
        message = f"collective_permute got tensors on {_names(positions)}, and its pairs begin on {_names(sources)}."
        help_text = "give the tensor of every source, in the order of the pairs"
        raise CallError(Diagnostic("replica-left-out", message, help=help_text))
    return apply(Permute(wanted, by_sum), tensors)


def scatter(tensors: Sequence[torch.Tensor], targets: Sequence[Place], transport: str = "permute") -> Tensors:
    """Move each of several tensors of one device to a device of its own.

    Args:
        tensors: All on one device, of one shape and element type.
        targets: The device of each, the tensors' own perhaps among them.
        transport: `permute` (one program) or `all_reduce`.

    Returns:
        The k-th tensor on the k-th target.

    Raises:
        CallError: The numbers of tensors and targets differ, or they do not fit.
        RunError: The transport does not work here (`self_test`).
    """
    same_everywhere(tensors, "scatter")
    places = tuple(position_of(target) for target in targets)
    by_sum = _is_by_sum(transport, "scatter")
    require("send by all_reduce" if by_sum else "scatter")
    if len(places) != len(tensors):
        message = f"scatter got {len(tensors)} tensors for {len(places)} devices."
        raise CallError(Diagnostic("replica-left-out", message, help="give one tensor for each target"))
    if len(set(places)) < len(places):
        raise CallError(Diagnostic("replica-twice", "scatter was given a target twice."))
    elsewhere = next((tensor for tensor in tensors if tensor.device != tensors[0].device), None)
    if elsewhere is not None:
        message = f"scatter got tensors on {tensors[0].device} and on {elsewhere.device}; it takes those of one device."
        raise CallError(Diagnostic("several-sources", message, help="use collective_permute"))
    return apply(Scatter(position_of(tensors[0].device), places, by_sum), tensors)


def gather(tensors: Sequence[torch.Tensor], target: Place, transport: str = "permute") -> Tensors:
    """Move tensors of several devices to one.

    Args:
        tensors: One on each device, all of one shape and element type.
        target: The device that gets them; its own tensor may be among them.
        transport: `permute` (one program) or `all_reduce`.

    Returns:
        All tensors, in the order given, on `target`.

    Raises:
        CallError: The tensors do not fit.
        RunError: The transport does not work here (`self_test`).
    """
    positions = positions_of(tensors, "gather")
    where = position_of(target)
    by_sum = _is_by_sum(transport, "gather")
    require("send by all_reduce" if by_sum else "gather")
    return apply(Gather(positions, where, by_sum), tensors)


def _is_by_sum(transport: str, name: str) -> bool:
    if transport not in {"permute", "all_reduce"}:
        message = f"{name} has no transport {transport!r}."
        raise CallError(Diagnostic("collective-argument", message, help="say permute or all_reduce"))
    return transport == "all_reduce"


def _names(positions: Sequence[int]) -> str:
    return ", ".join(f"xla:{position}" for position in positions)
