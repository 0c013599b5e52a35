"""Measures steps of one workload; run by torchrun, two or four processes with gloo.

Each sample runs a step of ppdsl, one of torch's same schedule and the computation alone, in turns that change from
sample to sample. Gradients are compared with the unsplit model's before any time counts: a wrong number ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ppdsl.simulation.costs import Costs, stage_costs
from ppdsl.simulation.fitting import fitted_costs
from ppdsl.simulation.simulator import simulate
from ppdsl.timeline import Timeline
from tests.benchmarks.contenders import TORCHS, Ours, Pure, Torchs, compare, gather, gradients_of
from tests.benchmarks.floors import floor, makespan
from tests.benchmarks.huggingface import HUGGING_FACE
from tests.benchmarks.workloads import WORKLOADS, Workload

__all__ = ["main"]

LATENCY = 100e-6
"""Seconds of a message between two processes of one machine."""

_ALL = WORKLOADS | HUGGING_FACE

Sample = tuple[float, float, float]
"""Start, end and CPU seconds of a call; the clock is the same for all processes of a machine."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the rows, as JSON, to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(_ALL), required=True)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
    parser.add_argument("--per-rank", type=int, default=2, help="stages of a rank, for families with several")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no sample of a schedule after its share")
    parser.add_argument("--device", default="cpu", help="`cuda`: the device of this process's local rank")
    parser.add_argument("--backend", default="gloo", help="of torch.distributed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = replace(_ALL[options.workload], device=_device(options.device))
    dist.init_process_group(options.backend, timeout=timedelta(seconds=120))
    share = options.seconds / len(options.schedules)
    rows = [
        measure(work, name, options.per_rank, options.microbatches, options.samples, share)
        for name in options.schedules
    ]
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    # Several processes share a device where there are fewer devices than processes.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def measure(
    work: Workload, schedule: str, per_rank: int, microbatches: int, samples: int, seconds: float
) -> dict[str, Any]:
    """Return one row: medians over the samples of a schedule, the same on every rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    each = 1 if schedule in ("gpipe", "1f1b") else 2 if schedule == "zbv" else per_rank
    stages = ranks * each if work.chain else 4
    ours = Ours(work, schedule, stages, microbatches, ranks)
    placement = ours.pipe.schedule.placement
    contenders: dict[str, Any] = {"ours": ours, "pure": Pure(work, stages, microbatches, placement, rank)}
    if work.chain and schedule in TORCHS:
        contenders["torch"] = Torchs(work, schedule, stages, microbatches, placement, rank)
    wanted = gradients_of(work, stages, microbatches)
    errors = {}
    for name, contender in contenders.items():
        contender.step()
        if name != "pure":
            errors[name] = compare(name, {key: p.grad for key, p in contender.parameters.items()}, wanted)
    peaks = {name: _peak(work, contender.step, contender) for name, contender in contenders.items() if name != "pure"}
    taken: dict[str, list[Sample]] = {name: [] for name in contenders}
    alone: list[dict[int, list[tuple[float, float]]]] = []
    steps = []
    began = time.monotonic()
    for number in range(samples):
        order = list(contenders) if number % 2 else list(contenders)[::-1]
        for name in order:
            _forget(contenders[name])
            dist.barrier()
            taken[name].append(_clock(contenders[name].step, work.settle))
        if number % 3 == 0:
            alone.append(_in_turn(contenders["pure"]))
            dist.barrier()
            ours.pipe.step(ours.batch[0], targets=ours.batch[1], timeline=True)
            steps.append(ours.pipe.timeline())
        if max(gather(time.monotonic() - began)) > seconds:
            break
    row = _row(ours, taken, alone, microbatches)
    row |= {
        "workload": work.name, "schedule": schedule, "ranks": ranks, "stages": stages, "samples": len(taken["ours"]),
        "errors": {name: max(gather(error)) for name, error in errors.items()},
        "peak_mib": {name: gather(peak) for name, peak in peaks.items()},
        "build_cpu_seconds": {n: max(gather(c.build_seconds)) for n, c in contenders.items() if n != "pure"},
        "predicted": _prediction(ours, [step for step in steps if step is not None]),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    ours.pipe.close()
    return row


# -------------------------------------------------------------------- one sample


def _clock(run: Callable[[], object], settle: Callable[[], object]) -> Sample:
    settle()
    cpu, start = time.process_time(), time.perf_counter()
    run()
    settle()
    return start, time.perf_counter(), time.process_time() - cpu


def _forget(contender: Any) -> None:
    for parameter in getattr(contender, "parameters", {}).values():
        parameter.grad = None


def _in_turn(pure: Pure) -> dict[int, list[tuple[float, float]]]:
    """Return the seconds of this rank's stages while the other ranks rest."""
    found: dict[int, list[tuple[float, float]]] = {}
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == dist.get_rank():
            found = pure.seconds()
    dist.barrier()
    return found


def _peak(work: Workload, step: Callable[[], object], contender: Any) -> float:
    """Return how many MiB the memory of this process, or of its device, grows in a step, at most."""
    _forget(contender)
    gc.collect()
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
        held = torch.cuda.memory_allocated(work.device)
        step()
        return float(torch.cuda.max_memory_allocated(work.device) - held) / 2**20
    with contextlib.suppress(OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return float("nan")
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


# -------------------------------------------------------------------- all samples


def _row(
    ours: Ours, taken: dict[str, list[Sample]], alone: list[dict[int, list[tuple[float, float]]]], microbatches: int
) -> dict[str, Any]:
    everybody = {name: list(zip(*gather(samples), strict=True)) for name, samples in taken.items()}
    wall = {
        name: [max(end for _, end, _ in sample) - min(start for start, _, _ in sample) for sample in samples]
        for name, samples in everybody.items()
    }
    cpu = {
        name: [sum(seconds for _, _, seconds in sample) for sample in samples] for name, samples in everybody.items()
    }
    schedule, graph = ours.pipe.schedule, ours.pipe.graph
    forward, backward = _stage_seconds(alone, len(graph.stages))
    costs = stage_costs(
        graph, dict(enumerate(forward)), latency=LATENCY, input_grad=dict(enumerate(b / 2 for b in backward)),
        weight_grad=dict(enumerate(b / 2 for b in backward)),
    )  # fmt: skip
    cores = os.cpu_count() or 1
    bubble = makespan(schedule, graph, costs, cores, LATENCY) / floor(schedule, costs, cores)
    actions = 2 * microbatches * len(graph.stages)
    result: dict[str, Any] = {"bubble": bubble, "step_seconds": median(wall["ours"])}
    for name in taken:
        if name == "pure":
            continue
        ratios = _ratios(wall[name], wall["pure"])
        overhead = [(a - b) / actions * 1e6 for a, b in zip(cpu[name], cpu["pure"], strict=True)]
        result[name] = {
            "over_pure": _quartiles(ratios),
            "over_bound": _quartiles([ratio / bubble for ratio in ratios]),
            "cpu_over_pure": _quartiles(_ratios(cpu[name], cpu["pure"])),
            "overhead_us": _quartiles(overhead),
        }
    if "torch" in taken:
        result["to_torch"] = _quartiles(_ratios(wall["ours"], wall["torch"]))
        result["cpu_to_torch"] = _quartiles(_ratios(cpu["ours"], cpu["torch"]))
    return result


def _stage_seconds(alone: list[dict[int, list[tuple[float, float]]]], stages: int) -> tuple[list[float], list[float]]:
    pairs: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
    for rank in gather(alone):
        for sample in rank:
            for stage, seconds in sample.items():
                pairs[stage] += seconds
    return [median(f for f, _ in row) for row in pairs], [median(b for _, b in row) for row in pairs]


def _prediction(ours: Ours, steps: Sequence[Timeline]) -> list[float] | None:
    """Return what the simulator says of a step with the costs of every other step, over the steps in between."""
    known, shown = [fitted_costs(step, ours.pipe.graph) for step in steps[::2]], steps[1::2]
    if not shown:
        return None
    predicted = simulate(ours.pipe, _typical(known)).makespan
    return _quartiles([predicted / step.makespan for step in shown])


def _typical(costs: Sequence[Costs]) -> Costs:
    """Return the medians of every number."""
    rows = [{field.name: getattr(one, field.name) for field in fields(one)} for one in costs]
    return Costs(**{name: tuple(median(row) for row in zip(*(r[name] for r in rows), strict=True)) for name in rows[0]})


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return lower quartile, median, upper quartile."""
    ordered = sorted(values)
    if len(ordered) < 4:
        return [ordered[0], median(ordered), ordered[-1]]
    quarter = len(ordered) // 4
    return [ordered[quarter], median(ordered), ordered[-1 - quarter]]


if __name__ == "__main__":
    main()
