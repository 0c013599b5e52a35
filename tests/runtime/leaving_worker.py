"""A script that shuts nothing down: `leaving_worker.py quietly|badly`. With `badly` rank 1 ends with an error."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import ppdsl as pp
from tests.runtime.models import CASES, batch_of, pipeline_of
from tests.runtime.saying import keep_others_apart, say

if __name__ == "__main__":
    keep_others_apart()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    case = CASES["chain"]
    inputs, targets = batch_of(case)
    # In the global scope, where it lives until the interpreter ends.
    pipe = pipeline_of(case, case.model(), placement={0: 0, 1: 1, 2: 1}, timeout=30.0)
    pipe.step(*inputs, targets=targets)
    if sys.argv[1] == "badly":
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        try:
            pipe.step(*inputs, targets=targets)
        except pp.PpdslError as error:
            say(f"{type(error).__name__}: {error}")
    say("end")
