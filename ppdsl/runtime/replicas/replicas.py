"""Data parallelism: several pipelines train one model, each on its own share of the batch.

Every number that replicas have in common is a mean over them: the loss, and each gradient. The mean is taken when a
step ends, over what `.grad` holds then; what an earlier step has left there is equal on all replicas, and its mean is
itself. So steps that reduce and steps that do not (`reduce=False`) can follow each other in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.processes.channels import Channels
from ppdsl.runtime.replicas.boxes import Boxes
from ppdsl.runtime.replicas.shards import local_part
from ppdsl.runtime.ties import FLAG, TieGroup
from ppdsl.runtime.world import World

__all__ = ["Replicas"]

_BUCKET = 32 * 1024 * 1024
"""Bytes that travel together: small ones waste time on the way, large ones begin late."""

_GRADIENTS = "the gradients of all replicas"


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients under way, and after them one number for each that says on how many replicas it is there."""

    row: torch.Tensor
    work: Any
    parameters: tuple[torch.Tensor, ...]


class Replicas:
    """The replicas of one rank, seen from one of them.

    Args:
        channels: What moves bytes between them.
        count: How many there are.
        staged: Whether tensors go through host memory.

    Attributes:
        count: How many there are.
        reduces: Whether the present step takes the mean of gradients.
        pending: Whether a step has left gradients that are this replica's alone.
        boxes: The stages whose parameters are spread over the replicas; None: every replica has them whole.
    """

    def __init__(self, channels: Channels, count: int, *, staged: bool) -> None:
        self._channels = channels
        self._staged = staged
        self._under_way: list[_Bucket] = []
        self.count = count
        self.reduces = True
        self.pending = False
        self.boxes: Boxes | None = None

    def begin(self, *, reduces: bool) -> None:
        """Begin a step, with or without the mean of gradients at its end."""
        self._under_way.clear()
        self.reduces = reduces

    # ---------------------------------------------------------------- gradients

    def start(self, parameters: Sequence[torch.Tensor]) -> None:
        """Send the gradients of parameters on their way; replicas come here with the same ones in the same order."""
        if not self.reduces:
            return
        for bucket in _buckets(parameters):
            row = self._packed(bucket)
            self._under_way.append(_Bucket(row, self._channels.add_up(row), tuple(bucket)))

    def finish(self) -> None:
        """Give every parameter the mean of the replicas' gradients.

        A replica without a gradient counts as one of zeros; where no replica has one, `.grad` stays None.

        Raises:
            RunError: A replica failed.
        """
        for bucket in self._under_way:
            self._channels.finish_replicas(bucket.work, bucket.row, _GRADIENTS)
            self._unpack(bucket)
        self._under_way.clear()

    def finish_ties(self, groups: Sequence[TieGroup], world: World) -> None:
        """Take the mean of tied gradients, which are summed over stages already.

        The owner's replicas do, and give it to the other ranks that hold a copy: their replicas might add in another
        order, and copies have to stay equal to the last bit.
        """
        if not self.reduces:
            return
        trained = [group for group in groups if group.trainable]
        self.start([g.parameter for g in trained if g.parameter is not None and world.holds(g.ranks[0])])
        self.finish()
        for group in trained:
            if len(group.holders) > 1 and group.parameter is not None:
                _take_from_owner(group, group.parameter, world)

    def _packed(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this replica's share of the mean in one row.

        Raises:
            RunError: A gradient is sparse.
        """
        first = parameters[0]
        device = torch.device("cpu") if self._staged else first.device
        sizes = [_real(parameter).numel() for parameter in parameters]
        row = torch.zeros(sum(sizes) + len(sizes), dtype=self._wire_dtype(first), device=device)
        for place, parameter in zip(row[: sum(sizes)].split(sizes), parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout != torch.strided:
                    message = "A gradient is sparse, and the mean over replicas takes only dense ones."
                    raise RunError(Diagnostic("sparse-replicas", message, help="use sparse=False for the embedding"))
                place.view(_real(gradient).shape).copy_(_real(gradient))
        # Divided before it is added, so that a sum of halves does not overflow.
        row[: sum(sizes)].div_(self.count)
        row[sum(sizes) :] = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        return row

    def _unpack(self, bucket: _Bucket) -> None:
        sizes = [_real(parameter).numel() for parameter in bucket.parameters]
        there = bucket.row[sum(sizes) :].tolist()
        for values, parameter, holders in zip(
            bucket.row[: sum(sizes)].split(sizes), bucket.parameters, there, strict=True
        ):
            if not holders:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = _real(parameter.grad)
            gradient.copy_(values.view(gradient.shape))

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        dtype = _real(parameter).dtype
        on_gloo = self._staged or not parameter.is_cuda
        return torch.float32 if on_gloo and dtype in (torch.bfloat16, torch.float16) else dtype

    # ---------------------------------------------------------------- values

    def make_equal(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of the first replica; replicas come here with the same ones in the same order.

        Raises:
            RunError: A replica failed.
        """
        rows = []
        for tensor in tensors:
            if tensor.numel():
                held = tensor.detach()
                copy = (held.cpu() if self._staged else held).contiguous().clone()
                row = _real(copy).view(-1).view(torch.uint8)
                rows.append((held, copy, row, self._channels.take_first(row)))
        for held, copy, row, work in rows:
            self._channels.finish_replicas(work, row, "the values of the first replica")
            with torch.no_grad():
                held.copy_(copy)

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the mean over replicas of each number, the same on all of them."""
        return tuple(sum(column) / self.count for column in zip(*self.collect(values), strict=True))

    def collect(self, values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """Return the numbers of every replica, in their order."""
        rows = self._channels.collect(torch.tensor(list(values), dtype=torch.float64))
        return tuple(tuple(row.tolist()) for row in rows)


def _take_from_owner(group: TieGroup, parameter: torch.Tensor, world: World) -> None:
    owner, mine = group.ranks[0], parameter.grad
    owns = world.holds(owner)
    flag = torch.tensor([mine is not None], dtype=torch.uint8) if owns else None
    there = world.share(flag, owner, group.holders, FLAG, torch.device("cpu"))
    if there is None or not bool(there.item()):
        return
    found = world.share(mine if owns else None, owner, group.holders, group.layout, group.device)
    if found is not None and not owns:
        parameter.grad = found


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Divide parameters by kind, in their order, into groups of a size that travels well."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for group in kinds.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for parameter in group:
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _real(tensor: torch.Tensor) -> torch.Tensor:
    held = local_part(tensor.detach())
    return torch.view_as_real(held) if held.is_complex() else held
