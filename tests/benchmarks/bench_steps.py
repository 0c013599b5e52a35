"""Steps under torchrun: ppdsl beside torch.distributed.pipelining and beside the computation alone, same processes.

pure: all ranks compute their own stages at once on inputs that are there, without messages.
bubble: simulated length of that schedule (measured stage times, 100 us a message, these cores) over its least.
step/bound: step over pure x bubble; 1.00 is a perfect runtime of that schedule.
us/action: CPU microseconds beyond pure, for each forward and each backward.
peak MiB: growth of the resident memory of the fullest process in a step.
Torch has stages cut by hand, as its traced ones are slower; `unet` and `experts` it cannot run unchanged.

`python tests/benchmarks/bench_steps.py --json steps.json`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["main", "predictions", "run", "table"]

ROOT = Path(__file__).resolve().parents[2]
_FOUR = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
_THREE = _FOUR[1:]
RUNS = (
    ("tiny", 2, 2, 45, _FOUR), ("gpt", 2, 2, 90, _FOUR), ("mlp16", 2, 8, 30, _FOUR), ("unet", 2, 2, 30, _FOUR),
    ("experts", 2, 2, 30, _FOUR), ("hf_gpt2", 2, 2, 20, _THREE), ("hf_llama", 2, 2, 20, _THREE),
    ("tiny", 4, 2, 35, _FOUR), ("gpt", 4, 2, 55, _FOUR),
)  # fmt: skip
"""Workload, processes, stages of a rank in families with several, seconds, and schedules."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", help="these only")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the time for each workload")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    rows = []
    for workload, ranks, per_rank, seconds, schedules in RUNS:
        if not options.workloads or workload in options.workloads:
            rows += run(workload, ranks, per_rank, seconds * options.scale, "--schedules", *schedules)
    console = Console(width=180)
    console.print(table(rows))
    console.print(predictions(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


def run(workload: str, ranks: int, per_rank: int, seconds: float, *more: str) -> list[dict[str, Any]]:
    """Return the rows of a workload, measured by processes of their own.

    Raises:
        SystemExit: A number was wrong, or a process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "-m", "tests.benchmarks.steps", "--workload", workload, "--per-rank", str(per_rank),
            "--seconds", str(seconds), "--samples", "60", "--out", str(out), *more,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300 + 5 * seconds, check=False)
        if done.returncode:
            raise SystemExit(f"{workload} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table: medians, and the middle half where it matters."""
    result = Table(title="ppdsl | torch, medians; in brackets the middle half")
    for name in ("workload", "ranks", "schedule", "stages", "n", "bubble"):
        result.add_column(name)
    for name in ("step/pure", "step/bound", "CPU/pure", "us/action", "ppdsl:torch", "CPU ppdsl:torch", "peak MiB"):
        result.add_column(name, justify="right")
    before = None
    for row in rows:
        place = (row["workload"], row["ranks"])
        if before not in (None, place):
            result.add_section()
        before = place
        result.add_row(
            row["workload"], str(row["ranks"]), row["schedule"], str(row["stages"]), str(row["samples"]),
            f"{row['bubble']:.2f}", _pair(row, "over_pure", 2), _pair(row, "over_bound", 2),
            _pair(row, "cpu_over_pure", 2), _pair(row, "overhead_us", 0), _spread(row.get("to_torch")),
            _spread(row.get("cpu_to_torch")), _peaks(row["peak_mib"]),
        )  # fmt: skip
    return result


def predictions(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of predicted over measured makespans."""
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    result = Table(title="makespan of a step that the simulator predicts from other steps, over the measured one")
    for name in ("workload", "ranks", *names):
        result.add_column(name)
    places = dict.fromkeys((row["workload"], row["ranks"]) for row in rows)
    for workload, ranks in places:
        found = {
            r["schedule"]: _spread(r["predicted"]) for r in rows if (r["workload"], r["ranks"]) == (workload, ranks)
        }
        result.add_row(workload, str(ranks), *(found.get(name, "") for name in names))
    return result


def _pair(row: Mapping[str, Any], key: str, digits: int) -> str:
    ours = f"{row['ours'][key][1]:.{digits}f}"
    return f"{ours} | {row['torch'][key][1]:.{digits}f}" if "torch" in row else ours


def _spread(quartiles: Sequence[float] | None) -> str:
    return "" if quartiles is None else f"{quartiles[1]:.2f} [{quartiles[0]:.2f}-{quartiles[2]:.2f}]"


def _peaks(peaks: Mapping[str, Sequence[float]]) -> str:
    return " | ".join(f"{max(peaks[name]):.0f}" for name in ("ours", "torch") if name in peaks)


if __name__ == "__main__":
    sys.exit(main())
