"""XLA devices of one process: how far the driver runs ahead of them, what an action costs it, and what a step takes.

launch/step: time until the driver has started everything, over the time until the devices have ended. 1: it waits.
us/action: CPU microseconds of the driver's thread for each forward and each backward, transfers with them, without the
calls of torch_xla that another thread makes for it.
step/plain: time of a step over that of the same micro-batches without a pipeline on one XLA device.
On CPU devices all compute on the same cores, so step/plain shows what the pipeline costs, not what devices gain.

`PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 XLA_THREAD_POOL_SIZE=16 python tests/benchmarks/bench_xla.py`
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import ppdsl as pp
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.devices import XlaWorld
from ppdsl.runtime.xla.start import start

__all__ = ["Row", "main", "rows"]

_WIDTH, _ROWS, _MICROBATCHES, _DEVICES = 512, 1024, 8, 4
_ROUNDS = 3
_CASES = (
    ("gpipe", 4, "permute"), ("gpipe", 4, "host"), ("1f1b", 4, "permute"), ("1f1b", 4, "host"),
    ("interleaved_1f1b", 8, "permute"), ("interleaved_1f1b", 8, "host"), ("zbv", 8, "permute"), ("zbv", 8, "host"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What was seen of one schedule and transport; medians.

    Attributes:
        schedule: Its name.
        transport: What moves tensors.
        launch: Seconds until the driver has started a step.
        step: Seconds until the devices have ended it.
        cpu: Microseconds of the driver's thread for an action.
        plain: Seconds of the same work without a pipeline on one XLA device.
    """

    schedule: str
    transport: str
    launch: float
    step: float
    cpu: float
    plain: float


class _Chain(nn.Module):
    """Eight equal layers in four or eight stages."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            with pp.stage(number * self.stages // 8):
                x = layer(x).tanh()
        return x


def rows() -> list[Row]:
    """Measure; the process must not have run a backward, and has four XLA devices.

    Raises:
        SystemExit: There are fewer devices, or numbers are wrong.
    """
    if start() < _DEVICES:
        raise SystemExit(f"{_DEVICES} XLA devices are needed")
    alone, loss = _plain()
    return [_measured(*case, plain=alone, expected=loss) for case in _CASES]


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    x, y = (torch.randn(_ROWS * _MICROBATCHES, _WIDTH, generator=chance) for _ in range(2))
    return x, y


def _model(stages: int) -> _Chain:
    torch.manual_seed(20_240)
    return _Chain(stages)


def _plain() -> tuple[float, float]:
    """Return the seconds of a step without a pipeline, and its loss."""
    device = adapter.device_of(0)
    model = _model(1).to(device)
    pieces = [
        (x.to(device), y.to(device))
        for x, y in zip(*(whole.chunk(_MICROBATCHES) for whole in _data()), strict=True)
    ]  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adapter.launch(device)
    times, total = [], 0.0
    for _ in range(2 + _ROUNDS):
        adapter.wait()
        begun = time.perf_counter()
        losses = []
        for x, y in pieces:
            loss = nn.functional.mse_loss(model(x), y) / _MICROBATCHES
            losses.append(loss.detach())
            adapter.launch(device)
            loss.backward()
            del loss
            adapter.launch(device)
        adapter.wait()
        times.append(time.perf_counter() - begun)
        total = sum(float(loss) for loss in losses)
    return median(times[2:]), total


def _measured(schedule: str, stages: int, transport: str, *, plain: float, expected: float) -> Row:
    model, (x, y) = _model(stages), _data()
    placement: dict[str, Any] = (
        {"placement": {s: s % _DEVICES for s in range(stages)}} if schedule == "interleaved_1f1b" else {}
    )
    pipe = pp.pipeline(
        model, (x[:_ROWS],), targets=y[:_ROWS], loss=nn.functional.mse_loss, schedule=schedule, devices="xla",
        microbatches=_MICROBATCHES, transport=transport, **placement,
    )  # fmt: skip
    seen: list[tuple[float, float, float]] = []
    run = XlaWorld.run

    def timed(world: XlaWorld, executors: Any) -> None:
        adapter.wait()
        begun, cpu = time.perf_counter(), time.thread_time()
        run(world, executors)
        launched, cpu = time.perf_counter(), time.thread_time() - cpu
        adapter.wait()
        seen.append((launched - begun, time.perf_counter() - begun, cpu))

    XlaWorld.run = timed  # type: ignore[method-assign]
    try:
        for _ in range(2 + _ROUNDS):
            found = pipe.step(x, targets=y).loss
            if found is None or abs(float(found) - expected) > 1e-4 * abs(expected):
                raise SystemExit(f"wrong loss of {schedule} with {transport}: {found} instead of {expected}")
    finally:
        XlaWorld.run = run  # type: ignore[method-assign]
        pipe.close()
    actions = sum(map(len, pipe.schedule.rows))
    launch, step, cpu = (median(column) for column in zip(*seen[2:], strict=True))
    return Row(schedule, transport, launch, step, cpu / actions * 1e6, plain)


def main() -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    torch.set_num_threads(1)
    title = f"{_DEVICES} XLA devices, 8 layers of {_WIDTH}, {_MICROBATCHES} micro-batches of {_ROWS} rows"
    table = Table(title=title)
    for name in ("schedule", "transport", "launch ms", "step ms", "launch/step", "us/action", "step/plain"):
        table.add_column(name, justify="left" if name in ("schedule", "transport") else "right")
    for row in rows():
        table.add_row(
            row.schedule, row.transport, f"{row.launch * 1e3:.0f}", f"{row.step * 1e3:.0f}",
            f"{row.launch / row.step:.2f}", f"{row.cpu:.0f}", f"{row.step / row.plain:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
