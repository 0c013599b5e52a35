"""A circular pipeline in a process that was told to keep its compiled programs; or the same stages one by one.

`circular_worker.py FILE` runs `chain()` with each stage on a device of its own instead, and writes what a step gives.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import ppdsl as pp
from ppdsl.runtime.xla import adapter
from tests.runtime.test_spmd_stages import WIDTH, Block, Chain

__all__ = ["MICROBATCHES", "ROWS", "chain"]

ROWS, MICROBATCHES = 2, 3


def chain() -> tuple[Chain, torch.Tensor, torch.Tensor]:
    """Return a model with a batch and its targets, the same in every process."""
    torch.manual_seed(0)
    model = Chain(*(Block() for _ in range(4)))
    return model, torch.randn(ROWS * MICROBATCHES, WIDTH), torch.randn(ROWS * MICROBATCHES, WIDTH)


def main() -> None:
    """Run a step of a circular pipeline."""
    model, batch, target = chain()
    pipe = pp.xla.circular(model, (batch[:ROWS],), loss=F.mse_loss, microbatches=MICROBATCHES)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(batch, target, optimizer=optimizer)


def one_by_one(path: str) -> None:
    """Run a step with each stage on a device of its own, for each schedule, and write what it gives."""
    adapter.device_count()
    found = {}
    for schedule in ("1f1b", "gpipe"):
        model, batch, target = chain()
        pipe = pp.pipeline(
            model, (batch[:ROWS],), targets=target[:ROWS], loss=F.mse_loss, microbatches=MICROBATCHES, devices="xla",
            schedule=schedule,
        )  # fmt: skip
        result = pipe.step(batch, targets=target, outputs="all")
        gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        found[schedule] = {"loss": result.loss, "outputs": result.outputs, "gradients": gradients}
    torch.save(found, path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_by_one(sys.argv[1])
    else:
        main()
