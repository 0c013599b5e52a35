"""A job whose processes are killed goes on from its last checkpoint, and ends as if nothing had happened."""

from __future__ import annotations

import json
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.launch import ENVIRONMENT, ROOT

EXAMPLE = ROOT / "examples" / "07_elastic.py"
WORKER = Path(__file__).with_name("elastic_worker.py")
STEPS = 6

pytestmark = [pytest.mark.distributed, pytest.mark.current]


def undisturbed() -> list[float]:
    """Train the plain model."""
    names = runpy.run_path(str(EXAMPLE))
    made = names["make"]()
    optimizer = torch.optim.AdamW(made["model"].parameters(), lr=1e-2)
    losses = []
    for x, y in names["batches"](STEPS, names["ROWS"] * names["MICROBATCHES"]):
        loss = made["loss"](made["model"](x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def torchrun(options: list[str], folder: Path, lives: str, **environment: str) -> subprocess.Popen[str]:
    # Without it torchrun gives the processes that it starts again the store with the dead ones' addresses.
    environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER), str(folder), str(STEPS), lives]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lives_of(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("life-*"))]


def losses_of(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "losses").read_text())
    return found


def test_a_job_that_torchrun_starts_again_after_kills_trains_as_if_nothing_had_happened(tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    job = torchrun(options, tmp_path, "1@2,0@4:5")
    said, _ = job.communicate(timeout=150)
    assert job.returncode == 0, said
    assert lives_of(tmp_path) == ["2 ranks"] * 3
    assert losses_of(tmp_path) == pytest.approx(undisturbed(), rel=1e-10, abs=0)


def test_a_job_that_loses_a_host_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    patience = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", "--rdzv-conf"]
    # Where hosts meet is a place that has to stay.
    jobs = [
        torchrun([*options, f"is_host=1,{patience}"], tmp_path, "host@3"),
        torchrun([*options, f"is_host=0,{patience}"], tmp_path, "host@3", DOOMED="yes"),
    ]
    try:
        ended = [job.communicate(timeout=150)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, -signal.SIGKILL], "\n".join(ended)
    assert lives_of(tmp_path) == ["2 ranks", "1 ranks"]
    assert losses_of(tmp_path) == pytest.approx(undisturbed(), rel=1e-10, abs=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
