"""From claims, divided splits and borders to the stage of every call and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppdsl.graph.outline import Assignment
from ppdsl.source import Span
from ppdsl.spec.claims import REPLICATED, Claim, Claims, SplitOf
from ppdsl.spec.cuts import Borders, Key, declared_keys
from ppdsl.spec.modules import above
from ppdsl.spec.partition import Partition
from ppdsl.spec.split import Division

__all__ = ["Owned", "assign", "key_spans"]


@dataclass(frozen=True)
class Owned:
    """What is known of every call and step before keys are given.

    Attributes:
        claims: All claims.
        calls: For each call the claim it belongs to.
        steps: For each step the claim it belongs to.
    """

    claims: Claims
    calls: tuple[Claim | None, ...]
    steps: tuple[Claim | None, ...]


def assign(partition: Partition, owned: Owned, divisions: Mapping[int, Division], borders: Borders) -> Assignment:
    """Return the stage of each call and step.

    Args:
        partition: The spec.
        owned: Claims of calls and steps.
        divisions: For each split by its number, how it was divided.
        borders: Of cuts.
    """
    outline = owned.claims.tree.outline
    parts = {number: _Parts(division, owned.claims) for number, division in divisions.items()}
    calls: list[Key | None] = []
    for call in outline.calls:
        claim = owned.calls[call.index]
        if claim is None:
            calls.append(borders.of(call.start, call.end))
        elif isinstance(claim.owner, SplitOf):
            caller = None if call.parent is None else (owned.calls[call.parent], calls[call.parent])
            calls.append(_part_of_call(call.module, claim, caller, parts))
        else:
            calls.append(None if claim.owner is REPLICATED else _key(claim))
    steps: list[Key | None] = []
    for step in outline.steps:
        claim = owned.steps[step.index]
        if claim is None:
            # A loss stands outside of the model: it goes where what it is computed from is.
            steps.append(None if step.call is None else borders.at(step.index))
        elif isinstance(claim.owner, SplitOf):
            part = parts.get(claim.owner.number)
            steps.append(None if part is None else part.of_step.get(step.index))
        else:
            steps.append(None if claim.owner is REPLICATED else _key(claim))
    keys = declared_keys(partition)
    keys = (0, *keys) if borders.implicit else keys
    spans = key_spans(partition)
    return Assignment(
        keys=keys,
        steps=tuple(steps),
        calls=tuple(calls),
        spans=tuple(spans[key] if key in spans else _first_span(partition) for key in keys),
        repeated=frozenset(
            at for at, claim in enumerate(owned.steps) if claim is not None and claim.owner == REPLICATED
        ),
    )


def key_spans(partition: Partition) -> dict[Key, Span]:
    """Return for each key where the spec declares it."""
    spans = {cut.key: cut.span for cut in reversed(partition.cuts)}
    spans |= {key: split.span for split in reversed(partition.splits) for key in split.keys}
    return spans | {stage.key: stage.span for stage in reversed(partition.stages)}


class _Parts:
    """Keys of a divided split by element, and by step."""

    def __init__(self, division: Division, claims: Claims) -> None:
        self.first = claims.tree.first
        self.names = claims.tree.names
        pairs = list(zip(division.elements, division.keys, strict=True))
        self.of_name = {element.name: key for element, key in pairs}
        self.of_step = {step: key for element, key in pairs for step in element.steps}

    def of_module(self, name: str) -> Key | None:
        first = self.first.get(name, name)
        ups = (self.first.get(up, up) for own in self.names.get(first, (first,)) for up in above(own))
        return next((self.of_name[up] for up in ups if up in self.of_name), None)


def _part_of_call(
    module: str, claim: Claim, caller: tuple[Claim | None, Key | None] | None, parts: Mapping[int, _Parts]
) -> Key | None:
    number = claim.owner.number if isinstance(claim.owner, SplitOf) else -1
    if number not in parts:
        return None
    found = parts[number].of_module(module)
    if found is None and caller is not None and caller[0] is not None and caller[0].owner == claim.owner:
        return caller[1]
    return found


def _key(claim: Claim) -> Key | None:
    return claim.owner if isinstance(claim.owner, int | str) else None


def _first_span(partition: Partition) -> Span:
    """Return where stage 0 comes from: the first cut, or the first stage that begins at a cutpoint."""
    places: Sequence[Span] = [cut.span for cut in partition.cuts] or [stage.span for stage in partition.stages]
    return places[0]
