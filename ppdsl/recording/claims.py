"""Which parameters each stage uses: those it was seen to use, and those it might use another time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppdsl.recording.items import Item
from ppdsl.recording.routes import Routes
from ppdsl.recording.tape import ValueKind, origin

__all__ = ["Claims", "claim_parameters"]

Claims = tuple[tuple[str, torch.nn.Parameter], ...]


def claim_parameters(
    items_of_visits: Sequence[Sequence[Item]], routes: Routes, aliases: dict[int, list[str]]
) -> list[Claims]:
    """Return for each visit its parameters, under their first names.

    A parameter belongs to the visits whose calls used it while recording. A module that is called whole may take
    another way with other numbers (a router that picks experts): what it holds and nobody was seen to use is claimed as
    well, and all that it holds when numbers decided its way.

    Args:
        items_of_visits: The items of each visit.
        routes: Resolves values that were passed on.
        aliases: All names of each parameter, by its id, in the model's order.
    """
    found = [_used(items, routes) for items in items_of_visits]
    claimed = {id(parameter) for visit in found for parameter in visit.values()}
    for items, visit in zip(items_of_visits, found, strict=True):
        for item in items:
            if not isinstance(item.target, torch.nn.Module):
                continue
            for parameter in item.target.parameters():
                if id(parameter) in aliases and (item.volatile or id(parameter) not in claimed):
                    visit.setdefault(aliases[id(parameter)][0], parameter)
    order = {names[0]: position for position, names in enumerate(aliases.values())}
    return [tuple(sorted(visit.items(), key=lambda entry: order[entry[0]])) for visit in found]


def _used(items: Sequence[Item], routes: Routes) -> dict[str, torch.nn.Parameter]:
    found: dict[str, torch.nn.Parameter] = {}
    for item in items:
        for value in (*item.parameters, *map(routes.resolve, item.inputs)):
            start = origin(value)
            if start.kind is ValueKind.PARAMETER and isinstance(start.tensor, torch.nn.Parameter):
                found[start.name] = start.tensor
    return found
