"""Building schedules of many ranks and micro-batches, beside torch's own construction of the same orders.

Both make the orders of all ranks and nothing is run: `ppdsl` the rows of a schedule; torch its schedule object on one
rank, which works out all ranks' orders and lowers them to sends and receives. They take turns in one process, so that a
noisy machine troubles both alike.

`python tests/benchmarks/bench_schedules.py --json schedules.json`
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining import schedules as torch_schedules

from ppdsl.graph.shapes import chain_graph
from ppdsl.schedule import build_schedule

__all__ = ["main"]

CASES = (
    ("1f1b", "ScheduleInterleaved1F1B", 1),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", 8),
    ("zbv", "ScheduleZBVZeroBubble", 2),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8x64,16x128,64x512", help="ranks x micro-batches, with commas")
    parser.add_argument("--alone", default="256x2048", help="sizes that torch is not asked for")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    found = []
    for size in [*options.sizes.split(","), *filter(None, options.alone.split(","))]:
        p, m = map(int, size.split("x"))
        for name, cls, v in CASES:
            if size in options.alone.split(",") and v == 8:
                continue
            ways: dict[str, Callable[[], object]] = {"ppdsl": lambda n=name, p=p, m=m, v=v: _ours(n, p, m, v)}  # type: ignore[misc]
            if size in options.sizes.split(","):
                ways["torch"] = lambda c=cls, p=p, m=m, v=v: _torchs(c, p, m, v)  # type: ignore[misc]
            found.append(
                {"schedule": name, "size": size, "actions": _actions(name, p, m, v), **_timed(ways, options.repeats)}
            )
    table = Table("schedule", "ranks x micro-batches", "actions", "ppdsl s", "torch s", "ratio")
    for row in found:
        ratio = f"{row['torch'] / row['ppdsl']:.0f}" if "torch" in row else ""
        torchs = f"{row['torch']:.3f}" if "torch" in row else ""
        table.add_row(row["schedule"], row["size"], str(row["actions"]), f"{row['ppdsl']:.3f}", torchs, ratio)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


def _timed(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            gc.collect()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _ours(name: str, p: int, m: int, v: int) -> object:
    ring = tuple(range(p))
    return build_schedule(name, chain_graph(p * v), ring + ring[::-1] if name == "zbv" else ring * v, m)


def _torchs(name: str, p: int, m: int, v: int) -> object:
    shared = {"group_size": p, "group_rank": 0, "num_stages": p * v, "stage_index": 0, "submod": None}
    stages = [SimpleNamespace(**shared, is_first=True, is_last=False) for _ in range(v)]
    return getattr(torch_schedules, name)(stages, m)


def _actions(name: str, p: int, m: int, v: int) -> int:
    return p * v * m * (3 if name == "zbv" else 2)


if __name__ == "__main__":
    sys.exit(main())
