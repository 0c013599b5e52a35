"""The command line. Each command is the library's path cut short: record, schedule, prove, simulate, run, draw."""

from ppdsl.cli.entry import main

__all__ = ["main"]
