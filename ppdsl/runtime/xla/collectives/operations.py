"""The linear maps behind the collectives, each with its transpose, which is its backward.

    all_reduce      itself                 permute    the pairs turned round
    all_gather      reduce_scatter         scatter    gather
    all_to_all      dimensions swapped     broadcast  reduce

An operation knows the devices of its inputs and outputs by position, so its inputs and outputs are plain tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Protocol

import torch

from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives.launching import launch_everywhere
from ppdsl.runtime.xla.start import start

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Gather",
    "Groups",
    "Operation",
    "Permute",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "apply",
    "in_any_groups",
    "in_equal_groups",
    "know_autograd",
]

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[int, int]
Groups = tuple[tuple[int, ...], ...]
"""Positions of devices; the tensors of a call stand in the order of the groups."""


class Operation(Protocol):
    """A linear map from tensors on some devices to tensors on others."""

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        ...

    @property
    def transpose(self) -> Operation:
        """The map of the gradients."""
        ...


def apply(operation: Operation, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Run an operation so that autograd knows its backward; booleans go as integers, which every backend moves."""
    if tensors[0].dtype == torch.bool:
        return tuple(made.bool() for made in apply(operation, [tensor.to(torch.uint8) for tensor in tensors]))
    know_autograd(tensors)
    made: Tensors = _Applied.apply(operation, *tensors)  # type: ignore[no-untyped-call]
    return made


def know_autograd(tensors: Sequence[torch.Tensor]) -> None:
    """Return when a backward through a collective of these tensors can run.

    Raises:
        CallError: It could not: autograd began its work before torch_xla did.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        _started()


_started = cache(start)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, operation: Operation, *tensors: torch.Tensor) -> Tensors:
        ctx.operation = operation  # type: ignore[attr-defined]
        return operation.run(tensors)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operation: Operation = ctx.operation  # type: ignore[attr-defined]
        return None, *apply(operation.transpose, gradients)


# ---------------------------------------------------------------- moving


@dataclass(frozen=True, slots=True)
class Permute:
    """Moves the k-th tensor along the k-th pair (source, target).

    Attributes:
        pairs: Every device at most once as source and once as target.
        by_sum: Move by all_reduce(sum) with zeros at the receivers, pair after pair, instead of collective-permute.
    """

    pairs: tuple[Pair, ...]
    by_sum: bool = False

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        if self.by_sum:
            return tuple(_moved_by_sum(tensor, pair) for tensor, pair in zip(tensors, self.pairs, strict=True))
        inputs = {source: tensor for (source, _), tensor in zip(self.pairs, tensors, strict=True)}
        outputs = launch_everywhere(inputs, lambda tensor: [adapter.pending_permute(tensor, self.pairs)])
        return tuple(outputs[target][0] for _, target in self.pairs)

    @property
    def transpose(self) -> Permute:
        """The way back."""
        return Permute(tuple((target, source) for source, target in self.pairs), self.by_sum)


@dataclass(frozen=True, slots=True)
class Scatter:
    """Moves the k-th tensor of one device to the k-th target."""

    source: int
    targets: tuple[int, ...]
    by_sum: bool = False

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        pairs = [(self.source, target) for target in self.targets]
        if self.by_sum:
            return tuple(_moved_by_sum(tensor, pair) for tensor, pair in zip(tensors, pairs, strict=True))
        # One input for each replica: a buffer that stands for several would make another program.
        outputs = launch_everywhere(
            {self.source: torch.stack(tensors)},
            lambda stack: [adapter.pending_permute(stack[row], [pair]) for row, pair in enumerate(pairs)],
        )
        return tuple(outputs[target][row] for row, target in enumerate(self.targets))

    @property
    def transpose(self) -> Gather:
        """The way back."""
        return Gather(self.targets, self.source, self.by_sum)


@dataclass(frozen=True, slots=True)
class Gather:
    """Moves the tensors of several devices to one."""

    sources: tuple[int, ...]
    target: int
    by_sum: bool = False

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        pairs = [(source, self.target) for source in self.sources]
        if self.by_sum:
            return tuple(_moved_by_sum(tensor, pair) for tensor, pair in zip(tensors, pairs, strict=True))
        outputs = launch_everywhere(
            dict(zip(self.sources, tensors, strict=True)),
            lambda tensor: [adapter.pending_permute(tensor, [pair]) for pair in pairs],
        )
        return tuple(outputs[self.target])

    @property
    def transpose(self) -> Scatter:
        """The way back."""
        return Scatter(self.target, self.sources, self.by_sum)


def _moved_by_sum(tensor: torch.Tensor, pair: Pair) -> torch.Tensor:
    """Move one tensor as the sum of itself and of the receiver's zeros."""
    source, target = pair
    outputs = _sums({source: tensor}, (tuple(dict.fromkeys(pair)),))
    return outputs[target]


# ---------------------------------------------------------------- reducing


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Gives every device the sum over its group."""

    groups: Groups

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        positions = tuple(chain(*self.groups))
        outputs = _sums(dict(zip(positions, tensors, strict=True)), self.groups)
        return tuple(outputs[position] for position in positions)

    @property
    def transpose(self) -> AllReduce:
        """Every output's gradient reaches every input."""
        return self


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Gives the one tensor to all targets, as its sum with their zeros."""

    source: int
    targets: tuple[int, ...]

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        outputs = _sums({self.source: tensors[0]}, (tuple(dict.fromkeys((self.source, *self.targets))),))
        return tuple(outputs[target] for target in self.targets)

    @property
    def transpose(self) -> Reduce:
        """The gradients of all copies meet at the source."""
        return Reduce(self.targets, self.source)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Gives one device the sum."""

    sources: tuple[int, ...]
    target: int

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        inputs = dict(zip(self.sources, tensors, strict=True))
        return (_sums(inputs, (tuple(dict.fromkeys((*self.sources, self.target))),))[self.target],)

    @property
    def transpose(self) -> Broadcast:
        """The gradient goes to all that were summed."""
        return Broadcast(self.target, self.sources)


def _sums(inputs: dict[int, torch.Tensor], groups: Groups) -> list[torch.Tensor]:
    """Return for every device the sum over its group; devices without an input add zeros."""
    everyone = in_any_groups(groups)
    outputs = launch_everywhere(inputs, lambda tensor: [adapter.pending_all_reduce(tensor, "sum", everyone)])
    return [made[0] for made in outputs]


def in_any_groups(groups: Groups) -> Groups:
    """Return `groups` and every other local device alone: XLA wants each replica in one."""
    return (*groups, *((position,) for position in _others(groups)))


# ---------------------------------------------------------------- cutting and joining, in groups of one size


@dataclass(frozen=True, slots=True)
class AllGather:
    """Gives every device the tensors of its group, joined along `dim`."""

    groups: Groups
    dim: int

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        everyone = in_equal_groups(self.groups)
        return _in_groups(self.groups, tensors, lambda x: adapter.pending_all_gather(x, self.dim, everyone))

    @property
    def transpose(self) -> ReduceScatter:
        """Every piece's gradient is summed where the piece came from."""
        return ReduceScatter(self.groups, self.dim)


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Gives every device its piece along `dim` of the sum over its group."""

    groups: Groups
    dim: int

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        everyone = in_equal_groups(self.groups)
        return _in_groups(self.groups, tensors, lambda x: adapter.pending_reduce_scatter(x, self.dim, everyone))

    @property
    def transpose(self) -> AllGather:
        """Every input gets the gradients of all pieces."""
        return AllGather(self.groups, self.dim)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Gives the k-th device of a group the k-th piece of each of its tensors."""

    groups: Groups
    split_dim: int
    concat_dim: int

    def run(self, tensors: Tensors) -> Tensors:
        """Launch it."""
        everyone = in_equal_groups(self.groups)
        return _in_groups(
            self.groups,
            tensors,
            lambda x: adapter.pending_all_to_all(x, self.split_dim, self.concat_dim, everyone),
        )

    @property
    def transpose(self) -> AllToAll:
        """The pieces go back."""
        return AllToAll(self.groups, self.concat_dim, self.split_dim)


def in_equal_groups(groups: Groups) -> Groups:
    """Return `groups` and the other local devices in groups of the same size; () when that cannot be."""
    size = len(groups[0])
    rest = _others(groups)
    if any(len(group) != size for group in groups) or len(rest) % size:
        return ()
    return (*groups, *(tuple(rest[first : first + size]) for first in range(0, len(rest), size)))


def _in_groups(groups: Groups, tensors: Tensors, step: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    positions = tuple(chain(*groups))
    outputs = launch_everywhere(dict(zip(positions, tensors, strict=True)), lambda tensor: [step(tensor)])
    return tuple(outputs[position][0] for position in positions)


def _others(groups: Groups) -> list[int]:
    named = set(chain(*groups))
    return [position for position in range(adapter.device_count()) if position not in named]
