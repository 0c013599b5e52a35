"""Every trap on several processes: `worker.py FOLDER MICROBATCHES SCHEDULE...` writes what differs, a file a rank."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path

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
    folder, microbatches, *schedules = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
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
    # On one pipe lines of several processes, and gloo's own, run into each other.
    Path(folder, str(rank)).write_text("\n".join([*said, "done"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
