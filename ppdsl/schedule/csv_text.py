"""Users' own orders: rows of actions, and the compute-only CSV text of torch.distributed.pipelining."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence

from ppdsl.diagnostics import Diagnostic, Label, ScheduleError
from ppdsl.schedule.action import Action, ActionKind, parse_action
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

    Args:
        text: The content of the file.
        name: The file's path; names the schedule and the places of findings.

    Raises:
        ScheduleError: A cell is no action, a stage stands on two ranks, or a stage number is left out.

    >>> print(parse_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    """
    findings: list[Diagnostic] = []
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        actions = []
        column = 1
        for cell in line.split(","):
            if cell.strip():
                try:
                    actions.append(parse_action(cell))
                except ValueError:
                    start = column + len(cell) - len(cell.lstrip())
                    findings.append(_bad_cell(name, number, start, cell.strip(), line))
            column += len(cell) + 1
        rows.append(tuple(actions))
    return _schedule(rows, name, findings)


def to_csv(schedule: Schedule) -> str:
    """Return a schedule as CSV text that `parse_csv` and torch read back.

    >>> from ppdsl.schedule.table import Schedule
    >>> print(to_csv(from_rows([["0F0", "0B0"], ["1F0", "1B0"]])), end="")
    0F0,0B0
    1F0,1B0
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def _bad_cell(name: str, line: int, column: int, cell: str, text: str) -> Diagnostic:
    span = Span(name, line, column, line, column + len(cell))
    message = f"A cell of a schedule is one action. Found {cell!r}."
    help_text = _HELP
    if "OVERLAP" in cell:
        help_text = "write the overlapped actions in cells of their own; overlapping is the runtime's choice"
    # Text that is no file yet is not known to linecache, so its line is drawn here.
    excerpt = None
    if not linecache.getline(name, line):
        gutter = " " * len(str(line))
        carets = " " * (column - 1) + "^" * len(cell)
        excerpt = f"{gutter} |\n{line} | {text}\n{gutter} | {carets}"
    return Diagnostic("not-an-action", message, labels=(Label(span),), help=help_text, excerpt=excerpt)


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
