"""Everything that the other benchmarks find on CPUs, on CUDA devices: equal gradients first, then ratios and memory.

In one process four stages share one device. Two processes share it with gloo, whose messages go through the host's
memory. With two devices or more, a process on each uses NCCL. `--device cpu` goes the same ways without a GPU.

step/loop: seconds of a step over those of the plain loop over the micro-batches, each until the device has done it.
us/action: CPU microseconds beyond the plain loop, for each forward and each backward, until all has been launched.
waits: whether a step waits for the device, as `torch.cuda.set_sync_debug_mode` sees it.

`python -m tests.benchmarks.gpu`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.bench_steps import run, table
from tests.benchmarks.contenders import Ours, compare
from tests.benchmarks.workloads import WORKLOADS, Workload

__all__ = ["main"]

_STAGES, _MICROBATCHES = 4, 8
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
_WORKLOADS = ("tiny", "gpt", "unet", "experts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the devices allow and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workloads", nargs="+", choices=_WORKLOADS, default=list(_WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="for each workload between processes")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind in one process")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        print("torch finds no CUDA device; --device cpu goes the same ways without one", file=sys.stderr)
        return 2
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # for the processes that are started below, too
    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if on_cuda else torch.device("cpu")
    console = Console(width=150)
    console.print(_machine(device))
    alone = [
        in_process(replace(WORKLOADS[name], device=device), schedule, options.rounds)
        for name in options.workloads
        for schedule in _SCHEDULES
    ]
    console.print(_table(alone))
    found: dict[str, Any] = {"machine": _machine(device), "in_process": alone}
    ways = [("gloo", 2)] + ([("cpu:gloo,cuda:nccl", min(4, torch.cuda.device_count()))] if on_cuda else [])
    for backend, ranks in ways:
        if ranks < 2:
            console.print("one device: NCCL between devices cannot be measured here")
            continue
        more = ("--device", options.device, "--backend", backend)
        rows = [row for name in options.workloads for row in run(name, ranks, 2, options.seconds, *more)]
        console.print(f"{ranks} processes, {backend}")
        console.print(table(rows))
        found[backend] = rows
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def in_process(work: Workload, schedule: str, rounds: int) -> dict[str, Any]:
    """Return one row: a step of four stages on one device beside the plain loop.

    Raises:
        SystemExit: A gradient is not the plain loop's.
    """
    ours = Ours(work, schedule, _STAGES, _MICROBATCHES, 2)
    plain = work.model(_STAGES)
    x, y = work.data(_MICROBATCHES)
    pieces = list(zip(x.chunk(_MICROBATCHES), y.chunk(_MICROBATCHES), strict=True))

    def loop() -> None:
        for piece, wanted in pieces:
            (work.loss(plain(piece), wanted) / _MICROBATCHES).backward()

    loop()
    ours.step()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    error = compare(schedule, {name: p.grad for name, p in ours.parameters.items()}, wanted)
    walls, cpus = [], []
    for number in range(rounds):
        ways = {"loop": loop, "step": ours.step}
        taken = {name: _clock(ways[name], work) for name in (ways if number % 2 else list(ways)[::-1])}
        walls.append(taken["step"][0] / taken["loop"][0])
        cpus.append((taken["step"][1] - taken["loop"][1]) / (2 * _STAGES * _MICROBATCHES) * 1e6)
    peaks = {name: _peak(way, work) for name, way in (("step", ours.step), ("loop", loop))}
    return {
        "workload": work.name, "schedule": schedule, "error": error, "step_over_loop": median(walls),
        "overhead_us": median(cpus), "waits": _waits(ours.step, work), "peak_mib": peaks,
    }  # fmt: skip


def _clock(run_once: Callable[[], None], work: Workload) -> tuple[float, float]:
    """Return the seconds until the device has done it, and the CPU seconds until it has been launched."""
    work.settle()
    cpu, start = time.process_time(), time.perf_counter()
    run_once()
    launched = time.process_time() - cpu
    work.settle()
    return time.perf_counter() - start, launched


def _waits(step: Callable[[], None], work: Workload) -> str:
    """Return what a step waits for, if it waits for the device."""
    if work.device.type != "cuda":
        return "-"
    try:
        with _syncs_are_errors():
            step()
    except Exception as error:  # the mode raises in whatever waits, which the runtime wraps in its own error
        return str(error).strip().splitlines()[0][:60]
    return "no"


@contextmanager
def _syncs_are_errors() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _peak(run_once: Callable[[], None], work: Workload) -> float:
    """Return how many MiB of the device a call needs at most, beyond what is there before it."""
    if work.device.type != "cuda":
        return float("nan")
    work.settle()
    torch.cuda.reset_peak_memory_stats(work.device)
    held = torch.cuda.memory_allocated(work.device)
    run_once()
    work.settle()
    return float(torch.cuda.max_memory_allocated(work.device) - held) / 2**20


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return f"no GPU: the same ways on the CPU; torch {torch.__version__}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}; torch {torch.__version__}, CUDA {torch.version.cuda}"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table(title=f"one process, one device, {_STAGES} stages, {_MICROBATCHES} micro-batches, medians")
    for name in ("workload", "schedule", "gradient off by", "step/loop", "us/action", "waits", "peak MiB step | loop"):
        result.add_column(name, justify="left" if name in ("workload", "schedule") else "right")
    for row in rows:
        result.add_row(
            row["workload"], row["schedule"], f"{row['error']:.0e}", f"{row['step_over_loop']:.3f}",
            f"{row['overhead_us']:.0f}", row["waits"], f"{row['peak_mib']['step']:.0f} | {row['peak_mib']['loop']:.0f}",
        )  # fmt: skip
    return result


if __name__ == "__main__":
    sys.exit(main())
