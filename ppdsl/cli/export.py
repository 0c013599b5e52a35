"""`ppdsl export`: the marks of a model as a spec."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ppdsl.cli.arguments import add_model
from ppdsl.cli.models import load_model
from ppdsl.cli.output import Exit, Output
from ppdsl.spec.format import format_spec
from ppdsl.spec.load import load_spec_text

__all__ = ["add_arguments", "run_export"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_model(parser, required=True)
    parser.add_argument("-o", "--output", metavar="OUT.ppspec", help="file to write; without it the spec is shown")


def run_export(options: Namespace, output: Output) -> Exit:
    """Write a spec under which the model, without its marks, has the graph that they give it."""
    with output.busy("recording the model"):
        from ppdsl.recording.exporting import export_marks  # loads torch

        call = load_model(options.model)
        text = export_marks(
            call.model, call.args, dict(call.kwargs), loss=call.loss, targets=call.targets, load=load_spec_text
        )  # fmt: skip
    text = format_spec(text)
    if options.output is None:
        output.write(text)
    else:
        Path(options.output).write_text(text, encoding="utf-8")
    return Exit.FINE
