"""A pipeline in one process beside the plain loop over its micro-batches; recorded stages beside the modules.

us/action: CPU microseconds that a step takes beyond the plain loop, for each forward and each backward.
program/modules: CPU of forward and backward of the recorded stages over that of the modules they were recorded from.

`python tests/benchmarks/bench_inprocess.py`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ppdsl as pp
from tests.benchmarks.workloads import WORKLOADS, Chain, Workload

__all__ = ["main"]

_STAGES = 4
_MICROBATCHES = 8
_ROUNDS = {"tiny": 50, "gpt": 4, "mlp16": 30, "unet": 12, "experts": 6}
_SCHEDULES = ("1f1b", "zero_bubble")


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title=f"one process, {_STAGES} stages, {_MICROBATCHES} micro-batches, CPU time")
    for name in ("workload", "schedule", "step/loop", "us/action", "program/modules"):
        table.add_column(name, justify="left" if name in ("workload", "schedule") else "right")
    for name, rounds in _ROUNDS.items():
        work = WORKLOADS[name]
        stages = programs_over_modules(work, rounds) if name in ("tiny", "gpt", "mlp16") else None
        for schedule in _SCHEDULES:
            ratio, extra = step_over_loop(work, schedule, rounds)
            table.add_row(name, schedule, f"{ratio:.3f}", f"{extra:.0f}", f"{stages:.3f}" if stages else "")
            stages = None
    Console(width=100).print(table)
    return 0


def step_over_loop(work: Workload, schedule: str, rounds: int) -> tuple[float, float]:
    """Return the CPU of a step over that of the plain loop, and the microseconds of an action beyond it."""
    model, plain = work.model(_STAGES), work.model(_STAGES)
    x, y = work.data(_MICROBATCHES)
    first, target = work.data(1)
    pipe = pp.pipeline(
        model, (first,), targets=target, loss=work.loss, schedule=schedule, microbatches=_MICROBATCHES,
        devices=None if work.device.type == "cpu" else work.device,
    )  # fmt: skip
    pieces = list(zip(x.chunk(_MICROBATCHES), y.chunk(_MICROBATCHES), strict=True))

    def loop() -> None:
        for piece, wanted in pieces:
            (work.loss(plain(piece), wanted) / _MICROBATCHES).backward()

    def step() -> None:
        pipe.step(x, targets=y)

    step()
    loop()
    for (name, got), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if got.grad is None or wanted.grad is None or not torch.allclose(got.grad, wanted.grad, rtol=1e-4, atol=1e-6):
            raise SystemExit(f"wrong gradient of {name} in {work.name}")
    ratios, extra = [], []
    for _ in range(rounds):
        one, two = seconds(loop), seconds(step)
        ratios.append(two / one)
        extra.append((two - one) / (2 * _STAGES * _MICROBATCHES) * 1e6)
    return median(ratios), median(extra)


def programs_over_modules(work: Workload, rounds: int) -> float:
    """Return the CPU of forward and backward of all recorded stages over that of their modules, run by hand."""
    model = work.model(_STAGES)
    if not isinstance(model, Chain):
        raise SystemExit(f"{work.name} is no chain")
    x, y = work.data(1)
    from ppdsl.recording.record import record_call

    recording = record_call(model, (x,), {}, loss=work.loss, targets=(y,))
    parts = work.parts(model)

    def modules() -> None:
        value = x
        for part in parts:
            value = part.run(value)
        work.loss(value, y).backward()

    def programs() -> None:
        values: dict[int, Tensor] = {}
        loss = None
        for program in recording.programs:
            given = [(x, y)[s.index] if str(s.kind) == "input" else values[s.index] for s in program.sources]
            for result, tensor in zip(program.results, program(*given), strict=True):
                if result.edge is not None:
                    values[result.edge] = tensor
                loss = tensor if result.loss else loss
        if loss is not None:
            loss.backward()

    programs()
    modules()
    ratios = []
    for number in range(4 * rounds):
        pair: list[Callable[[], None]] = [modules, programs]
        taken = {run: seconds(run) for run in (pair if number % 2 else pair[::-1])}
        ratios.append(taken[programs] / taken[modules])
    return median(ratios)


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
