"""`ppdsl fmt`: write specs in canonical form, or say which are not."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.cli.specs import standard_input
from ppdsl.diagnostics import Diagnostic, SpecError
from ppdsl.spec.format import format_spec
from ppdsl.spec.load import read_spec

__all__ = ["add_arguments", "run_format"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ppdsl fmt`."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="specs; `-` for the standard input")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when a file would change")


def run_format(options: argparse.Namespace, output: Output) -> Exit:
    """Write specs in canonical form; the standard input's to the standard output.

    Raises:
        WrongUseError: A file cannot be written.
    """
    worst = Exit.FINE
    for file in options.files:
        try:
            data = standard_input() if file == "-" else read_spec(Path(file))
            text = format_spec(data, "<stdin>" if file == "-" else file)
        except SpecError as error:
            output.report(error.diagnostics)
            worst = Exit.FINDINGS
            continue
        changed = text.encode() != data
        if options.check:
            if changed:
                message = f"{'The standard input' if file == '-' else file} is not in canonical form."
                output.report([Diagnostic("not-formatted", message, help=f"run `ppdsl fmt {file}`")])
                worst = Exit.FINDINGS
        elif file == "-":
            output.write(text)
        elif changed:
            try:
                _replace(Path(file), text)
            except OSError as error:
                message = f"{file} cannot be written: {(error.strerror or str(error)).lower()}."
                raise WrongUseError(Diagnostic("unwritable-file", message)) from None
            output.write(f"formatted {file}")
    return worst


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
