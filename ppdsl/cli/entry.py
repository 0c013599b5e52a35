"""The command `ppdsl`: arguments in, exit code out."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.diagnostics import Diagnostic, PpdslError, RunError

__all__ = ["build_parser", "main"]

_EPILOG = """\
examples:
  ppdsl demo
  ppdsl timeline --schedule 1f1b --ranks 4 --microbatches 8
  ppdsl graph --model examples/02_unet.py:make
  ppdsl verify schedule.csv
  ppdsl run --nproc 4 train.py

exit codes: 0 fine, 1 findings, 2 wrong use, 3 a run failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None: those of the process.

    Returns:
        0 fine, 1 findings, 2 wrong use, 3 a run failed.
    """
    parser = build_parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as leaving:  # argparse has written its message; --help and --version leave with 0
        return int(leaving.code or 0)
    output = Output(json=getattr(options, "format", "") == "json", columns=getattr(options, "width", None))
    try:
        return int(_command(options.command)(options, output))
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from ppdsl import __version__

    parser = argparse.ArgumentParser(
        prog="ppdsl",
        description="Pipeline parallelism for ordinary PyTorch models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ppdsl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_graph(commands)
    _add_timeline(commands)
    _add_verify(commands)
    _add_run(commands)
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no other name
Command: TypeAlias = Callable[[argparse.Namespace, Output], Exit]


def _command(name: str) -> Command:
    """Return a command's function; each is imported alone, so that `ppdsl timeline` does not wait for torch."""
    match name:
        case "demo":
            from ppdsl.cli.demonstration import run_demo

            return run_demo
        case "graph":
            from ppdsl.cli.graphs import run_graph

            return run_graph
        case "timeline":
            from ppdsl.cli.timelines import run_timeline

            return run_timeline
        case "verify":
            from ppdsl.cli.schedules import run_verify

            return run_verify
        case _:
            from ppdsl.cli.launch import run_script

            return run_script


def _exit_code(error: PpdslError) -> Exit:
    if isinstance(error, WrongUseError):
        return Exit.WRONG_USE
    return Exit.RUN_FAILED if isinstance(error, RunError) else Exit.FINDINGS


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser("demo", help="train a small model with skip connections in this process, and draw it")
    parser.add_argument("--steps", type=_positive, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--schedule", default="1f1b", help="schedule family or CSV file (default: 1f1b)")
    parser.add_argument("--microbatches", type=_positive, default=8, help="micro-batches in a step (default: 8)")
    _add_width(parser)


def _add_graph(commands: Commands) -> None:
    parser = commands.add_parser("graph", help="draw the stages of a model and what goes between them")
    _add_model(parser, required=True)
    parser.add_argument(
        "--view", choices=("both", "tree", "dag", "table"), default="both", help="what to draw (default: both)"
    )
    parser.add_argument(
        "--format", choices=("text", "mermaid", "dot", "json", "svg"), default="text", help="default: text"
    )
    _add_width(parser)


def _add_timeline(commands: Commands) -> None:
    parser = commands.add_parser("timeline", help="draw when each rank runs what, predicted and measured")
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="family or CSV file (default: 1f1b)")
    parser.add_argument("--ranks", type=_positive, help="default: one for each stage, or 4 without a model")
    parser.add_argument("--stages", type=_positive, help="of a chain without a model (default: one a rank)")
    parser.add_argument("--microbatches", type=_positive, default=8, help="in a step (default: 8)")
    parser.add_argument("--backward", type=_time, metavar="X", help="time of B, in forwards (default: 2)")
    parser.add_argument("--latency", type=_time, metavar="X", help="time of a message (default: 0)")
    parser.add_argument("--cost", metavar="F=1,I=1,W=1,latency=0", help="times of all kinds at once")
    parser.add_argument("--compare", metavar="NAMES", help="a table of several schedules, or `all`")
    _add_model(parser, required=False)
    parser.add_argument("--run", action="store_true", help="run the model in this process, measured beside predicted")
    parser.add_argument("--trace", metavar="OUT.json", help="also write a trace for Perfetto and Chrome")
    parser.add_argument("--format", choices=("text", "json", "csv", "svg"), default="text", help="default: text")
    _add_width(parser)


def _add_verify(commands: Commands) -> None:
    parser = commands.add_parser("verify", help="prove a schedule, or show what is wrong with it")
    parser.add_argument("file", metavar="FILE.csv", help="a line for each rank, an action such as 2F0 in each cell")
    _add_model(parser, required=False)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    _add_width(parser)


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser("run", help="start a script on several processes of this machine (torchrun)")
    parser.add_argument("--nproc", type=_positive, required=True, help="number of processes")
    parser.add_argument("script", help="Python script that every process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def _add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--model",
        required=required,
        metavar="MODULE:FUNCTION",
        help="function that returns (model, args) or (model, args, kwargs), in a module or a .py file",
    )


def _add_width(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=_width, help="columns of drawings (default: the terminal's)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _width(text: str) -> int:
    number = int(text)
    if number < 40:
        raise argparse.ArgumentTypeError(f"{text} is too narrow to draw in; use at least 40")
    return number


def _time(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return number
