"""`ppdsl run`: start a script on several processes of this machine, through torchrun."""

from __future__ import annotations

import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path

from ppdsl.cli.arguments import number_from_one
from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.diagnostics import Diagnostic

__all__ = ["add_arguments", "launch_command", "run_script"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `ppdsl run`."""
    parser.add_argument("--nproc", type=number_from_one, required=True, help="number of processes")
    parser.add_argument("script", help="Python script that every process runs")
    parser.add_argument("arguments", nargs=REMAINDER, help="of the script")


def run_script(options: Namespace, output: Output) -> Exit:
    """Run a script and wait for it.

    Raises:
        WrongUseError: There is no such script.
    """
    if not Path(options.script).is_file():
        message = f"There is no file {options.script}."
        help_text = "give the script after the options: ppdsl run --nproc 4 train.py --epochs 2"
        raise WrongUseError(Diagnostic("no-such-file", message, help=help_text))
    status = subprocess.run(launch_command(options.nproc, options.script, options.arguments), check=False).returncode
    if status == 0:
        return Exit.FINE
    message = f"{options.script} failed on {options.nproc} processes (torchrun's exit status is {status})."
    output.report([Diagnostic("run-failed", message, help="the first error above is the cause")])
    return Exit.RUN_FAILED


def launch_command(processes: int, script: str, arguments: list[str]) -> list[str]:
    """Return the command that starts a script.

    >>> launch_command(2, "train.py", ["--epochs", "1"])[1:]
    ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', 'train.py', '--epochs', '1']
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, script, *arguments]
