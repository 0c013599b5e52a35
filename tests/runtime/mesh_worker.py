"""What the four processes of the tests of replicas run: `mesh_worker.py FOLDER SCENARIO...`."""

from __future__ import annotations

import faulthandler
import sys

import torch.distributed as dist

from tests.runtime import mesh_failures, mesh_replicas, mesh_shards
from tests.runtime.mesh_common import attempt
from tests.runtime.saying import keep_others_apart, say

if __name__ == "__main__":
    keep_others_apart()
    # A process that hangs says where.
    faulthandler.dump_traceback_later(180.0, exit=True)
    dist.init_process_group("gloo")
    scenarios = {**vars(mesh_replicas), **vars(mesh_shards), **vars(mesh_failures)}
    for name in sys.argv[2:]:
        say(f"# {name}")
        attempt(scenarios[name])
    dist.barrier()
    dist.destroy_process_group()
