"""Two processes whose user sends something himself: `traffic_worker.py between|inside`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import ppdsl as pp
from tests.runtime.saying import keep_others_apart, say
from tests.trust.graphs import NoParameters, mean_square, numbers

MICROBATCHES = 2


def misplaced(output: Tensor, target: Tensor) -> Tensor:
    """Ask all ranks for something where only the one of the last stage comes."""
    given = target.clone()
    dist.broadcast(given, 0)
    return mean_square(output, given)


def main() -> None:
    """Train a step with traffic between the steps, or inside the loss."""
    keep_others_apart()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    x, y = numbers(MICROBATCHES, 4), numbers(MICROBATCHES, 4, seed=1)
    inside = sys.argv[1] == "inside"
    try:
        pipe = pp.pipeline(
            NoParameters(), (x[:2],), targets=y[:2], loss=misplaced if inside else mean_square,
            microbatches=MICROBATCHES, placement={0: 0, 1: 0, 2: 1}, timeout=4.0,
        )  # fmt: skip
        for _ in range(2):
            # Only the first rank has the targets, and gives them to the others before the step.
            target = y.clone() if dist.get_rank() == 0 else torch.zeros_like(y)
            dist.broadcast(target, 0)
            loss = pipe.step(x, targets=target).loss
        plain = NoParameters()
        say(torch.allclose(loss, mean_square(plain(x), y)))
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
