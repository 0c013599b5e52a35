"""Large schedules: build, lower, verify and simulate, beside the time torch needs to construct the same schedule.

Both run in turns in one process; times are medians of processor seconds, as neither waits for anything. torch's time is
the constructor of its schedule class, which makes the order and lowers it to sends and receives; it verifies and
simulates nothing. The other table shows how time and memory grow with the number of actions.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from torch.distributed.pipelining import schedules

from ppdsl.graph.shapes import chain_graph
from ppdsl.plan import lower, verify_plan
from ppdsl.schedule import build_schedule
from ppdsl.simulation import simulate_schedule

REPEATS = 3
COMPARED = [
    # Schedule, stages on each rank, torch's class.
    ("1f1b", 1, "ScheduleInterleaved1F1B"),
    ("zbv", 2, "ScheduleZBVZeroBubble"),
    ("interleaved_1f1b", 2, "ScheduleInterleaved1F1B"),
    ("interleaved_1f1b", 8, "ScheduleInterleaved1F1B"),
]
SIZES = [(8, 64), (64, 512)]
GROWTH = [(8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (256, 2048)]


class Stage:
    """What torch's schedules ask a stage while they are constructed."""

    def __init__(self, index: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size, self.group = 0, ranks, None
        self.is_first, self.is_last, self.has_backward, self.submod = index == 0, index == count - 1, True, None


def placement_of(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return a V for zbv, else a loop."""
    if name == "zbv":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * chunks))


def steps(name: str, ranks: int, microbatches: int, chunks: int) -> list[float]:
    """Return the seconds of build, lower, verify and simulate."""
    graph, placement = chain_graph(ranks * chunks), placement_of(name, ranks, chunks)
    times = [time.process_time()]
    schedule = build_schedule(name, graph, placement, microbatches)
    times.append(time.process_time())
    plan = lower(schedule, graph)
    times.append(time.process_time())
    if verify_plan(plan):
        raise RuntimeError("the plan breaks a law")
    times.append(time.process_time())
    simulate_schedule(schedule, graph)
    times.append(time.process_time())
    return [after - before for before, after in pairwise(times)]


def torch_seconds(kind: str, ranks: int, microbatches: int, chunks: int) -> float:
    """Return the seconds that torch needs to construct the schedule."""
    indices = [0, 2 * ranks - 1] if "ZBV" in kind else [ranks * chunk for chunk in range(chunks)]
    stages = [Stage(index, ranks * chunks, ranks) for index in indices]
    start = time.process_time()
    made = getattr(schedules, kind)(stages, microbatches, loss_fn=lambda output, target: output)
    seconds = time.process_time() - start
    if not made.pipeline_order_with_comms:
        raise RuntimeError("torch did not lower its schedule")
    return seconds


def in_turns(*measures: Callable[[], object], repeats: int) -> list[list[object]]:
    """Return what each measure gave, run one after the other, several times."""
    found: list[list[object]] = [[] for _ in measures]
    for _ in range(repeats):
        for results, measure in zip(found, measures, strict=True):
            gc.collect()
            results.append(measure())
    return found


def compare() -> None:
    """Print the table against torch."""
    print(f"seconds, median of {REPEATS} in turns with torch's constructor")
    print("schedule          ranks  micro-batches  stages  build  lower  verify  simulate  all     torch   torch / all")
    for ranks, microbatches in SIZES:
        for name, chunks, kind in COMPARED:
            own, other = in_turns(
                lambda: steps(name, ranks, microbatches, chunks),  # noqa: B023 - used before the loop goes on
                lambda: torch_seconds(kind, ranks, microbatches, chunks),  # noqa: B023
                repeats=REPEATS,
            )
            parts = [statistics.median(part) for part in zip(*own, strict=True)]  # type: ignore[call-overload]
            whole = statistics.median(sum(times) for times in own)  # type: ignore[call-overload]
            theirs = statistics.median(other)  # type: ignore[type-var]
            text = "  ".join(f"{seconds:6.3f}" for seconds in (*parts, whole, theirs))
            print(
                f"{name:<17} {ranks:>5}  {microbatches:>13}  {ranks * chunks:>6}  {text}  {theirs / whole:6.1f}",
                flush=True,
            )


def grow() -> None:
    """Print how time and memory of 1f1b grow; memory is the largest the process has been, less what it was before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("1f1b, growth: seconds of build, lower, verify and simulate together")
    print("ranks  micro-batches  actions   seconds  us per action  MiB      bytes per action")
    for ranks, microbatches in GROWTH:
        actions = 2 * ranks * microbatches
        seconds = min(sum(steps("1f1b", ranks, microbatches, 1)) for _ in range(2))
        peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(
            f"{ranks:>5}  {microbatches:>13}  {actions:>8}  {seconds:7.3f}  {seconds / actions * 1e6:13.2f}  "
            f"{peak / 2**20:7.1f}  {peak / actions:16.0f}",
            flush=True,
        )


if __name__ == "__main__":
    grow()
    compare()
