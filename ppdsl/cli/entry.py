"""The command `ppdsl`: arguments in, exit code out."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.diagnostics import Diagnostic, PpdslError, RunError

__all__ = ["COMMANDS", "Command", "build_parser", "main"]

_EPILOG = """\
examples:
  ppdsl demo
  ppdsl timeline --schedule 1f1b --ranks 4 --microbatches 8
  ppdsl graph --model examples/02_unet.py:make
  ppdsl check llama.ppspec -D ranks=8
  ppdsl verify schedule.csv
  ppdsl run --nproc 4 train.py

exit codes: 0 fine, 1 findings, 2 wrong use, 3 a run failed
"""


class _Runner(Protocol):
    """A command's function."""

    def __call__(self, options: argparse.Namespace, output: Output) -> Exit:
        """Run the command."""
        ...


class _ArgumentAdder(Protocol):
    """A command's function `add_arguments`."""

    def __call__(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to its parser."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        name: What is typed.
        help: A line of `ppdsl --help`.
        module: Has the function `add_arguments`, and the one that runs. It is imported when the command is used and
            not before, so that none waits for what another needs (torch, a solver).
        function: Name of the function that runs.
    """

    name: str
    help: str
    module: str
    function: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to its parser."""
        add: _ArgumentAdder = import_module(self.module).add_arguments
        add(parser)

    def run(self, options: argparse.Namespace, output: Output) -> Exit:
        """Run the command."""
        function: _Runner = getattr(import_module(self.module), self.function)
        return function(options, output)


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "train a small model with skip connections in this process, and draw it",
        "ppdsl.cli.demonstration",
        "run_demo",
    ),
    Command("graph", "draw the stages of a model and what goes between them", "ppdsl.cli.graphs", "run_graph"),
    Command("timeline", "draw when each rank runs what, predicted and measured", "ppdsl.cli.timelines", "run_timeline"),
    Command("check", "find what is wrong with a .ppspec, alone or against its model", "ppdsl.cli.specs", "run_check"),
    Command("export", "write the marks of a model as a .ppspec", "ppdsl.cli.export", "run_export"),
    Command("profile", "measure the modules of a model one by one", "ppdsl.cli.profiling", "run_profile"),
    Command("fmt", "write a .ppspec in canonical form", "ppdsl.cli.formatting", "run_format"),
    Command("verify", "prove a schedule, or show what is wrong with it", "ppdsl.cli.schedules", "run_verify"),
    Command("doctor", "look at this machine: versions, devices, what moves tensors", "ppdsl.cli.doctor", "run_doctor"),
    Command("run", "start a script on several processes of this machine (torchrun)", "ppdsl.cli.launch", "run_script"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None: those of the process.

    Returns:
        0 fine, 1 findings, 2 wrong use, 3 a run failed.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    wanted = next((word for word in given if not word.startswith("-")), "")  # no option before it takes a value
    try:
        options = build_parser(wanted).parse_args(given)
    except SystemExit as leaving:  # argparse has written its message; --help and --version leave with 0
        return int(leaving.code or 0)
    output = Output(json=getattr(options, "format", "") == "json", columns=getattr(options, "width", None))
    command = next(command for command in COMMANDS if command.name == options.command)
    try:
        return int(command.run(options, output))
    except PpdslError as error:
        output.report(error.diagnostics)
        return int(_exit_code(error))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.FINE)
    except KeyboardInterrupt:
        output.report([Diagnostic("interrupted", "Interrupted.")])
        return 130
    except Exception:  # a fault of ours or of the user's model: its traceback is what helps
        traceback.print_exc()
        return int(Exit.RUN_FAILED)


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Args:
        wanted: The command whose options are needed; None: those of all.
    """
    from ppdsl import __version__

    parser = argparse.ArgumentParser(
        prog="ppdsl",
        description="Pipeline parallelism for ordinary PyTorch models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ppdsl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help)
        if wanted is None or command.name == wanted:
            command.add_arguments(own)
    return parser


def _exit_code(error: PpdslError) -> Exit:
    if isinstance(error, WrongUseError):
        return Exit.WRONG_USE
    return Exit.RUN_FAILED if isinstance(error, RunError) else Exit.FINDINGS
