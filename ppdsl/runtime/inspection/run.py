"""What `ppdsl doctor` asks of a machine: `python -m ppdsl.runtime.inspection.run cpu` says a JSON line for each check.

It runs in a process that ppdsl ends when it takes too long, so a check may hang.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = ["Check", "Status", "inspect"]


class Status(StrEnum):
    """How a check came out: only a failure stops a pipeline."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: How it came out.
        found: What was found, in a few words.
        remedy: What to type when it is not fine, or "".
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_json(self) -> str:
        """Return it as one JSON object on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Check:
        """Return what `to_json` wrote."""
        parts = json.loads(text)
        return cls(parts["name"], Status(parts["status"]), parts["found"], parts["remedy"])


def inspect(device: str) -> Iterator[Check]:
    """Yield the checks of a kind of device, each when it is done.

    Args:
        device: `cpu`, `cuda` or `xla`.
    """
    checks: Callable[[], Iterator[Check]] = importlib.import_module(f"ppdsl.runtime.inspection.{device}").checks
    yield from checks()


def _main(device: str) -> None:
    # What torch or a driver prints goes to the standard error; the standard output is ours.
    ours = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for check in inspect(device):
        ours.write(check.to_json() + "\n")
        ours.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
