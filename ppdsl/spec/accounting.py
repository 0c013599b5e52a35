"""The whole model by stage: modules, parameters, bytes, operations, share of the cost, rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ppdsl.graph.outline import Assignment
from ppdsl.spec.assigning import Owned
from ppdsl.spec.coverage import stage_of_parameters
from ppdsl.spec.cuts import Key
from ppdsl.spec.modules import ModuleTree, above, spell
from ppdsl.spec.split import Division
from ppdsl.units import Bytes, Flops

__all__ = ["StageAccount", "account", "fold_names"]


@dataclass(frozen=True, slots=True)
class StageAccount:
    """What one stage has.

    Attributes:
        key: The stage.
        modules: What it claims and runs, folded (`h[0:6], ln_f`).
        parameters: Numbers in its parameters; a parameter of several stages counts in each.
        bytes: Of its parameters.
        flops: Of its steps' forward on one micro-batch.
        share: Of the operations of all stages, from 0 to 1.
        ranks: Where the spec places it; empty: the schedule's rule decides.
    """

    key: Key
    modules: str
    parameters: int
    bytes: Bytes
    flops: Flops
    share: float
    ranks: tuple[int, ...]


def account(
    owned: Owned,
    assignment: Assignment,
    divisions: Mapping[int, Division],
    ranks: Mapping[Key, tuple[int, ...]],
) -> tuple[StageAccount, ...]:
    """Return one row for each stage, in the order of the spec."""
    tree = owned.claims.tree
    homes = stage_of_parameters(owned, assignment, divisions)
    flops = dict.fromkeys(assignment.keys, 0)
    for step, key in zip(tree.outline.steps, assignment.steps, strict=True):
        if key is not None:
            flops[key] += step.flops
    total = sum(flops.values())
    modules = _modules(owned, assignment, divisions)
    rows = []
    for key in assignment.keys:
        own = [parameter for parameter in tree.outline.parameters if key in homes[parameter.names[0]]]
        rows.append(
            StageAccount(
                key=key,
                modules=fold_names(modules[key], tree),
                parameters=sum(parameter.count for parameter in own),
                bytes=Bytes(sum(parameter.bytes for parameter in own)),
                flops=Flops(flops[key]),
                share=flops[key] / total if total else 0.0,
                ranks=ranks.get(key, ()),
            )
        )
    return tuple(rows)


def fold_names(names: Iterable[str], tree: ModuleTree) -> str:
    """Return names with neighbouring elements of a container as one slice.

    >>> from ppdsl.graph.outline import ModelOutline
    >>> fold_names(["h.0", "h.1", "h.2", "ln_f"], ModuleTree.of(ModelOutline("Net", (), (), (), ())))
    'h[0:3], ln_f'
    """
    pieces: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in (*dict.fromkeys(names), None):
        parent, _, last = (name or "").rpartition(".")
        if run is not None and name is not None and last.isdecimal() and (parent, int(last)) == (run[0], run[2]):
            run = (run[0], run[1], run[2] + 1)
            continue
        if run is not None:
            pieces.append(_run_text(run, tree))
        run = (parent, int(last), int(last) + 1) if parent and last.isdecimal() else None
        if run is None and name is not None:
            pieces.append(spell(name))
    return ", ".join(pieces)


def _run_text(run: tuple[str, int, int], tree: ModuleTree) -> str:
    parent, start, stop = run
    if stop - start == 1:
        return f"{spell(parent)}[{start}]"
    whole = start == 0 and stop == len(tree.elements.get(parent, {}))
    return f"{spell(parent)}[*]" if whole else f"{spell(parent)}[{start}:{stop}]"


def _modules(owned: Owned, assignment: Assignment, divisions: Mapping[int, Division]) -> dict[Key, list[str]]:
    """Return for each stage the outermost modules it runs: claimed ones, elements, and calls between its borders."""
    tree = owned.claims.tree
    found: dict[Key, dict[str, None]] = {key: {} for key in assignment.keys}
    for owner, picked in owned.claims.picked.items():
        if isinstance(owner, int | str) and owner in found:
            for some in picked:
                found[owner].update(dict.fromkeys((*some.modules, *some.parameters)))
                found[owner].update(dict.fromkeys(module for module, _ in some.calls))
    for division in divisions.values():
        for element, part in zip(division.elements, division.keys, strict=True):
            found[part].setdefault(element.name)
    for call in tree.outline.calls:
        key = assignment.calls[call.index]
        outer = None if call.parent is None else assignment.calls[call.parent]
        if key is not None and owned.calls[call.index] is None and outer != key:
            found[key].setdefault(tree.first.get(call.module, call.module))
    in_model = {name: at for at, name in enumerate(tree.first)}
    return {
        key: sorted(
            (name for name in names if not any(up in names for up in list(above(name))[1:])),
            key=lambda name: in_model.get(name, -1),
        )
        for key, names in found.items()
    }
