"""What a collective refuses before anything is launched, because torch_xla would end the process or wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives.operations import Groups

__all__ = ["Place", "cuts", "dimension", "grouped", "position_of", "positions_of", "same_everywhere"]

Place = int | str | torch.device
"""A device: its position, `"xla:1"`, or a torch.device."""


def position_of(place: Place) -> int:
    """Return the position of a local XLA device.

    Raises:
        CallError: There is no such device.
    """
    wanted = f"xla:{place}" if isinstance(place, int) else str(place)
    known = [str(adapter.device_of(position)) for position in range(adapter.device_count())]
    if wanted not in known:
        message = f"There is no device {place!s} among the {len(known)} XLA devices of this process."
        raise CallError(Diagnostic("no-such-device", message, help=f"name one from {known[0]} to {known[-1]}"))
    return known.index(wanted)


def positions_of(tensors: Sequence[torch.Tensor], name: str) -> tuple[int, ...]:
    """Return the positions of tensors that lie on different devices.

    Args:
        tensors: One for each device that takes part.
        name: The collective.

    Raises:
        CallError: None is given, one lies elsewhere, or two lie on one device.
    """
    same_everywhere(tensors, name)
    positions = tuple(position_of(tensor.device) for tensor in tensors)
    twice = next((position for position in positions if positions.count(position) > 1), None)
    if twice is not None:
        message = f"{name} got {positions.count(twice)} tensors on xla:{twice}; it takes one from each device."
        raise CallError(Diagnostic("replica-twice", message))
    return positions


def same_everywhere(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Return when tensors can be inputs of one program.

    Args:
        tensors: What a collective was given.
        name: The collective.

    Raises:
        CallError: None is given, one lies elsewhere or is empty, or they differ in shape or element type.
    """
    if not tensors:
        raise CallError(Diagnostic("cannot-be-moved", f"{name} got no tensors.", help="give one for each device"))
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "xla":
            message = f"Tensor {number} of {name} is on {tensor.device}, not on an XLA device."
            raise CallError(Diagnostic("not-on-xla", message, help="move it first: tensor.to('xla:0')"))
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            message = (
                f"Tensor {number} of {name} is {_text(tensor)} on {tensor.device}, "
                f"and tensor 0 is {_text(first)} on {first.device}."
            )
            help_text = "all replicas of a collective run the same program: give one shape and element type"
            raise CallError(Diagnostic("replicas-differ", message, help=help_text))
    if first.numel() == 0 or first.is_complex():
        what = "no elements" if first.numel() == 0 else "complex elements"
        help_text = "leave it out" if first.numel() == 0 else "use torch.view_as_real and torch.view_as_complex"
        raise CallError(Diagnostic("cannot-be-moved", f"{name} got {_text(first)}, with {what}.", help=help_text))


def grouped(
    tensors: Sequence[torch.Tensor], groups: Sequence[Sequence[Place]] | None, name: str
) -> tuple[Groups, tuple[int, ...]]:
    """Return the groups of a collective by position, and the position of each tensor.

    Args:
        tensors: One for each device that takes part.
        groups: Their groups; None: one of all.
        name: The collective.

    Raises:
        CallError: A device is in no group or in two, or a group has a device without a tensor.
    """
    positions = positions_of(tensors, name)
    if groups is None:
        return (positions,), positions
    found = tuple(tuple(position_of(place) for place in group) for group in groups if len(group))
    members = list(chain(*found))
    for position in members:
        if position not in positions:
            message = f"xla:{position} is in a group of {name}, and has no tensor."
            help_text = "every device of a group must take part: give its tensor too"
            raise CallError(Diagnostic("replica-left-out", message, help=help_text))
        if members.count(position) > 1:
            raise CallError(Diagnostic("replica-twice", f"xla:{position} is in two groups of {name}."))
    for position in positions:
        if position not in members:
            message = f"{name} got a tensor on xla:{position}, which is in none of its groups."
            help_text = "every tensor belongs to one group: add the device, or leave the tensor out"
            raise CallError(Diagnostic("replica-left-out", message, help=help_text))
    return found, positions


def dimension(tensor: torch.Tensor, dim: int, name: str) -> int:
    """Return `dim` counted from the front.

    Args:
        tensor: One of the tensors.
        dim: Perhaps negative.
        name: The collective.

    Raises:
        CallError: The tensors have no such dimension.
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        message = f"{name} was given dimension {dim}, and its tensors have {tensor.ndim}."
        raise CallError(Diagnostic("collective-argument", message))
    return dim % tensor.ndim


def cuts(tensor: torch.Tensor, dim: int, groups: Groups, name: str) -> None:
    """Return when every group can cut its tensors along `dim`.

    Args:
        tensor: One of the tensors.
        dim: Where they are cut.
        groups: Who gets the pieces.
        name: The collective.

    Raises:
        CallError: The length is no multiple of the number of pieces.
    """
    for group in groups:
        if tensor.shape[dim] % len(group):
            message = (
                f"{name} cannot cut {_text(tensor)} along dimension {dim} into {len(group)} equal pieces, "
                "one for each device of the group."
            )
            raise CallError(Diagnostic("uneven-pieces", message, help="pad the tensor"))


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
