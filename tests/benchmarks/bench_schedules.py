"""Making a schedule ready to run: its order, its plan of sends and receives, and their proof; beside torch.

Both sides run in turns in one process, and nothing is executed. Times are medians of processor seconds, as neither side
waits for anything. `ppdsl` builds the order of all ranks, lowers it to messages and proves that the plan cannot hang;
torch's time is the constructor of its schedule class, which makes the order of all ranks and lowers it to sends and
receives, and proves nothing. For 1f1b torch's interleaved class is asked with one stage on each rank, as its plain one
lowers nothing. The largest sizes are not asked of torch.

`python tests/benchmarks/bench_schedules.py --json schedules.json`
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining import schedules as torch_schedules

from ppdsl.graph.shapes import chain_graph
from ppdsl.plan import MessagePlan, lower, verify_plan
from ppdsl.schedule import build_schedule

__all__ = ["CASES", "Case", "Row", "main", "measure", "prepare", "rows", "table_of"]

SIZES = ((4, 8), (8, 64), (32, 128), (64, 512))
ALONE = ((256, 2048),)
# When a case has taken as many seconds, it is not repeated again.
ENOUGH = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule that both sides know.

    Attributes:
        schedule: What ppdsl calls it.
        chunks: Stages on each rank.
        peer: torch's class.
    """

    schedule: str
    chunks: int
    peer: str

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Return a V for zbv, else a loop."""
        ring = tuple(range(ranks))
        return ring + ring[::-1] if self.schedule == "zbv" else ring * self.chunks


CASES = (
    Case("interleaved_1f1b", 2, "ScheduleInterleaved1F1B"),
    Case("1f1b", 1, "ScheduleInterleaved1F1B"),
    Case("zbv", 2, "ScheduleZBVZeroBubble"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for one schedule of one size; times are processor seconds, medians.

    Attributes:
        schedule: The schedule.
        ranks: Number of ranks.
        microbatches: Number of micro-batches.
        chunks: Stages on each rank.
        actions: Number of computations of all ranks.
        build: Seconds for the order.
        lower: Seconds for the plan.
        verify: Seconds for the proof.
        total: Seconds of all three.
        torch: Seconds of torch's constructor; None: it was not asked.
        repeats: How often each side was measured.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    actions: int
    build: float
    lower: float
    verify: float
    total: float
    torch: float | None
    repeats: int

    @property
    def ratio(self) -> float | None:
        """How many times as long torch takes."""
        return None if self.torch is None else self.torch / self.total


def rows(
    sizes: Sequence[tuple[int, int]] = SIZES,
    alone: Sequence[tuple[int, int]] = ALONE,
    *,
    cases: Sequence[Case] = CASES,
    repeats: int = 3,
) -> Iterator[Row]:
    """Yield what was measured, one row after the other.

    Args:
        sizes: Ranks and micro-batches that both sides are asked for.
        alone: Ranks and micro-batches that only ppdsl is asked for, once.
        cases: The schedules.
        repeats: How often each is measured at most.
    """
    for ranks, microbatches in sizes:
        for case in cases:
            yield measure(case, ranks, microbatches, repeats=repeats)
    for ranks, microbatches in alone:
        for case in cases:
            yield measure(case, ranks, microbatches, repeats=1, peer=False)


def measure(case: Case, ranks: int, microbatches: int, *, repeats: int, peer: bool = True) -> Row:
    """Return the medians of several turns."""
    ours: list[list[float]] = []
    theirs: list[float] = []
    while len(ours) < repeats and sum(map(sum, ours)) + sum(theirs) < ENOUGH:
        gc.collect()
        ours.append(prepare(case, ranks, microbatches)[1])
        if peer:
            gc.collect()
            theirs.append(torch_seconds(case, ranks, microbatches))
    build, lowered, verified = (statistics.median(part) for part in zip(*ours, strict=True))
    actions = ranks * case.chunks * microbatches * (3 if case.schedule == "zbv" else 2)
    whole = statistics.median(map(sum, ours))
    torch = statistics.median(theirs) if peer else None
    return Row(
        case.schedule, ranks, microbatches, case.chunks, actions, build, lowered, verified, whole, torch, len(ours)
    )


def prepare(case: Case, ranks: int, microbatches: int) -> tuple[MessagePlan, list[float]]:
    """Return a plan that is ready to run, and the processor seconds of build, lower and verify."""
    graph, placement = chain_graph(ranks * case.chunks), case.placement(ranks)
    times = [time.process_time()]
    schedule = build_schedule(case.schedule, graph, placement, microbatches)
    times.append(time.process_time())
    plan = lower(schedule, graph)
    times.append(time.process_time())
    if verify_plan(plan):
        raise RuntimeError("the plan breaks a law")
    times.append(time.process_time())
    return plan, [after - before for before, after in pairwise(times)]


def torch_seconds(case: Case, ranks: int, microbatches: int) -> float:
    """Return the processor seconds that torch needs to construct the schedule."""
    count = ranks * case.chunks
    indices = [0, count - 1] if case.schedule == "zbv" else range(0, count, ranks)
    stages = [_Stage(index, count, ranks) for index in indices]
    make: Callable[..., object] = getattr(torch_schedules, case.peer)
    start = time.process_time()
    made = make(stages, microbatches, loss_fn=lambda output, target: output)
    seconds = time.process_time() - start
    if not made.pipeline_order_with_comms:  # type: ignore[attr-defined]
        raise RuntimeError("torch did not lower its schedule")
    return seconds


class _Stage:
    """What torch's schedules ask a stage while they are constructed."""

    def __init__(self, index: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size, self.group = 0, ranks, None
        self.is_first, self.is_last, self.has_backward, self.submod = index == 0, index == count - 1, True, None


def table_of(found: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    heads = ("schedule", "chunks", "ranks x micro-batches", "actions", "build s", "lower s", "verify s", "all s")
    table = Table(*heads, "us per action", "torch s", "torch / all")
    for row in found:
        parts = (f"{seconds:.4f}" for seconds in (row.build, row.lower, row.verify, row.total))
        torchs = ("", "") if row.torch is None else (f"{row.torch:.4f}", f"{row.torch / row.total:.1f}")
        size = f"{row.ranks} x {row.microbatches}"
        pace = f"{row.total / row.actions * 1e6:.2f}"
        table.add_row(row.schedule, str(row.chunks), size, str(row.actions), *parts, pace, *torchs)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="ranks x micro-batches, with commas: 8x64,64x512")
    parser.add_argument("--alone", type=_sizes, default=ALONE, help="sizes that torch is not asked for")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    found = list(rows(options.sizes, options.alone, repeats=options.repeats))
    Console().print(table_of(found))
    if options.json:
        text = json.dumps([{**asdict(row), "ratio": row.ratio} for row in found], indent=2)
        options.json.write_text(text, encoding="utf-8")
    return 0


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (size.split("x") for size in text.split(",") if size)
    return tuple((int(ranks), int(microbatches)) for ranks, microbatches in pairs)


if __name__ == "__main__":
    sys.exit(main())
