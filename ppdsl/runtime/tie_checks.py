"""Ties that cannot be kept, or were not: copies that went apart, objects that were replaced, memory that is shared.

A plain model has one tensor where a pipeline's ranks have copies. Whatever would let the copies differ is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch

from ppdsl.diagnostics import CallError, Diagnostic, RunError
from ppdsl.graph.ir import TensorMeta
from ppdsl.recording.programs import StageProgram
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.ties import TieGroup, copy_from_owner
from ppdsl.runtime.world import World

__all__ = ["aliases_of", "check_copies", "check_memory", "keep_equal", "require_kept"]

Aliases = tuple[tuple[str, ...], ...]
"""For each parameter with several names its names, the first one first."""

_SAMPLE = 64
"""Elements of a tied parameter that are compared: what trains or fills one copy alone changes nearly all of them."""
_STEPS_APART = 64.0
"""How many of the element type's own steps two copies may be apart: processors may round differently."""
_CPU = torch.device("cpu")


def keep_equal(groups: Sequence[TieGroup], world: World, *, equal: bool, training: bool) -> None:
    """Make the copies of tied parameters equal at the start of a step, or see to it that they still are.

    Args:
        groups: The tied parameters.
        world: The ranks.
        equal: Whether they were made equal before, and nothing was loaded since.
        training: Whether the step has a backward.

    Raises:
        RunError: A copy of this process is not its owner's any more.
    """
    if not equal:
        copy_from_owner(groups, world)
    elif training:
        check_copies(groups, world)


def check_copies(groups: Sequence[TieGroup], world: World) -> None:
    """Compare some elements of every copy of a tied parameter with its owner's.

    Copies begin equal and get equal gradients. They go apart when a rank's optimizer is not stepped, has the parameter
    in a group with other options, or when one copy alone is filled anew.

    Raises:
        RunError: A copy of this process is not the owner's.
    """
    for (owner, holders), together in _by_holders(groups, world).items():
        length = sum(_count(group) for group in together)
        mine = torch.cat([_sample(group) for group in together]) if any(map(world.holds, holders)) else None
        layout = Layout.of(TensorMeta((length,), "float64", (1,)))
        theirs = world.share(mine if world.holds(owner) else None, owner, holders, layout, _CPU)
        if theirs is None or mine is None or world.holds(owner):
            continue
        rank = next(holder for holder in holders if world.holds(holder))
        begin = 0
        for group in together:
            end = begin + _count(group)
            _require_equal(group, mine[begin:end], theirs[begin:end], rank)
            begin = end


def _by_holders(groups: Sequence[TieGroup], world: World) -> dict[tuple[int, tuple[int, ...]], list[TieGroup]]:
    """Return the groups that live in several processes, those of the same ranks together."""
    found: dict[tuple[int, tuple[int, ...]], list[TieGroup]] = {}
    for group in groups:
        if not all(world.holds(holder) for holder in group.holders):
            found.setdefault((group.ranks[0], group.holders), []).append(group)
    return found


def _count(group: TieGroup) -> int:
    return min(_SAMPLE, group.layout.numel)


def _sample(group: TieGroup) -> torch.Tensor:
    """Return elements from all over a copy; of complex numbers the magnitude."""
    if group.parameter is None or not _count(group):
        return torch.empty(0, dtype=torch.float64)
    flat = group.parameter.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
    return (picked.abs() if picked.is_complex() else picked).to(_CPU, torch.float64)


def _require_equal(group: TieGroup, mine: torch.Tensor, theirs: torch.Tensor, rank: int) -> None:
    dtype = group.layout.dtype
    step = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    largest = theirs.abs().nan_to_num(0.0, 0.0, 0.0).max() if theirs.numel() else torch.zeros(())
    allowed = _STEPS_APART * step * float(largest)
    if bool(torch.isclose(mine, theirs, rtol=0.0, atol=allowed, equal_nan=True).all()):
        return
    far = float((mine - theirs).abs().max())
    message = (
        f"Rank {rank}'s copy of the tied parameter `{group.name}` is not that of rank {group.ranks[0]} any more: they "
        f"are {far:.3g} apart."
    )
    advice = (
        "step the optimizer on every rank, with the tied parameter in a group of the same options; after filling it "
        "anew call pipe.load_state_dict, which makes copies equal again"
    )
    raise RunError(Diagnostic("tie-apart", message, help=advice))


# -------------------------------------------------------------------- parameters that were replaced


def aliases_of(model: torch.nn.Module) -> Aliases:
    """Return the names of each parameter that a model holds under several names.

    >>> model = torch.nn.ModuleDict({"table": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)})
    >>> model["head"].weight = model["table"].weight
    >>> aliases_of(model)
    (('table.weight', 'head.weight'),)
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def require_kept(before: Aliases, model: torch.nn.Module) -> None:
    """Look whether names that were one parameter still are, now that parameters were replaced.

    Raises:
        CallError: They are not: `to_empty`, for example, gives each module a tensor of its own.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    findings = []
    for first, *others in before:
        for name in others:
            if name in now and first in now and now[name] is not now[first]:
                message = f"`{name}` was tied to `{first}` when the pipeline was built, but is another parameter now."
                advice = "tie them again (pp.materialize keeps ties, to_empty() does not), or build another pipeline"
                findings.append(Diagnostic("tie-lost", message, help=advice))
    if findings:
        raise CallError(*findings)


# -------------------------------------------------------------------- parameters that share memory


def check_memory(programs: Sequence[StageProgram], placement: Mapping[int, int] | Sequence[int]) -> None:
    """Look for parameters of different ranks that are different objects in the same memory.

    In one process training one of them changes the other; in several processes nothing could.

    Args:
        programs: All stages.
        placement: The rank of each stage.

    Raises:
        CallError: There are such parameters.
    """
    ranks: dict[str, set[int]] = {}
    held: dict[str, torch.nn.Parameter] = {}
    for program in programs:
        for name, parameter in program.parameters:
            ranks.setdefault(name, set()).add(placement[program.stage])
            held[name] = parameter
    findings = []
    for one, two in _sharing(held):
        alone = ranks[one] == ranks[two] and len(ranks[one]) == 1
        if alone or not (held[one].requires_grad or held[two].requires_grad):
            continue
        message = f"`{one}` and `{two}` are different parameters that share memory, in stages of different ranks."
        advice = (
            "let both names hold one torch.nn.Parameter (two.weight = one.weight), or place both stages on one rank"
        )
        findings.append(Diagnostic("shared-memory", message, help=advice))
    if findings:
        raise CallError(*findings)


def _sharing(held: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of different parameters whose memory overlaps."""
    storages: dict[int, list[str]] = {}
    for name, parameter in held.items():
        # Tensors on XLA devices have no addresses, and share none after the first step.
        if type(parameter.data) is torch.Tensor and parameter.device.type not in ("meta", "xla") and parameter.numel():
            storages.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    for names in storages.values():
        for one, two in combinations(names, 2):
            if held[one] is not held[two] and _overlap(held[one], held[two]):
                yield one, two


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    (first, last), (begin, end) = _range(one), _range(two)
    return first <= end and begin <= last


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    span = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (span + 1) * tensor.element_size() - 1
