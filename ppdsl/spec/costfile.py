"""Measured times of modules as a file: what `ppdsl profile` writes and `split ... by file(...)` reads."""

from __future__ import annotations

import csv
import io
import linecache
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ppdsl.diagnostics import Diagnostic, Label, SpecError
from ppdsl.source import Span
from ppdsl.spec.partition import Balance, Partition

__all__ = ["ModuleCost", "costs_of_files", "parse_costs", "seconds_of", "write_costs"]

_HEADER = ("module", "forward", "backward")


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """Seconds of one micro-batch in one module, all of its calls together."""

    module: str
    forward: float
    backward: float


def write_costs(costs: Iterable[ModuleCost]) -> str:
    r"""Return a cost file.

    >>> write_costs([ModuleCost("h.0", 0.0012, 0.0025)])
    'module,forward,backward\nh.0,0.0012,0.0025\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADER)
    writer.writerows((cost.module, f"{cost.forward:.6g}", f"{cost.backward:.6g}") for cost in costs)
    return text.getvalue()


def parse_costs(text: str, *, name: str = "costs.csv") -> tuple[ModuleCost, ...]:
    r"""Return the costs that a file holds.

    Args:
        text: Its content.
        name: Its path, for the places of findings.

    Raises:
        SpecError: The header is another, a row has too few or too many cells, a time is no number from 0, or a module
            comes twice; all findings together.

    >>> parse_costs("module,forward,backward\nh.0,0.0012,0.0025\n")
    (ModuleCost(module='h.0', forward=0.0012, backward=0.0025),)
    """
    lines = text.removeprefix("\ufeff").splitlines()
    linecache.cache[name] = (len(text), None, [f"{line}\n" for line in lines], name)  # what findings show
    if not lines or tuple(cell.strip() for cell in lines[0].split(",")) != _HEADER:
        found = repr(lines[0]) if lines else "an empty file"
        message = f"A cost file begins with the line `{','.join(_HEADER)}`. Found {found}."
        span = Span(name, 1, 1, 1, 1 + len(lines[0]) if lines else 1)
        raise SpecError(Diagnostic("cost-header", message, (Label(span),), "write it with `ppdsl profile`"))
    findings: list[Diagnostic] = []
    costs: dict[str, tuple[ModuleCost, int]] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cost = _row(line, number, name, findings)
        if cost is None:
            continue
        if cost.module in costs:
            message = f"Module `{cost.module}` comes twice."
            places = (
                Label(_whole(name, number, line)),
                Label(_whole(name, costs[cost.module][1], lines[costs[cost.module][1] - 1]), "the first time"),
            )
            findings.append(Diagnostic("cost-twice", message, places, "keep one of the rows"))
        else:
            costs[cost.module] = (cost, number)
    if findings:
        raise SpecError(*findings)
    return tuple(cost for cost, _ in costs.values())


def seconds_of(costs: Iterable[ModuleCost]) -> dict[str, float]:
    """Return forward and backward together, by module."""
    return {cost.module: cost.forward + cost.backward for cost in costs}


def costs_of_files(partition: Partition) -> dict[str, float] | None:
    """Return the seconds that the cost files of a spec hold; None when it names none.

    Args:
        partition: The spec; its files lie relative to its folder.

    Raises:
        SpecError: A file cannot be read, or is no cost file.
    """
    found: dict[str, float] = {}
    splits = [split for split in partition.splits if split.balance is Balance.FILE and split.file is not None]
    for split in splits:
        path = Path(partition.file).parent / str(split.file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"The cost file {path} cannot be read: {error}."
            help_text = f"write it with `ppdsl profile --model ... -o {path}`"
            raise SpecError(Diagnostic("unreadable-file", message, (Label(split.span),), help_text)) from None
        found.update(seconds_of(parse_costs(text, name=str(path))))
    return found if splits else None


def _row(line: str, number: int, name: str, findings: list[Diagnostic]) -> ModuleCost | None:
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError):
        cells = []
    if len(cells) != len(_HEADER):
        message = f"A row of a cost file has 3 cells: module, forward, backward. Found {len(cells)}."
        help_text = "write one module, and two times in seconds"
        findings.append(Diagnostic("cost-row", message, (Label(_whole(name, number, line)),), help_text))
        return None
    times = [_seconds(cell) for cell in cells[1:]]
    column = len(line) - len(",".join(cells[1:]))
    for cell, seconds, header in zip(cells[1:], times, _HEADER[1:], strict=True):
        if seconds is None:
            message = f"The {header} time of `{cells[0].strip()}` is {cell.strip()!r}, which is no time in seconds."
            span = Span(name, number, column + 1, number, column + 1 + len(cell))
            findings.append(Diagnostic("cost-value", message, (Label(span),), "write a number from 0, such as 0.0012"))
        column += len(cell) + 1
    forward, backward = times
    return None if forward is None or backward is None else ModuleCost(cells[0].strip(), forward, backward)


def _seconds(cell: str) -> float | None:
    try:
        seconds = float(cell)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _whole(name: str, number: int, line: str) -> Span:
    return Span(name, number, 1, number, len(line) + 1)
