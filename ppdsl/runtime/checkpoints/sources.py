"""Where weights come from, and whether they fit: names and shapes first, then only the values that are needed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ppdsl.diagnostics import Diagnostic
from ppdsl.runtime.checkpoints.subject import Slot, Subject, canonical
from ppdsl.runtime.replicas.shards import is_shard, shard_like, whole
from ppdsl.units import counted

__all__ = ["MappingSource", "Match", "Source", "match", "read"]

Shape = tuple[int, ...]


class Source(Protocol):
    """Tensors by name."""

    @property
    def reads_shards(self) -> bool:
        """Whether it reads no more than a shard for a tensor that is spread over processes."""

    @property
    def title(self) -> str:
        """What it is, to be read after "in" (`the checkpoint runs/step-3`)."""

    def shapes(self) -> Mapping[str, Shape]:
        """Return the names of all tensors with their shapes, without reading values."""

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of these names into `targets`, which have their shapes."""


@dataclass(frozen=True)
class MappingSource:
    """A state dictionary.

    Attributes:
        tensors: Tensors by name.
        title: What it is.
        reads_shards: It does not.
    """

    tensors: Mapping[str, torch.Tensor]
    title: str = "the given state"
    reads_shards: bool = False

    def shapes(self) -> Mapping[str, Shape]:
        """Return names and shapes."""
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy values."""
        for name, target in targets.items():
            target.copy_(whole(self.tensors[name]))


@dataclass(frozen=True)
class Match:
    """How a source fits a model.

    Attributes:
        found: The name in the source of each tensor that it has.
        absent: The model's tensors that it lacks; non-persistent buffers among them.
        findings: What does not fit.
    """

    found: Mapping[Slot, str]
    absent: tuple[Slot, ...]
    findings: tuple[Diagnostic, ...]


def match(subject: Subject, source: Source, *, strict: bool) -> Match:
    """Compare the names and shapes of a source with those of a model.

    A tied tensor needs to be there under one of its names.

    Args:
        subject: The model.
        source: The tensors.
        strict: Whether every tensor of the model must be there, and no other.
    """
    shapes = source.shapes()
    by_name = {canonical(name): name for name in shapes}
    found: dict[Slot, str] = {}
    absent, missing, wrong = [], [], []
    for slot in subject.slots:
        name = next((by_name[name] for name in slot.names if name in by_name), None)
        if name is None:
            absent.append(slot)
            if slot.persistent:
                missing.append(slot.name)
            continue
        found[slot] = name
        shape = tuple(slot.tensor.shape)
        if shapes[name] != shape:
            wrong.append(f"{slot.name}: {list(shapes[name])} there, {list(shape)} in the model")
    known = [name for slot in subject.slots for name in slot.names]
    unexpected = sorted(by_name[name] for name in by_name.keys() - set(known))
    findings = []
    if strict and missing:
        message = f"{counted(len(missing), 'tensor')} of the model {_verb(missing)} missing in {source.title}."
        findings.append(_finding("missing-weights", message, missing, unexpected))
    if strict and unexpected:
        message = f"{counted(len(unexpected), 'tensor')} in {source.title} {_verb(unexpected)} unknown to the model."
        findings.append(_finding("unexpected-weights", message, unexpected, missing or known))
    if wrong:
        message = (
            f"{counted(len(wrong), 'tensor')} in {source.title} {_verb(wrong)} of another shape than in the model."
        )
        findings.append(_finding("wrong-weight-shapes", message, wrong, ()))
    return Match(found, tuple(absent), tuple(findings))


def read(source: Source, found: Mapping[Slot, str]) -> None:
    """Fill this process's tensors: those on meta get memory, others are written in place, in their own element type.

    Args:
        source: The tensors.
        found: What to fill, with the name in the source.
    """
    fresh: dict[Slot, torch.Tensor] = {}
    targets: dict[str, torch.Tensor] = {}
    shards: dict[str, torch.Tensor] = {}
    for slot, name in found.items():
        if not slot.mine:
            continue
        held = slot.tensor.detach()
        if held.is_meta:
            held = fresh[slot] = torch.empty_like(held, device=slot.goal)
        (shards if is_shard(held) and not source.reads_shards else targets)[name] = held
    with torch.no_grad():
        source.read(targets)
        for name, held in shards.items():
            full = torch.empty(held.shape, dtype=held.dtype)
            source.read({name: full})
            held.copy_(shard_like(full, held))
        for slot, tensor in fresh.items():
            slot.put(tensor)


def _verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _finding(code: str, message: str, names: Sequence[str], others: Iterable[str]) -> Diagnostic:
    """List every name, each with the nearest of the names that it may be meant for."""
    candidates = list(others)
    lines = []
    for name in names:
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75) if len(candidates) <= 1000 else []
        lines.append(f"  {name}" + (f" (is it `{near[0]}`?)" if near else ""))
    return Diagnostic(code, message, excerpt="\n".join(lines))
