"""How plans grow: seconds and memory by the number of computations, from 8 ranks x 64 micro-batches to 256 x 2048.

Each size is prepared in a process of its own: built, lowered and proved, then the steps of one rank are made, as a
process of that rank does, and the schedule is simulated. Memory is the most the process held, less what it held before.
What grows with the computations alone has the same numbers per action in every row.

`python tests/benchmarks/bench_plans.py`
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from ppdsl.simulation import simulate_schedule
from tests.benchmarks.bench_schedules import CASES, Case, prepare

__all__ = ["Growth", "grow", "main"]

SIZES = ((8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (256, 2048))


@dataclass(frozen=True, slots=True)
class Growth:
    """What one size takes; processor seconds, and bytes.

    Attributes:
        schedule: The schedule.
        ranks: Number of ranks.
        microbatches: Number of micro-batches.
        actions: Number of computations of all ranks.
        plan: Seconds to build, lower and verify.
        row: Seconds to make the steps of one rank.
        simulate: Seconds to simulate the schedule.
        memory: The most bytes that were held until the plan was verified.
    """

    schedule: str
    ranks: int
    microbatches: int
    actions: int
    plan: float
    row: float
    simulate: float
    memory: int


def grow(case: Case = CASES[0], sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[Growth]:
    """Yield what each size takes, each in a process of its own."""
    for ranks, microbatches in sizes:
        size = f"{case.schedule},{ranks},{microbatches}"
        done = subprocess.run([sys.executable, __file__, "--one", size], stdout=subprocess.PIPE, text=True, check=True)
        yield Growth(**json.loads(done.stdout))


def _one(case: Case, ranks: int, microbatches: int) -> Growth:
    before = _most()
    plan, seconds = prepare(case, ranks, microbatches)
    memory = _most() - before
    start = time.process_time()
    steps = plan.rows[ranks // 2]
    row = time.process_time() - start
    start = time.process_time()
    simulate_schedule(plan.schedule, plan.graph)
    simulated = time.process_time() - start
    if not steps:
        raise RuntimeError("a rank has nothing to do")
    actions = sum(map(len, plan.schedule.rows))
    return Growth(case.schedule, ranks, microbatches, actions, sum(seconds), row, simulated, memory)


def _most() -> int:
    """Return the most bytes the process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of all sizes, or one size as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=[case.schedule for case in CASES], default=CASES[0].schedule)
    parser.add_argument("--one", help="this size only, as JSON: schedule,ranks,micro-batches")
    options = parser.parse_args(arguments)
    known = {case.schedule: case for case in CASES}
    if options.one:
        name, ranks, microbatches = options.one.split(",")
        print(json.dumps(asdict(_one(known[name], int(ranks), int(microbatches)))))
        return 0
    table = Table(
        "schedule", "ranks x micro-batches", "actions", "plan s", "us per action", "one rank's steps s", "simulate s",
        "MiB", "bytes per action",
    )  # fmt: skip
    for found in grow(known[options.schedule]):
        table.add_row(
            found.schedule, f"{found.ranks} x {found.microbatches}", str(found.actions), f"{found.plan:.3f}",
            f"{found.plan / found.actions * 1e6:.2f}", f"{found.row:.4f}", f"{found.simulate:.3f}",
            f"{found.memory / 2**20:.0f}", f"{found.memory / found.actions:.0f}",
        )  # fmt: skip
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
