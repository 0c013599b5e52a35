"""What must hold of the sends and receives in a CSV file: counterparts, and their side of the computation."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.schedule.action import Action, ActionKind
from ppdsl.schedule.csv_cells import Cell, Exchange, Transfer
from ppdsl.source import Span

__all__ = ["Placed", "cell_finding", "check_messages"]

_FORWARD = (Exchange.SEND_FORWARD, Exchange.RECV_FORWARD)
_SENDS = (Exchange.SEND_FORWARD, Exchange.SEND_BACKWARD)


@dataclass(frozen=True, slots=True)
class Placed:
    """A cell and where it stands."""

    cell: Cell
    span: Span
    line: str


def cell_finding(code: str, message: str, help_text: str, span: Span, line: str) -> Diagnostic:
    """Return a finding about a cell, with its line drawn."""
    # Text that is no file yet is not known to linecache, so its line is drawn here.
    excerpt = None
    if not linecache.getline(span.file, span.line):
        gutter = " " * len(str(span.line))
        carets = " " * (span.column - 1) + "^" * (span.end_column - span.column)
        excerpt = f"{gutter} |\n{span.line} | {line}\n{gutter} | {carets}"
    return Diagnostic(code, message, labels=(Label(span),), help=help_text, excerpt=excerpt)


def check_messages(rows: Sequence[Sequence[Placed]], placement: Sequence[int]) -> tuple[Diagnostic, ...]:
    """Return what is wrong with the sends and receives of rows; nothing when there are none at all.

    A send names the stage that made the value, a receive the stage that uses it; between them is one step of the
    chain. Each value that crosses ranks is sent and received once.
    """
    transfers = [(rank, at, p) for rank, row in enumerate(rows) for at, p in enumerate(row)]
    given: dict[str, tuple[int, int, Placed]] = {}
    findings: list[Diagnostic] = []
    for rank, at, placed in transfers:
        if isinstance(placed.cell, Transfer):
            if str(placed.cell) in given:
                message = f"A message is sent and received once. Found {placed.cell} again."
                findings.append(_at(placed, "duplicate-message", message, "leave it out"))
            given.setdefault(str(placed.cell), (rank, at, placed))
    if not given:
        return ()
    computed: dict[str, tuple[int, int, Placed]] = {}
    for rank, at, placed in transfers:
        if isinstance(placed.cell, tuple):
            for action in placed.cell:
                # Both kinds of backward make the gradient that is sent.
                kind = "B" if action.kind is ActionKind.INPUT_GRAD else action.kind.value
                computed[f"{action.stage}{kind}{action.microbatch}"] = rank, at, placed
    for place in given.values():
        findings += _one(place, given, computed, placement)
    findings += _missing(transfers, given, placement)
    return tuple(findings)


def _one(
    place: tuple[int, int, Placed],
    given: dict[str, tuple[int, int, Placed]],
    computed: dict[str, tuple[int, int, Placed]],
    placement: Sequence[int],
) -> Iterable[Diagnostic]:
    rank, at, placed = place
    transfer = placed.cell
    if not isinstance(transfer, Transfer):
        return
    partner = _partner(transfer)
    home = placement[transfer.stage] if transfer.stage < len(placement) else None
    if home != rank:
        found = "no rank" if home is None else f"rank {home}"
        message = f"{transfer} stands on rank {rank}, but stage {transfer.stage} is on {found}."
        yield _at(placed, "misplaced-message", message, f"move it to {found}" if home is not None else "leave it out")
        return
    if str(partner) not in given:
        verb = "received" if transfer.exchange in _SENDS else "sent"
        message = f"{transfer} is never {verb}: there is no {partner}."
        yield _at(placed, "unmatched-message", message, f"add {partner}, or leave {transfer} out")
    kind = "F" if transfer.exchange in _FORWARD else "B"
    own = computed.get(f"{transfer.stage}{kind}{transfer.microbatch}")
    if own is None:
        message = (
            f"{transfer} belongs to no computation: stage {transfer.stage} never runs {kind}{transfer.microbatch}."
        )
        yield _at(placed, "needless-message", message, "leave it out")
    elif (at > own[1]) != (transfer.exchange in _SENDS):
        side = "after" if transfer.exchange in _SENDS else "before"
        message = f"{transfer} belongs {side} {_named(own[2], transfer, kind)}, whose value it moves."
        yield _at(placed, "misplaced-message", message, f"move it {side} {_named(own[2], transfer, kind)}")


def _missing(
    transfers: Sequence[tuple[int, int, Placed]], given: dict[str, tuple[int, int, Placed]], placement: Sequence[int]
) -> Iterable[Diagnostic]:
    last = len(placement) - 1
    for rank, _, placed in transfers:
        for action in placed.cell if isinstance(placed.cell, tuple) else ():
            wanted = _needed(action, last)
            if wanted is None or placement[_partner(wanted).stage] == rank:
                continue
            if str(wanted) not in given and str(_partner(wanted)) not in given:
                message = f"{action} needs a value of another rank, but no message brings it: there is no {wanted}."
                yield _at(placed, "missing-message", message, f"add {wanted} before it, and {_partner(wanted)}")


def _needed(action: Action, last: int) -> Transfer | None:
    if action.kind is ActionKind.FORWARD:
        return Transfer(action.stage, Exchange.RECV_FORWARD, action.microbatch) if action.stage else None
    if action.kind is ActionKind.WEIGHT_GRAD or action.stage == last:
        return None
    return Transfer(action.stage, Exchange.RECV_BACKWARD, action.microbatch)


def _partner(transfer: Transfer) -> Transfer:
    stage, microbatch = transfer.stage, transfer.microbatch
    match transfer.exchange:
        case Exchange.SEND_FORWARD:
            return Transfer(stage + 1, Exchange.RECV_FORWARD, microbatch)
        case Exchange.RECV_FORWARD:
            return Transfer(stage - 1, Exchange.SEND_FORWARD, microbatch)
        case Exchange.SEND_BACKWARD:
            return Transfer(stage - 1, Exchange.RECV_BACKWARD, microbatch)
        case _:
            return Transfer(stage + 1, Exchange.SEND_BACKWARD, microbatch)


def _named(placed: Placed, transfer: Transfer, kind: str) -> str:
    cell = placed.cell if isinstance(placed.cell, tuple) else ()
    wanted = (kind, "I") if kind == "B" else (kind,)
    return next(str(a) for a in cell if a.stage == transfer.stage and a.kind.value in wanted)


def _at(placed: Placed, code: str, message: str, help_text: str) -> Diagnostic:
    return cell_finding(code, message, help_text, placed.span, placed.line)
