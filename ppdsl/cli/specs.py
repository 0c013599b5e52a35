"""`ppdsl check`: show all that is wrong with specs, by themselves or against their model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ppdsl.cli.arguments import add_model, add_parameters, add_width, parameters_of
from ppdsl.cli.output import Exit, Output
from ppdsl.diagnostics import Severity, SpecError
from ppdsl.spec.check import Checked
from ppdsl.spec.load import check_spec, check_text
from ppdsl.spec.partition import Partition
from ppdsl.spec.scan import MAX_BYTES
from ppdsl.units import counted

__all__ = ["add_arguments", "run_check", "standard_input"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ppdsl check`."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="specs; `-` for the standard input")
    add_parameters(parser)
    add_model(parser, required=False)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    add_width(parser)


def run_check(options: argparse.Namespace, output: Output) -> Exit:
    """Show all findings of specs."""
    overrides = parameters_of(options.parameters)
    worst = Exit.FINE
    for file in options.files:
        try:
            checked = _checked(file, overrides)
        except SpecError as error:
            output.report(error.diagnostics)
            worst = Exit.WRONG_USE  # no file, or none that can be read
            continue
        output.report(checked.diagnostics)
        if checked.partition is None:
            worst = max(worst, Exit.FINDINGS)
        elif options.model:
            from ppdsl.cli.spec_models import check_with_model  # records the model: loads torch

            worst = max(worst, check_with_model(checked.partition, options, output))
        elif output.json:
            output.write(json.dumps(_facts(checked.partition)))
        else:
            output.write(_summary(checked))
    return worst


def _checked(file: str, overrides: dict[str, int]) -> Checked:
    if file == "-":
        return check_text(standard_input(), "<stdin>", overrides, folder=Path.cwd())
    return check_spec(file, overrides)


def standard_input() -> bytes:
    """Return what the standard input holds, or so much of it that it is seen to be too long."""
    return sys.stdin.buffer.read(MAX_BYTES + 1)


def _summary(checked: Checked) -> str:
    partition = checked.partition
    if partition is None:
        return ""
    warnings = sum(found.severity is Severity.WARNING for found in checked.diagnostics)
    facts = [counted(len(_stages(partition)), "stage")]
    ranks = partition.settings.ranks
    facts += [] if ranks is None else [counted(ranks, "rank")]
    facts += (
        [] if partition.settings.microbatches is None else [counted(partition.settings.microbatches, "micro-batch")]
    )
    facts += [] if not warnings else [counted(warnings, "warning")]
    inside = ", ".join(facts)
    return f"{partition.file}: fine by itself ({inside}); --model holds it against a model"


def _stages(partition: Partition) -> list[int | str]:
    """Return the names of all stages, also of the one that a first cut makes when nothing is declared before it."""
    first = bool(partition.cuts) and partition.order[0] == partition.cuts[0].key
    return [*([0] if first else []), *partition.order]


def _facts(partition: Partition) -> dict[str, object]:
    return {
        "file": partition.file,
        "pipeline": partition.name,
        "stages": _stages(partition),
        "ranks": partition.settings.ranks,
        "microbatches": partition.settings.microbatches,
        "parameters": dict(partition.parameters),
    }
