"""`ppdsl run`: start a script on several processes of this machine, through torchrun."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from ppdsl.cli.output import Exit, Output, WrongUseError
from ppdsl.diagnostics import Diagnostic

__all__ = ["launch_command", "run_script"]


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
