"""Every trap on the processes of a launch: `worker.py MICROBATCHES SCHEDULE...`; each rank says what differs."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import ppdsl as pp
from tests.trust.entry import differences, keys_of
from tests.trust.test_entries import ENTRIES


def main() -> None:
    """Run all entries; a rank that differs says where, and all end with the same number of lines."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    microbatches, *schedules = int(sys.argv[1]), *sys.argv[2:]
    said = []
    for entry in ENTRIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PpdslWarning)
            keys = keys_of(entry, microbatches)
        placement = {key: i % ranks for i, key in enumerate(keys)}
        if len(keys) < ranks:
            continue
        for schedule in schedules:
            found = differences(entry, microbatches, schedule=schedule, placement=placement, timeout=30.0)
            said += [f"{entry.name} {schedule}: {text}" for text in found]
    sys.stdout.write("".join(f"<{rank}> {line}\n" for line in [*said, "done"]))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
