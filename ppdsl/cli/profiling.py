"""`ppdsl profile`: measure the modules of a model one by one, for `split ... by file(...)`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ppdsl.cli.arguments import add_model, add_width
from ppdsl.cli.models import load_model
from ppdsl.cli.output import Exit, Output
from ppdsl.report.tables import format_table
from ppdsl.spec.costfile import write_costs
from ppdsl.units import format_seconds

__all__ = ["add_arguments", "run_profile"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_model(parser, required=True)
    parser.add_argument("-o", "--output", metavar="COSTS.csv", help="file to write; without it a table is shown")
    parser.add_argument("--device", help="where to measure (default: cuda when there is one, else cpu)")
    add_width(parser)


def run_profile(options: Namespace, output: Output) -> Exit:
    """Measure each module and write its times."""
    with output.busy("measuring the modules"):
        from ppdsl.recording.profile import profile_call  # loads torch

        call = load_model(options.model)
        costs = profile_call(
            call.model, call.args, dict(call.kwargs), loss=call.loss, targets=call.targets, device=options.device
        )
    if options.output is not None:
        Path(options.output).write_text(write_costs(costs), encoding="utf-8")
        return Exit.FINE
    rows = [(cost.module, format_seconds(cost.forward), format_seconds(cost.backward)) for cost in costs]
    output.show(format_table(("module", "forward", "backward"), rows, align="<>>", width=output.width, elastic=0))
    return Exit.FINE
