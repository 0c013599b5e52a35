"""Users' own orders: rows of actions, and the CSV text of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from ppdsl.diagnostics import Diagnostic, ScheduleError
from ppdsl.schedule.action import Action, ActionKind, parse_action
from ppdsl.schedule.csv_cells import cell_text, joined, parse_cell, why_not
from ppdsl.schedule.csv_checks import Placed, cell_finding, check_messages
from ppdsl.schedule.csv_messages import with_messages
from ppdsl.schedule.table import Schedule
from ppdsl.source import Span

__all__ = ["from_rows", "parse_csv", "to_csv"]

_HELP = "write stage, kind (F, B, I or W) and micro-batch, as in 2F0"


def from_rows(rows: Iterable[Iterable[Action | str]], *, name: str = "own order") -> Schedule:
    """Return a schedule of the given order; the rank of a stage is the row it stands in.

    Whether the order obeys the laws is not looked at here: `verify_schedule` does that, against a graph.

    Args:
        rows: For each rank its actions, as actions or as text.
        name: What the schedule is called in reports.

    Raises:
        ScheduleError: A text is no action, a stage stands on two ranks, or a stage number is left out.

    >>> print(from_rows([["0F0", "0B0"], ["1F0", "1I0", "1W0"]]))
    rank 0 | 0F0 0B0
    rank 1 | 1F0 1I0 1W0
    """
    findings: list[Diagnostic] = []
    parsed: list[tuple[Action, ...]] = []
    for rank, row in enumerate(rows):
        actions = []
        for step, cell in enumerate(row):
            try:
                actions.append(parse_action(cell) if isinstance(cell, str) else cell)
            except ValueError:
                message = f"Rank {rank} has {cell!r} at step {step}, which is no action."
                findings.append(Diagnostic("not-an-action", message, help=_HELP))
        parsed.append(tuple(actions))
    return _schedule(parsed, name, findings)


def parse_csv(text: str, *, name: str = "schedule.csv") -> Schedule:
    r"""Return the schedule that a CSV text describes: line i is rank i, one action in each cell, empty cells are idle.

    Both forms of torch.distributed.pipelining are read. The whole cell has to match: torch reads `1F0junk` as `1F0`.
    Two actions that run together, `(0F1;3B0)OVERLAP_F_B`, become neighbours of the row and an entry of `overlaps`.
    Sends and receives are checked against the computations of a chain of stages and then left out, as plans work out
    their own messages; `UNSHARD`, `RESHARD` and `REDUCE_GRAD` concern how parameters are stored and are left out too.

    Args:
        text: The content of the file.
        name: The file's path; names the schedule and the places of findings.

    Raises:
        ScheduleError: A cell is no action, a stage stands on two ranks, a stage number is left out, or a message has
            no counterpart or stands on the wrong side of its computation.

    >>> print(parse_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    >>> print(parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"))
    rank 0 | 0F0 0B0
    rank 1 | 1F0 1B0
    """
    findings: list[Diagnostic] = []
    rows: list[tuple[Action, ...]] = []
    overlaps: list[tuple[int, ...]] = []
    placed: list[list[Placed]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        actions: list[Action] = []
        together: list[int] = []
        cells: list[Placed] = []
        column = 1
        for raw in line.split(","):
            if written := raw.strip():
                start = column + len(raw) - len(raw.lstrip())
                span = Span(name, number, start, number, start + len(written))
                cell = parse_cell(written)
                if cell is None:
                    findings.append(_bad_cell(span, written, line))
                else:
                    cells.append(Placed(cell, span, line))
                    if isinstance(cell, tuple):
                        together += [len(actions)] if len(cell) > 1 else []
                        actions += cell
            column += len(raw) + 1
        rows.append(tuple(actions))
        overlaps.append(tuple(together))
        placed.append(cells)
    schedule = _schedule(rows, name, findings)
    messages = check_messages(placed, schedule.placement)
    if messages:
        raise ScheduleError(*messages)
    return replace(schedule, overlaps=tuple(overlaps)) if any(overlaps) else schedule


def to_csv(schedule: Schedule, *, communications: bool = False) -> str:
    """Return a schedule as CSV text that `parse_csv` and torch read back.

    Args:
        schedule: Any schedule; its overlaps are written as torch's `OVERLAP_F_B` cells.
        communications: Whether to add what torch adds to run it: messages between the stages of a chain, and when
            parameters are gathered, released and reduced.

    Raises:
        ScheduleError: With `communications`, ranks wait for each other.

    >>> print(to_csv(from_rows([["0F0", "0B0"], ["1F0", "1B0"]])), end="")
    0F0,0B0
    1F0,1B0
    """
    rows = [joined(row, pairs) for row, pairs in zip_longest(schedule.rows, schedule.overlaps, fillvalue=())]
    if communications:
        return "".join(",".join(row) + "\n" for row in with_messages(rows, schedule.placement, schedule.microbatches))
    return "".join(",".join(map(cell_text, row)) + "\n" for row in rows)


def _bad_cell(span: Span, cell: str, text: str) -> Diagnostic:
    message = f"A cell of a schedule is one action. Found {cell!r}."
    return cell_finding("not-an-action", message, why_not(cell), span, text)


def _schedule(rows: Sequence[tuple[Action, ...]], name: str, findings: list[Diagnostic]) -> Schedule:
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            other = rank_of.setdefault(action.stage, rank)
            if other != rank:
                message = f"Stage {action.stage} stands on ranks {other} and {rank}; {action} is on rank {rank}."
                help_text = f"move all actions of stage {action.stage} to one rank"
                findings.append(Diagnostic("stage-on-two-ranks", message, help=help_text))
                break
    count = max(rank_of, default=-1) + 1
    missing = [stage for stage in range(count) if stage not in rank_of]
    # A cell that could not be read may be the one that is missed.
    if missing and not findings:
        left_out = f"stage {missing[0]}"
        if len(missing) > 1:
            left_out = f"stages {', '.join(map(str, missing[:-1]))} and {missing[-1]}"
        message = f"The order has stage {count - 1}, but no action of {left_out}."
        findings.append(Diagnostic("missing-stage", message, help="number the stages from 0 without gaps"))
    if not count and not findings:
        findings.append(Diagnostic("empty-schedule", "The order has no action.", help="write actions such as 0F0"))
    if findings:
        raise ScheduleError(*findings)
    actions = [action for row in rows for action in row]
    return Schedule(
        name=name,
        rows=tuple(rows),
        placement=tuple(rank_of[stage] for stage in range(count)),
        microbatches=max(action.microbatch for action in actions) + 1,
        forward_only=all(action.kind is ActionKind.FORWARD for action in actions),
    )
