"""Starts a worker as real processes under torchrun, with a limit on the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

Finished = subprocess.CompletedProcess[str]

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


def launch(processes: int, *arguments: str, seconds: float = 120.0, look: float = 0.1) -> Finished:
    """Run the worker on that many processes.

    Args:
        processes: How many.
        arguments: The scenarios.
        seconds: More is a failure of the test.
        look: Seconds between two looks of the launcher: when it sees that one process has died it ends the others, also
            before they have said what they saw.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--monitor-interval", str(look), str(WORKER), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def said(result: Finished, rank: int, scenario: str | None = None) -> str:
    """Return what one rank said, in one of the scenarios or altogether."""
    lines = []
    for line in result.stdout.splitlines():
        _, mark, text = line.partition(f"<{rank}> ")
        if mark:
            lines.append(text)
    text = "\n".join(lines)
    if scenario is None:
        return text
    _, found, rest = f"{text}\n".partition(f"# {scenario}\n")
    assert found, f"rank {rank} did not come to {scenario}:\n{text}\n{result.stderr}"
    return rest.partition("\n# ")[0].removesuffix("\n")
