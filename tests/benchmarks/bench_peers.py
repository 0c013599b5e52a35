"""A step beside those of other tools: torchgpipe and fairscale in one process, DeepSpeed in two.

In one process: GPipe with two stages on the CPU, over the plain loop over the micro-batches. In two: 1F1B and a step of
SGD, over the computation alone. Models are cut by hand for all of them but ppdsl; `unet` and `experts` they run only
when every stage hands on what later ones need, or when they are written anew.

us/action: CPU microseconds beyond the plain loop, or beyond the computation alone, for each forward and each backward.

`python3 .ci/environment.py peers python tests/benchmarks/bench_peers.py`
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["main", "rows"]

ROOT = Path(__file__).resolve().parents[2]
RUNS = (
    ("torchgpipe", "tiny"), ("torchgpipe", "gpt"), ("fairscale", "tiny"), ("deepspeed", "tiny"), ("deepspeed", "gpt"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each row")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    found = rows(options.seconds)
    Console(width=150).print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def rows(seconds: float) -> list[dict[str, Any]]:
    """Return the rows of all peers that are installed, each measured by processes of its own.

    Raises:
        SystemExit: A number was wrong, or a process failed.
    """
    found = []
    for peer, workload in RUNS:
        if importlib.util.find_spec(peer) is None:
            print(f"{peer} is not installed here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command = [
                sys.executable, *(launcher if peer == "deepspeed" else []), "-m", "tests.benchmarks.peers",
                "--peer", peer, "--workload", workload, "--seconds", str(seconds), "--out", str(out),
            ]  # fmt: skip
            environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                raise SystemExit(f"{workload} under {peer} failed:\n{done.stdout}\n{done.stderr}")
            found.append({**json.loads(out.read_text(encoding="utf-8")), "version": version(peer)})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table: medians."""
    result = Table(title="ppdsl | the other, medians")
    for name in ("beside", "workload", "n", "step/plain", "CPU/plain", "us/action", "ppdsl:other", "CPU ppdsl:other"):
        result.add_column(name, justify="left" if name in ("beside", "workload") else "right")
    for row in found:
        both = [row["ours"], row["theirs"]]
        result.add_row(
            f"{row['peer']} {row['version']}", row["workload"], str(row["samples"]),
            " | ".join(f"{side['over_plain']:.2f}" for side in both),
            " | ".join(f"{side['cpu_over_plain']:.2f}" for side in both),
            " | ".join(f"{side['overhead_us']:.0f}" for side in both),
            f"{row['to_peer']:.2f}", f"{row['cpu_to_peer']:.2f}",
        )  # fmt: skip
    return result


if __name__ == "__main__":
    sys.exit(main())
