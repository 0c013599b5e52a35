"""The collectives in which every device of a group gets a result, and `reduce` and `broadcast`.

In all of them each tensor lies on an XLA device of its own; these devices take part, and each is found by its tensor.
The other local devices of the process run the same small program with zeros, among themselves, which ppdsl sees to.
Gradients are those of the same sums and joins in one process: what reaches several results is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives.checking import Place, cuts, dimension, grouped, position_of, positions_of
from ppdsl.runtime.xla.collectives.launching import launch_everywhere
from ppdsl.runtime.xla.collectives.moving import gather, scatter
from ppdsl.runtime.xla.collectives.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Groups,
    Reduce,
    ReduceScatter,
    apply,
    in_any_groups,
    in_equal_groups,
    know_autograd,
)
from ppdsl.runtime.xla.collectives.testing import require

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]

Tensors = tuple[torch.Tensor, ...]


def all_reduce(
    tensors: Sequence[torch.Tensor], op: str = "sum", groups: Sequence[Sequence[Place]] | None = None
) -> Tensors:
    """Return on each device the sum (mean, maximum, minimum) of all tensors of its group.

    Who takes part: every device of every group has to have a tensor here, else the call is refused.

    Args:
        tensors: One on each device, all of one shape and element type.
        op: `sum`, `mean`, `max` or `min`. The sum of booleans counts them in int64, as torch.sum does.
        groups: Devices that reduce among themselves, of any sizes; None: all that have a tensor.

    Returns:
        For each tensor the result, on its device, of its shape.

    Raises:
        CallError: The tensors or groups do not fit, or `op` is unknown.
        RunError: The collective does not work here (`self_test`).
    """
    require("all_reduce")
    found, positions = grouped(tensors, groups, "all_reduce")
    if op not in {"sum", "mean", "max", "min"}:
        raise CallError(_unknown_op("all_reduce", op))
    if op in {"max", "min"}:
        return _in_given_order(_extremes(found, op, _in_group_order(found, positions, tensors)), found, positions)
    counted = [tensor.long() if tensor.dtype == torch.bool else tensor for tensor in tensors]
    made = _in_given_order(apply(AllReduce(found), _in_group_order(found, positions, counted)), found, positions)
    if op == "sum":
        return made
    sizes = {position: len(group) for group in found for position in group}
    return tuple(total / sizes[position] for total, position in zip(made, positions, strict=True))


def reduce(tensors: Sequence[torch.Tensor], target: Place, op: str = "sum") -> torch.Tensor:
    """Return on one device the sum (mean, maximum, minimum) of all tensors.

    Who takes part: the devices of the tensors; `target` is one of them.

    Args:
        tensors: One on each device, all of one shape and element type.
        target: The device that gets the result.
        op: As in `all_reduce`.

    Returns:
        The result on `target`, of the tensors' shape.

    Raises:
        CallError: The tensors do not fit, `target` has none, or `op` is unknown.
        RunError: The collective does not work here (`self_test`).
    """
    require("reduce")
    positions = positions_of(tensors, "reduce")
    where = position_of(target)
    if where not in positions:
        message = f"xla:{where} is to get the result of reduce, and has no tensor."
        raise CallError(Diagnostic("replica-left-out", message, help="give a tensor of the target too"))
    if op in {"max", "min"}:
        return _extremes((positions,), op, tensors)[positions.index(where)]
    if op not in {"sum", "mean"}:
        raise CallError(_unknown_op("reduce", op))
    counted = [tensor.long() if tensor.dtype == torch.bool else tensor for tensor in tensors]
    total = apply(Reduce(positions, where), counted)[0]
    return total if op == "sum" else total / len(positions)


def broadcast(tensor: torch.Tensor, targets: Sequence[Place]) -> Tensors:
    """Return a copy of a tensor on each of several devices.

    Who takes part: the tensor's device and all `targets`; the targets need no tensor.

    Args:
        tensor: On any XLA device.
        targets: Devices, the tensor's own perhaps among them.

    Returns:
        For each target the copy.

    Raises:
        CallError: There is no such device, or one is named twice.
        RunError: The collective does not work here (`self_test`).
    """
    require("broadcast")
    source = positions_of([tensor], "broadcast")[0]
    places = tuple(position_of(target) for target in targets)
    if len(set(places)) < len(places):
        raise CallError(Diagnostic("replica-twice", "broadcast was given a target twice."))
    return apply(Broadcast(source, places), [tensor]) if places else ()


def all_gather(
    tensors: Sequence[torch.Tensor], dim: int = 0, groups: Sequence[Sequence[Place]] | None = None
) -> Tensors:
    """Return on each device all tensors of its group, joined.

    Who takes part: every device of every group has to have a tensor here, else the call is refused.

    Args:
        tensors: One on each device, all of one shape and element type.
        dim: Where they are joined, in the order of the group (without groups, the order given).
        groups: Devices that gather among themselves; None: all that have a tensor. One program when all groups are of
            one size that divides the number of local devices, otherwise through the first device of each group.

    Returns:
        For each tensor the join, on its device; along `dim` as long as all of its group together.

    Raises:
        CallError: The tensors or groups do not fit.
        RunError: The collective does not work here (`self_test`).
    """
    require("all_gather")
    found, positions = grouped(tensors, groups, "all_gather")
    dim = dimension(tensors[0], dim, "all_gather")
    own = _in_group_order(found, positions, tensors)
    if in_equal_groups(found):
        return _in_given_order(apply(AllGather(found, dim), own), found, positions)
    made = [broadcast(torch.cat(gather(members, group[0]), dim), group) for group, members in _by_group(found, own)]
    return _in_given_order(tuple(chain(*made)), found, positions)


def reduce_scatter(
    tensors: Sequence[torch.Tensor], dim: int = 0, groups: Sequence[Sequence[Place]] | None = None
) -> Tensors:
    """Return on each device its piece of the sum of all tensors of its group.

    Who takes part: every device of every group has to have a tensor here, else the call is refused.

    Args:
        tensors: One on each device, all of one shape and element type.
        dim: Where the sum is cut into as many pieces as the group has devices; the k-th device gets the k-th.
        groups: As in `all_gather`.

    Returns:
        For each tensor a piece of the sum, on its device.

    Raises:
        CallError: The tensors or groups do not fit, or the sum cannot be cut equally.
        RunError: The collective does not work here (`self_test`).
    """
    require("reduce_scatter")
    found, positions = grouped(tensors, groups, "reduce_scatter")
    dim = dimension(tensors[0], dim, "reduce_scatter")
    cuts(tensors[0], dim, found, "reduce_scatter")
    own = _in_group_order(found, positions, [t.long() if t.dtype == torch.bool else t for t in tensors])
    if in_equal_groups(found):
        return _in_given_order(apply(ReduceScatter(found, dim), own), found, positions)
    made = [
        scatter(reduce(members, group[0]).chunk(len(group), dim), group) for group, members in _by_group(found, own)
    ]
    return _in_given_order(tuple(chain(*made)), found, positions)


def all_to_all(
    tensors: Sequence[torch.Tensor],
    split_dim: int = 0,
    concat_dim: int = 0,
    groups: Sequence[Sequence[Place]] | None = None,
) -> Tensors:
    """Return on the k-th device of a group the k-th piece of each of its tensors, joined.

    Who takes part: every device of every group has to have a tensor here, else the call is refused.

    Args:
        tensors: One on each device, all of one shape and element type.
        split_dim: Where every tensor is cut into as many pieces as the group has devices.
        concat_dim: Where the pieces that arrive are joined, in the order of the group.
        groups: As in `all_gather`.

    Returns:
        For each tensor what its device got.

    Raises:
        CallError: The tensors or groups do not fit, or a tensor cannot be cut equally.
        RunError: The collective does not work here (`self_test`).
    """
    require("all_to_all")
    found, positions = grouped(tensors, groups, "all_to_all")
    split, join = (dimension(tensors[0], dim, "all_to_all") for dim in (split_dim, concat_dim))
    cuts(tensors[0], split, found, "all_to_all")
    own = _in_group_order(found, positions, tensors)
    if in_equal_groups(found):
        return _in_given_order(apply(AllToAll(found, split, join), own), found, positions)
    made: list[Tensors] = []
    for group, members in _by_group(found, own):
        pieces = [tensor.chunk(len(group), split) for tensor in gather(members, group[0])]
        made.append(scatter([torch.cat(column, join) for column in zip(*pieces, strict=True)], group))
    return _in_given_order(tuple(chain(*made)), found, positions)


# ---------------------------------------------------------------- order


def _in_group_order(groups: Groups, positions: Sequence[int], tensors: Sequence[torch.Tensor]) -> Tensors:
    by_position = dict(zip(positions, tensors, strict=True))
    return tuple(by_position[position] for position in chain(*groups))


def _in_given_order(made: Sequence[torch.Tensor], groups: Groups, positions: Sequence[int]) -> Tensors:
    by_position = dict(zip(chain(*groups), made, strict=True))
    return tuple(by_position[position] for position in positions)


def _by_group(groups: Groups, tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], list[torch.Tensor]]]:
    remaining = iter(tensors)
    return [(group, [next(remaining) for _ in group]) for group in groups]


def _unknown_op(name: str, op: str) -> Diagnostic:
    return Diagnostic("collective-argument", f"{name} has no op {op!r}.", help="say sum, mean, max or min")


# ---------------------------------------------------------------- maximum and minimum


def _extremes(groups: Groups, kind: str, tensors: Sequence[torch.Tensor]) -> Tensors:
    if tensors[0].dtype == torch.bool:
        whole = _extremes(groups, kind, [tensor.to(torch.uint8) for tensor in tensors])
        return tuple(made.bool() for made in whole)
    know_autograd(tensors)
    made: Tensors = _Extreme.apply(groups, kind, *tensors)  # type: ignore[no-untyped-call]
    return made


class _Extreme(torch.autograd.Function):
    """Maximum or minimum; as in torch.amax, those that share it share its gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, groups: Groups, kind: str, *tensors: torch.Tensor) -> Tensors:
        positions = tuple(chain(*groups))
        everyone = in_any_groups(groups)
        outputs = launch_everywhere(
            dict(zip(positions, tensors, strict=True)),
            lambda tensor: [adapter.pending_all_reduce(tensor, kind, everyone)],
        )
        made = tuple(outputs[position][0] for position in positions)
        ctx.groups = groups  # type: ignore[attr-defined]
        ctx.save_for_backward(*tensors, *made)
        return made

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: Tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        count = len(gradients)
        reduced = AllReduce(ctx.groups)  # type: ignore[attr-defined]
        reached = [(own == made).to(own.dtype) for own, made in zip(saved[:count], saved[count:], strict=True)]
        winners = apply(reduced, reached)
        totals = apply(reduced, gradients)
        shares = [total * mine / among for total, mine, among in zip(totals, reached, winners, strict=True)]
        return None, None, *shares
