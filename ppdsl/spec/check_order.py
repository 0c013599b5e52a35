"""Orders written in a spec: repetitions unfolded."""

from __future__ import annotations

from collections.abc import Mapping

from ppdsl.diagnostics import Label
from ppdsl.source import Span
from ppdsl.spec.context import Context
from ppdsl.spec.partition import InlineOrder
from ppdsl.spec.terms import ActionNode, OrderAction, OrderValue, RepeatNode, RowNode, WrittenAction

__all__ = ["MAX_ACTIONS", "order_of"]

MAX_ACTIONS = 200_000
_MAX_RANKS = 4096


class _TooLongError(Exception):
    """The order has too many actions."""


def order_of(node: OrderValue, context: Context) -> InlineOrder | None:
    """Return the rows of an order, one for each rank from 0, or None after a finding."""
    rows: dict[int, tuple[tuple[str, ...], Span]] = {}
    unfolder = _Unfolder(context)
    before = len(context.findings)
    try:
        for row in node.rows:
            for rank, local in _ranks(row, context):
                _add(rows, rank, unfolder.actions(row.actions, local), row, context)
    except _TooLongError:
        message = f"The order unfolds to more than {MAX_ACTIONS} actions."
        context.report("order-too-long", message, node.span, help="write it to a file, and use csv(...)")
    if not node.rows:
        context.report("empty-order", "The order has no row.", node.span, help="write `rank 0: 0F0 0B0`")
    missing = next((rank for rank in range(len(rows)) if rank not in rows), None)
    if missing is not None and len(context.findings) == before:
        message = f"The order has a row for rank {max(rows)}, but none for rank {missing}."
        context.report(
            "missing-row", message, node.span, help=f"write `rank {missing}:` with its actions, or with none"
        )
    if len(context.findings) > before:
        return None
    return InlineOrder(tuple(rows[rank][0] for rank in sorted(rows)))


def _ranks(row: RowNode, context: Context) -> list[tuple[int, dict[str, int]]]:
    if row.range is not None:
        numbers = context.range(row.range)
        if numbers is not None and not numbers:
            message = f"The range {numbers.start}..<{numbers.stop} holds no number."
            context.report("empty-range", message, row.range.span, help="ranges are half-open: 0..<4 is 0 to 3")
        return [(rank, {row.index: rank}) for rank in numbers or () if _in_bounds(rank, row, context)][:_MAX_RANKS]
    rank = None if row.rank is None else context.value(row.rank)
    return [] if rank is None or not _in_bounds(rank, row, context) else [(rank, {})]


def _in_bounds(rank: int, row: RowNode, context: Context) -> bool:
    if 0 <= rank < _MAX_RANKS:
        return True
    if rank < 0:
        context.report("unknown-rank", f"There is no rank {rank}.", row.span, help="ranks are counted from 0")
    else:
        message = f"The order has a row for rank {rank}, but at most {_MAX_RANKS} ranks are allowed."
        context.report("unknown-rank", message, row.span)
        raise _TooLongError
    return False


def _add(
    rows: dict[int, tuple[tuple[str, ...], Span]], rank: int, actions: tuple[str, ...], row: RowNode, context: Context
) -> None:
    if rank in rows:
        label = Label(rows[rank][1], "first given here")
        context.report("duplicate-row", f"The order has two rows for rank {rank}.", row.span, label)
    rows.setdefault(rank, (actions, row.span))


class _Unfolder:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.left = MAX_ACTIONS

    def actions(self, nodes: tuple[OrderAction, ...], local: Mapping[str, int]) -> tuple[str, ...]:
        unfolded: list[str] = []
        for node in nodes:
            match node:
                case WrittenAction(text):
                    self.count()
                    unfolded.append(text)
                case ActionNode():
                    self.count()
                    unfolded.append(self.action(node, local))
                case RepeatNode(inner, name, numbers):
                    for number in self.context.range(numbers, local) or ():
                        self.count()
                        unfolded += self.actions(inner, {**local, name: number})
        return tuple(unfolded)

    def action(self, node: ActionNode, local: Mapping[str, int]) -> str:
        stage, microbatch = self.context.value(node.stage, local), self.context.value(node.microbatch, local)
        if stage is None or microbatch is None:
            return ""
        if stage < 0 or microbatch < 0:
            what = f"stage {stage}" if stage < 0 else f"micro-batch {microbatch}"
            self.context.report("negative-action", f"There is no {what}.", node.span, help="both are counted from 0")
            return ""
        return f"{stage}{node.kind}{microbatch}"

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _TooLongError
