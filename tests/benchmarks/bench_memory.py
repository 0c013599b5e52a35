"""Memory of a step on each rank, as the plan tells it beforehand, beside what lives.

One step of one micro-batch tells what each stage holds after its forward. The plan says which micro-batches of each
stage are in flight; the largest sum on a rank is the prediction. Measured: the bytes of all tensors that a rank's
forwards made and that live, at their most, after any of its computations; weights, and the temporary values of the one
backward that runs, come on top. A value that has been sent and that the stage did not save goes earlier than predicted.

`python tests/benchmarks/bench_memory.py`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import ppdsl as pp
from ppdsl.plan.lifetimes import last_uses
from ppdsl.schedule.action import ActionKind
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.runtime.live_bytes import CountingWorld

__all__ = ["main", "row", "rows"]

_STAGES, _RANKS, _MICROBATCHES = 4, 2, 8
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
_WORKLOADS = ("gpt", "unet", "experts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = rows()
    table = Table(title=f"{_RANKS} ranks, {_STAGES} stages, {_MICROBATCHES} micro-batches, MiB on the fullest rank")
    for name in ("workload", "schedule", "predicted", "measured", "predicted/measured", "left after the step"):
        table.add_column(name, justify="left" if name in ("workload", "schedule") else "right")
    for one in found:
        top = one["measured"].index(max(one["measured"]))
        table.add_row(
            one["workload"], one["schedule"], *(f"{one[key][top] / 2**20:.2f}" for key in ("predicted", "measured")),
            " ".join(f"{p / m:.3f}" for p, m in zip(one["predicted"], one["measured"], strict=True)), str(one["left"]),
        )  # fmt: skip
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def rows() -> list[dict[str, Any]]:
    """Return prediction and measurement of all workloads and schedules, in bytes for each rank."""
    return [row(WORKLOADS[name], schedule) for name in _WORKLOADS for schedule in _SCHEDULES]


def row(work: Workload, schedule: str) -> dict[str, Any]:
    """Return prediction and measurement of one workload under one schedule, in bytes for each rank."""
    shared = {"placement": {stage: stage * _RANKS // _STAGES for stage in range(_STAGES)}}
    pipe, world = _stepped(work, schedule, _MICROBATCHES, **(shared if schedule in ("gpipe", "1f1b") else {}))
    placement = dict(enumerate(pipe.schedule.placement))
    _, alone = _stepped(work, "sequential", 1, placement=placement)
    kept: dict[int, int] = {}
    for done in alone.after.values():
        before = 0
        for action, live in done:
            if action.kind is ActionKind.FORWARD:
                kept[action.stage], before = live - before, live
    frees, predicted = last_uses(pipe.schedule, pipe.graph), []
    for rank, actions in enumerate(pipe.schedule.rows):
        live = most = 0
        for position, action in enumerate(actions):
            live += kept[action.stage] if action.kind is ActionKind.FORWARD else 0
            live -= sum(kept[stage] for stage, _ in frees[rank].get(position, ()))
            most = max(most, live)
        predicted.append(most)
    measured = [max(live for _, live in world.after[rank]) for rank in range(_RANKS)]
    left = sum(done[-1][1] for done in world.after.values())
    return {"workload": work.name, "schedule": schedule, "predicted": predicted, "measured": measured, "left": left}


def _stepped(work: Workload, schedule: str, microbatches: int, **options: Any) -> tuple[pp.Pipeline, CountingWorld]:
    """Make two steps, the second one with gradients that are there already, and count in that one."""
    world = CountingWorld()
    (x, y), (first, target) = work.data(microbatches), work.data(1)
    with mock.patch("ppdsl.runtime.pipeline.make_world", return_value=world):
        pipe = pp.pipeline(
            work.model(_STAGES), (first,), targets=target, loss=work.loss, microbatches=microbatches, schedule=schedule,
            **options,
        )  # fmt: skip
    for _ in range(2):
        world.begin()
        pipe.step(x, targets=y)
    return pipe, world


if __name__ == "__main__":
    sys.exit(main())
