"""Borders: `cut before`, `cut after` and `cut(name)`, and the stretches of a recording between them.

A border says where what nobody claims belongs: from its step on, up to the next border, to the stage that begins
there. What runs before the first border belongs to the stage that is declared empty before it. When no stage at all is
declared before it, it is stage 0; when only stages with members are, the data flow decides, as for code outside every
mark.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.claims import Claims
from ppdsl.spec.modules import ModuleTree, spell
from ppdsl.spec.partition import CutDecl, Partition
from ppdsl.spec.select import Selector, selection_text

__all__ = ["Borders", "Key", "declared_keys", "find_borders"]

Key = int | str


@dataclass(frozen=True)
class Borders:
    """Where stretches begin.

    Attributes:
        steps: First steps of the stretches, ascending; the first is 0 when there is any border.
        keys: The stage of each stretch, or None where the data flow decides.
        implicit: Whether stage 0 is made by the first border.
    """

    steps: tuple[int, ...] = ()
    keys: tuple[Key | None, ...] = ()
    implicit: bool = False

    def at(self, step: int) -> Key | None:
        """Return the stage whose stretch a step lies in."""
        return self.keys[bisect_right(self.steps, step) - 1] if self.steps else None

    def of(self, start: int, end: int) -> Key | None:
        """Return the stage whose stretch holds a whole call, or None when several do."""
        first = self.at(start)
        return first if start >= end or bisect_right(self.steps, start) == bisect_right(self.steps, end - 1) else None


def declared_keys(partition: Partition) -> tuple[Key, ...]:
    """Return the keys of all stages in the order of the spec."""
    keys = [stage.key for stage in partition.stages]
    keys += [key for split in partition.splits for key in split.keys]
    keys += [cut.key for cut in partition.cuts]
    return tuple(dict.fromkeys([*partition.order, *keys]))


def find_borders(partition: Partition, selector: Selector, claims: Claims) -> Borders:
    """Return the borders of a spec; findings go to the selector."""
    found: list[tuple[int, Key, Span]] = [
        (picked.step, stage.key, picked.selection.span)
        for stage in partition.stages
        for picked in claims.picked.get(stage.key, ())
        if picked.step is not None
    ]
    for cut in partition.cuts:
        step = _place(cut, selector)
        if step is not None:
            found.append((step, cut.key, cut.span))
    if not found:
        return Borders()
    keys = declared_keys(partition)
    found.sort(key=lambda border: keys.index(border[1]))
    selector.findings += _disorder(found)
    found.sort(key=lambda border: border[0])
    before = _before(partition, keys[: keys.index(found[0][1])])
    steps, stretch_keys = [border[0] for border in found], [border[1] for border in found]
    if steps[0] == 0:
        return Borders(tuple(steps), tuple(stretch_keys))
    return Borders((0, *steps), (before, *stretch_keys), implicit=before == 0 and 0 not in keys)


def _before(partition: Partition, keys: tuple[Key, ...]) -> Key | None:
    """Return the stage of what runs before the first border; `keys` are declared before it."""
    empty = [stage.key for stage in partition.stages if stage.key in keys and not stage.members]
    if empty:
        return empty[-1]
    return None if keys else 0


def _place(cut: CutDecl, selector: Selector) -> int | None:
    """Return the step that a cut stands before."""
    picked = selector.pick(cut.selection)
    if picked.step is not None:
        return picked.step
    if picked.calls:
        module, number = picked.calls[0]
        call = selector.tree.calls[module][number]
        return call.end if cut.after else call.start
    if picked.empty:
        return None
    text = selection_text(cut.selection)
    label = Label(cut.selection.span)
    if len(picked.modules) != 1:
        many = [f"`{spell(name)}`" for name in picked.modules] or [f"the parameter `{picked.parameters[0]}`"]
        what = f"{len(many)} modules" if len(many) > 1 else many[0]
        message = f"A cut stands at one module, but `{text}` names {what}."
        selector.findings.append(Diagnostic("not-one-place", message, (label,), f"name one of them: {many[0]}"))
        return None
    place = _first_call(picked.modules[0], selector.tree, after=cut.after)
    if place is None:
        message = f"The model never calls `{text}`, so there is no place to cut."
        selector.findings.append(Diagnostic("never-called", message, (label,)))
    return place


def _first_call(name: str, tree: ModuleTree, *, after: bool) -> int | None:
    """Return where the first call of a module begins or ends; a container's is that of the modules in it."""
    if name in tree.calls:
        call = tree.calls[name][0]
        return call.end if after else call.start
    inner = [tree.calls[inside][0] for inside in tree.inside(name) if inside in tree.calls]
    if not inner:
        return None
    return max(call.end for call in inner) if after else min(call.start for call in inner)


def _disorder(found: list[tuple[int, Key, Span]]) -> list[Diagnostic]:
    """Return a finding for each border that lies before, or at, the border declared before it."""
    findings = []
    for (step, key, span), (later, after, place) in pairwise(found):
        if later > step:
            continue
        where = "at the same place as" if later == step else "before"
        message = f"Stage `{after}` is declared after stage `{key}`, but its cut lies {where} that of `{key}`."
        labels = (Label(place, "runs first" if later < step else "the same place"), Label(span, "declared first"))
        help_text = "write cuts in the order in which the model runs" if later < step else "drop one of the two cuts"
        findings.append(Diagnostic("cuts-out-of-order", message, labels, help_text))
    return findings
