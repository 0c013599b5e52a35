"""Stages, splits and cuts: families unfolded, keys unique, ranks in range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ppdsl.diagnostics import Label
from ppdsl.source import Span
from ppdsl.spec.check_settings import options_of
from ppdsl.spec.context import MAX_STAGES, Context
from ppdsl.spec.files import file_inside
from ppdsl.spec.keywords import BALANCES
from ppdsl.spec.nodes import CutNode, Placement, SplitNode, StageNode
from ppdsl.spec.partition import Balance, CutDecl, Key, SplitDecl, StageDecl
from ppdsl.spec.selections import selection_of

__all__ = ["Stages", "key_of"]

_MAX_MEMBERS = 40_000


def key_of(name: str | int, index: int | None) -> Key:
    """Return a stage's key.

    >>> key_of("head", None), key_of(3, None), key_of("block", 2)
    ('head', 3, 'block[2]')
    """
    return name if index is None else f"{name}[{index}]"


@dataclass
class Stages:
    """All stages of a spec, in the order written.

    Attributes:
        context: Takes findings.
        ranks: Number of ranks, if the spec says it.
        keys: Where each stage is declared.
    """

    context: Context
    ranks: int | None = None
    keys: dict[Key, Span] = field(default_factory=dict)
    stages: list[StageDecl] = field(default_factory=list)
    splits: list[SplitDecl] = field(default_factory=list)
    cuts: list[CutDecl] = field(default_factory=list)
    full: bool = False
    work: int = 0

    @property
    def known(self) -> dict[Key, Span]:
        """Keys that can be spoken of: also stage 0 of what runs before a first cut that nothing is declared before."""
        if self.cuts and next(iter(self.keys)) == self.cuts[0].key:
            return {0: self.cuts[0].span, **self.keys}
        return self.keys

    def add_stage(self, node: StageNode) -> None:
        """Add a stage, or all members of a family."""
        if node.family is None:
            self._stage(node, None, {})
            return
        numbers = self.context.range(node.family.range)
        if numbers is None:
            return
        if not numbers:
            message = f"The family `{node.name}` is empty: {numbers.start}..<{numbers.stop} holds no number."
            help_text = "ranges are half-open: 0..<4 is 0 to 3"
            self.context.report("empty-range", message, node.family.range.span, help=help_text)
        if node.family.name in self.context.values:
            self.context.used.add(node.family.name)
            message = f"The index `{node.family.name}` hides the parameter of the same name."
            self.context.report("hidden-name", message, node.family.span, help="give it another name")
        for number in numbers:
            if self.full:
                break
            self._stage(node, number, {node.family.name: number})

    def _stage(self, node: StageNode, number: int | None, local: Mapping[str, int]) -> None:
        key = key_of(node.name, number)
        self.work += 1 + len(node.members)
        if self.work > _MAX_MEMBERS and not self.full:
            self.full = True
            message = f"The spec unfolds to more than {_MAX_MEMBERS} members of stages."
            self.context.report("too-many-stages", message, node.head, help="use slices")
        if not self._declare(key, node.head):
            return
        members = [selection_of(member.selection, self.context, local) for member in node.members]
        self.stages.append(
            StageDecl(
                key,
                tuple(member for member in members if member is not None),
                self._placed(key, node.placement, local),
                options_of(node.options, self.context, local),
                node.head,
            )
        )

    def add_split(self, node: SplitNode) -> None:
        """Add the stages of a split."""
        context = self.context
        head = node.span
        count = context.value(node.parts)
        if count is not None and count < 1:
            context.report("no-parts", f"A split has at least 1 part, not {count}.", node.parts.span)
            count = None
        balance = self._balance(node)
        file = None if node.file is None else file_inside(node.file, node.balance_span, context)
        selections = [selection_of(selection, context, {}) for selection in node.selections]
        keys: list[Key] = []
        ranks: list[int | None] = []
        options = options_of(node.options, context, {})
        if node.index in context.values:
            context.used.add(node.index)
            message = f"The index `{node.index}` hides the parameter of the same name."
            context.report("hidden-name", message, head, help="give it another name")
        for number in range(count or 0):
            if self.full:
                return
            key = key_of(node.name, number)
            if self._declare(key, head):
                keys.append(key)
                ranks.append(self._rank(key, node.placement, {node.index: number}))
        if count is not None and balance is not None:
            known = tuple(selection for selection in selections if selection is not None)
            self.splits.append(SplitDecl(known, tuple(keys), tuple(ranks), balance, file, options, head))

    def add_cut(self, node: CutNode) -> None:
        """Add the stage that begins at a cut; without a name it is numbered by the cuts up to it."""
        key: Key = len(self.cuts) + 1 if node.name is None else node.name
        selection = selection_of(node.selection, self.context, {})
        if self._declare(key, node.span) and selection is not None:
            rank = self._rank(key, node.placement, {})
            self.cuts.append(CutDecl(node.where == "after", selection, key, rank, node.span))

    def _balance(self, node: SplitNode) -> Balance | None:
        if node.balance not in BALANCES:
            self.context.unknown("unknown-balance", "balance named", node.balance, BALANCES, node.balance_span)
            return None
        if (node.balance == "file") != (node.file is not None):
            message = "Only `file` takes a path." if node.file is not None else "`file` needs the path of a cost file."
            self.context.report("wrong-value", message, node.balance_span, help='write by file("costs.csv")')
            return None
        return Balance(node.balance)

    def _declare(self, key: Key, span: Span) -> bool:
        if self.full:
            return False
        if key in self.keys:
            first = Label(self.keys[key], "first declared here")
            shown = f"`{key}`" if isinstance(key, str) else key
            self.context.report("duplicate-stage", f"Stage {shown} is declared twice.", span, first)
            return False
        self.keys[key] = span
        if len(self.keys) > MAX_STAGES:
            self.full = True
            self.context.report("too-many-stages", f"The spec has more than {MAX_STAGES} stages.", span)
        return True

    def _placed(self, key: Key, placement: Placement | None, local: Mapping[str, int]) -> tuple[int, ...] | None:
        if placement is not None and placement.several:
            ranks = [self._in_range(key, self.context.value(node, local), placement) for node in placement.ranks]
            if len(ranks) > 1 and self.context.unsupported("placement", "several", placement.span):
                return None
            return tuple(rank for rank in ranks if rank is not None) or None
        rank = self._rank(key, placement, local)
        return None if rank is None else (rank,)

    def _rank(self, key: Key, placement: Placement | None, local: Mapping[str, int]) -> int | None:
        if placement is None:
            return None
        if len(placement.ranks) > 1:
            self.context.unsupported("placement", "several", placement.span)
            return None
        return self._in_range(key, self.context.value(placement.ranks[0], local), placement)

    def _in_range(self, key: Key, rank: int | None, placement: Placement) -> int | None:
        if rank is None or (rank >= 0 and (self.ranks is None or rank < self.ranks)):
            return rank
        shown = f"`{key}`" if isinstance(key, str) else key
        if self.ranks is None:
            message, help_text = f"Stage {shown} is on rank {rank}.", "ranks are counted from 0"
        else:
            noun = "rank" if self.ranks == 1 else "ranks"
            there = "there is" if self.ranks == 1 else "there are"
            message = f"Stage {shown} is on rank {rank}, but {there} {self.ranks} {noun}."
            help_text = "use rank 0" if self.ranks == 1 else f"use a rank from 0 to {self.ranks - 1}"
        self.context.report("unknown-rank", message, placement.span, help=help_text)
        return None
