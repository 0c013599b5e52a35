"""Starts a worker as real processes under torchrun, with a limit on the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


def launch(processes: int, *arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the worker on that many processes; more than `seconds` is a failure of the test."""
    # A long interval between the launcher's looks: it would end the survivors before they have said what they saw.
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--monitor-interval", "3", str(WORKER), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def said(result: subprocess.CompletedProcess[str], rank: int) -> str:
    """Return what one rank printed between its marks."""
    lines = []
    for line in result.stdout.splitlines():
        _, mark, text = line.partition(f"<{rank}> ")
        if mark:
            lines.append(text)
    return "\n".join(lines)
