"""Starts a worker as real processes under torchrun, with a limit on the time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

Finished = subprocess.CompletedProcess[str]

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def launch(processes: int, *arguments: str, seconds: float = 120.0, worker: Path = WORKER) -> Finished:
    """Run the worker on that many processes under torchrun; more than `seconds` is a failure of the test."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        str(worker), *arguments,
    ]  # fmt: skip
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False)


def launch_bare(processes: int, *arguments: str, seconds: float = 120.0, worker: Path = WORKER) -> list[str]:
    """Run the worker on that many processes that nothing looks after; return what each said.

    A launcher ends all processes when it sees that one has died, mostly before they have said what they saw.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    started = [
        subprocess.Popen(
            [sys.executable, str(worker), *arguments],
            env={**ENVIRONMENT, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    end = time.monotonic() + seconds
    try:
        texts = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [_lines_of(text, rank) for rank, text in enumerate(texts)]


def said(result: Finished, rank: int, scenario: str | None = None) -> str:
    """Return what one rank said, in one of the scenarios or altogether."""
    text = _lines_of(result.stdout, rank)
    if scenario is None:
        return text
    _, found, rest = f"{text}\n".partition(f"# {scenario}\n")
    assert found, f"rank {rank} did not come to {scenario}:\n{text}\n{result.stderr}"
    return rest.partition("\n# ")[0].removesuffix("\n")


def _lines_of(text: str, rank: int) -> str:
    found = (line.partition(f"<{rank}> ") for line in text.splitlines())
    return "\n".join(rest for _, mark, rest in found if mark)
