"""One rank gets into trouble: every kind, at every moment; what the others say. `faults.py RANKS NAME...` prints it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.runtime.checkpoints.saving import Part
from tests.runtime.forked import Ended, run_ranks

__all__ = ["FAULTS", "TIMEOUT", "Fault", "run_fault"]

TIMEOUT = 4.0
MICROBATCHES = 4


@dataclass(frozen=True)
class Fault:
    """What happens.

    Attributes:
        what: `kill`, `stop` or `raise`.
        moment: `forward`, `backward`, `between`, `build`, `save`, `optimizer` or `loss`.
        rank: To whom; negative from the last one.
        held: Whether rank 0 holds the store.
    """

    what: str
    moment: str
    rank: int
    held: bool = False

    @property
    def name(self) -> str:
        """Names it on the command line."""
        return f"{self.what}-{self.moment}-{self.rank}{'-held' if self.held else ''}"

    def strike(self) -> None:
        """Do it."""
        match self.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                raise ValueError("bad luck")


class Trap(nn.Module):
    """Springs in the forward of micro-batch 2, when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.strike: Callable[[], None] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.strike is not None and type(x) is Tensor:
            self.calls += 1
            if self.calls == 3:
                self.strike()
        return x * 1.0


class Chain(nn.Module):
    """A stage for each rank."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(stages))
        self.traps = nn.ModuleList(Trap() for _ in range(stages))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for key, (layer, trap) in enumerate(zip(self.layers, self.traps, strict=True)):
            with pp.stage(key):
                x = torch.tanh(trap(layer(x)))
        return x


def train(fault: Fault, ranks: int, folder: Path) -> str:
    """Train three steps; the fault comes in the second one, or where it says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    mine = dist.get_rank() == fault.rank % ranks
    model = Chain(ranks)
    x = torch.randn(2 * MICROBATCHES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if mine and fault.moment == "build":
        model.register_forward_pre_hook(lambda *_: fault.strike())
    loss = Loss(fault if mine and fault.moment == "loss" else None)
    pipe = pp.pipeline(model, (x[:2],), targets=x[:2], loss=loss, microbatches=MICROBATCHES, timeout=TIMEOUT)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(3):
        if mine and step == 1:
            set_up(fault, model, optimizer)
        pipe.step(x, targets=x)
        optimizer.step()
        pp.save(pipe, folder, optimizer, keep=2)
    pipe.close()
    dist.destroy_process_group()
    return "all steps"


class Loss:
    """The mean square, with a trap in its third call on real tensors."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)


def set_up(fault: Fault, model: Chain, optimizer: torch.optim.Optimizer) -> None:
    """Let it happen at its moment."""
    stage = fault.rank % len(model.layers)
    match fault.moment:
        case "forward":
            model.traps[stage].strike = fault.strike
        case "backward":
            calls: list[Tensor] = []

            def strike(gradient: Tensor) -> None:
                calls.append(gradient)
                if len(calls) == 3:
                    fault.strike()

            model.layers[stage].weight.register_hook(strike)
        case "between":
            fault.strike()
        case "optimizer":
            optimizer.register_step_pre_hook(lambda *_: fault.strike())
        case "save":
            write = Part.write

            def write_and_strike(part: Part) -> None:
                write(part)
                fault.strike()

            Part.write = write_and_strike


ALWAYS = ("forward", "backward", "between", "build", "save", "optimizer")
FAULTS = {
    fault.name: fault
    for fault in (
        *(Fault(what, moment, -1) for what in ("kill", "stop", "raise") for moment in ALWAYS),
        *(Fault(what, moment, 0) for what in ("kill", "stop") for moment in ("forward", "between")),
        *(Fault(what, moment, 0, held=True) for what in ("kill", "stop") for moment in ("forward", "between")),
        *(Fault(what, moment, 1) for what in ("kill", "stop") for moment in ("forward", "backward")),
    )
}


def run_fault(fault: Fault, ranks: int) -> list[Ended]:
    """Run it on that many ranks."""
    folder = Path(tempfile.mkdtemp())
    try:
        return run_ranks(ranks, lambda rank: train(fault, ranks, folder), seconds=60.0, store_in_rank_0=fault.held)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Run what is named, all without names."""
    ranks, names = int(sys.argv[1]), sys.argv[2:] or list(FAULTS)
    result: dict[str, Any] = {}
    for name in names:
        begun = time.monotonic()
        result[name] = [asdict(ended) for ended in run_fault(FAULTS[name], ranks)]
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
