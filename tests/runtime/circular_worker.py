"""One step of a circular pipeline, in a process that was told to keep its compiled programs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import ppdsl as pp
from tests.runtime.test_spmd_stages import WIDTH, Block, Chain


def main() -> None:
    """Run it."""
    torch.manual_seed(0)
    model = Chain(*(Block() for _ in range(4)))
    pipe = pp.xla.circular(model, (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=3)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(torch.randn(6, WIDTH), torch.randn(6, WIDTH), optimizer=optimizer)


if __name__ == "__main__":
    main()
