"""`ppdsl doctor`: what this machine has for pipelines, what does not work, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.style import Style
from rich.text import Text

from ppdsl.cli.arguments import add_width, number_from_one
from ppdsl.cli.output import Exit, Output
from ppdsl.report.palette import AXIS, LABEL, TITLE
from ppdsl.runtime.inspection.bounded import ENDED, lines_of_module
from ppdsl.runtime.inspection.run import Check, Status
from ppdsl.units import counted

__all__ = ["add_arguments", "draw_checks", "examine", "run_doctor"]

_STYLES = {Status.OK: AXIS, Status.WARN: Style(color="yellow", bold=True), Status.FAIL: Style(color="red", bold=True)}
_TIMEOUT = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ppdsl doctor`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "xla"), help="what to look at (xla when PJRT_DEVICE is set, otherwise cpu)"
    )
    parser.add_argument(
        "--timeout", type=number_from_one, default=_TIMEOUT, metavar="SECONDS", help=f"for all checks ({_TIMEOUT})"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="for other programs")
    add_width(parser)


def run_doctor(options: argparse.Namespace, output: Output) -> Exit:
    """Examine the machine and write what was found."""
    device = options.device or _likely_device()
    with output.busy(f"looking at {device}"):
        checks = examine(device, options.timeout)
    failed = any(check.status == Status.FAIL for check in checks)
    if options.format == "json":
        output.write(
            json.dumps({"device": device, "ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2)
        )
    else:
        output.show(draw_checks(device, checks, width=output.width))
    return Exit.FINDINGS if failed else Exit.FINE


def examine(device: str, timeout: float) -> tuple[Check, ...]:
    """Return all checks; one that hangs or ends its process becomes a failure of its own.

    Args:
        device: `cpu`, `cuda` or `xla`.
        timeout: Seconds for all of them.
    """
    from ppdsl import __version__

    checks = [Check("ppdsl", Status.OK, f"{__version__} on Python {platform.python_version()}")]
    for line in lines_of_module("ppdsl.runtime.inspection.run", [device], timeout, quote=True):
        if not line.startswith(ENDED):
            checks.append(Check.from_json(line))
        elif why := line.removeprefix(ENDED):
            remedy = f"run `python -m ppdsl.runtime.inspection.run {device}` to see what is printed"
            checks.append(Check("examination", Status.FAIL, f"broke off after '{checks[-1].name}': {why}", remedy))
    return tuple(checks)


def draw_checks(device: str, checks: Sequence[Check], *, width: int) -> Text:
    """Return a line for each check, and below it what to do when it is not fine.

    Args:
        device: What was looked at.
        checks: In their order.
        width: Columns; what is longer goes on in the next line.

    >>> print(draw_checks("cpu", [Check("cores", Status.OK, "8"), Check("gloo", Status.FAIL, "none", "get it")],
    ...                   width=60).plain)
    ppdsl doctor: cpu
    ok    cores  8
    fail  gloo   none
                 help: get it
    1 failure, no warnings
    """
    names = max((len(check.name) for check in checks), default=0)
    indent = 6 + names + 2
    text = Text(f"ppdsl doctor: {device}\n", style=TITLE)
    for check in checks:
        text.append(f"{check.status.value:<6}", style=_STYLES[check.status])
        text.append(f"{check.name:<{names + 2}}", style=LABEL)
        text.append("\n".join(_wrapped(check.found, width, indent)) + "\n", style="")
        if check.remedy and check.status != Status.OK:
            text.append(" " * indent + "\n".join(_wrapped(f"help: {check.remedy}", width, indent)) + "\n", style="")
    text.append(_sum_of(checks))
    return text


def _wrapped(words: str, width: int, indent: int) -> Iterable[str]:
    room = max(width - indent, 20)
    lines = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [lines[0], *(" " * indent + line for line in lines[1:])]


def _sum_of(checks: Sequence[Check]) -> str:
    failures, warnings = (sum(check.status == status for check in checks) for status in (Status.FAIL, Status.WARN))
    parts = [counted(failures, "failure") if failures else "no failures"]
    parts.append(counted(warnings, "warning") if warnings else "no warnings")
    return ", ".join(parts)


def _likely_device() -> str:
    return "xla" if os.environ.get("PJRT_DEVICE") and importlib.util.find_spec("torch_xla") else "cpu"
