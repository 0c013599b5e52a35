"""What the processes of an example's test run: `examples_worker.py run|overlap EXAMPLE FOLDER`.

Each process writes what it says to a file of its own in the folder: on one pipe their lines would run into each other.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ppdsl as pp
from ppdsl.timeline import Event, Timeline


def run(path: str) -> None:
    """Run an example as `python EXAMPLE` does; then every rank says its losses, every bit of them."""
    losses = runpy.run_path(path, run_name="__main__")["losses"]
    print(f"rank {os.environ.get('RANK', '0')}", *(repr(loss) for loss in losses))


def overlap(path: str) -> None:
    """Measure a step of the experts with more work for each; rank 0 says what the times show."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    example = runpy.run_path(path)
    rows, microbatches = 64, 8
    made = example["make"](rows=rows, width=128, hidden=2048)
    pipe = pp.pipeline(**made, microbatches=microbatches, placement=example["placement"](4), timeout=60.0)
    timelines = []
    for x, y in example["batches"](3, rows * microbatches):
        timelines.append(pipe.step(x, targets=y, timeline=True).timeline)
    if dist.get_rank() == 0:
        for timeline in timelines[1:]:  # the first step warms up
            print("in order:", in_order(timeline, microbatches), "together:", together(timeline, microbatches))
    dist.destroy_process_group()


def forwards(timeline: Timeline) -> Mapping[tuple[str, int], Event]:
    """Return the forward of each stage and micro-batch."""
    labels = timeline.stage_labels
    return {
        (labels[event.action.stage], event.action.microbatch): event
        for event in timeline.events
        if event.action.kind == "F"
    }


def in_order(timeline: Timeline, microbatches: int) -> bool:
    """Whether trunk, experts and join ran one after the other on the clock that all ranks share."""
    times = forwards(timeline)
    return all(
        times["trunk", m].end <= times[f"expert {i}", m].start and times[f"expert {i}", m].end <= times["join", m].start
        for m in range(microbatches)
        for i in range(4)
    )


def together(timeline: Timeline, microbatches: int) -> int:
    """Count the pairs of experts on two ranks that worked on one micro-batch at the same time."""
    times = forwards(timeline)
    pairs = [
        (times[f"expert {i}", m], times[f"expert {j}", m])
        for m in range(microbatches)
        for i in range(4)
        for j in range(i)
    ]
    return sum(one.rank != two.rank and max(one.start, two.start) < min(one.end, two.end) for one, two in pairs)


if __name__ == "__main__":
    commands: dict[str, Any] = {"run": run, "overlap": overlap}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        commands[sys.argv[1]](sys.argv[2])
    Path(sys.argv[3], os.environ.get("RANK", "0")).write_text(said.getvalue())
