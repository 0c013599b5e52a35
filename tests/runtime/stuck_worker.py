"""One process whose XLA devices get stuck in the way that its argument says: see `test_xla_stuck.py`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import ppdsl as pp
from ppdsl.runtime.xla import adapter, choice, stuck

WIDTH = 4


class Slow(nn.Module):
    """Computes for minutes, once it is told to."""

    endless = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Slow.endless and x.device.type == "xla":
            y = torch.ones(2500, 2500, device=x.device) * x.mean()
            for _ in range(200):
                y = torch.tanh(y @ y)
            return x + y.sum()
        return x * 1


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.slow = Slow()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                x = torch.tanh(layer(x))
                if number == 2:
                    x = self.slow(x)
        return x


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def pipeline_of(**options: Any) -> pp.Pipeline:
    options = {"microbatches": 4, "devices": "xla", "transport": "permute"} | options
    return pp.pipeline(Chain(), (torch.ones(2, WIDTH),), loss=torch.mean, targets=(), **options)


def leave_one_out() -> None:
    """Start no collective on the last device from now on."""
    real = adapter.launch_tensors

    def others(tensors: Any, device: torch.device) -> None:
        if device.index != 3:
            real(tensors, device)

    adapter.launch_tensors = others  # type: ignore[assignment]


def starved() -> None:
    """There are fewer threads than devices, and nobody looked."""
    choice.tested = lambda _: None  # type: ignore[assignment]
    pipe = pipeline_of()
    try:
        pipe.step(torch.ones(8, WIDTH))
    except pp.RunError as error:
        say(error)
    pipe.step(torch.ones(8, WIDTH))


def tested() -> None:
    """The same at the start."""
    pipeline_of()


def left_out() -> None:
    """A device does not take part in a transfer of the second step."""
    pipe = pipeline_of()
    pipe.step(torch.ones(8, WIDTH))
    say("stepped")
    leave_one_out()
    pipe.step(torch.ones(8, WIDTH))


def endless() -> None:
    """A stage does not end."""
    pipe = pipeline_of(transport="host", timeout=2.0)
    Slow.endless = True
    pipe.step(torch.ones(8, WIDTH))


def reads() -> None:
    """The user's own code waits for a collective that a device has not joined."""
    leave_one_out()
    made = pp.xla.collectives.all_reduce([torch.ones(2, device=f"xla:{place}") for place in range(4)])
    say("waits")
    made[0].cpu()


def leaves() -> None:
    """The program ends while devices wait for each other."""
    leave_one_out()
    pp.xla.collectives.all_reduce([torch.ones(2, device=f"xla:{place}") for place in range(4)])
    say("leaves")


if __name__ == "__main__":
    adapter.device_count()
    choice._obstacle = lambda _: None  # type: ignore[assignment]
    if sys.argv[1] != "starved":
        stuck.PATIENCE = 3.0
    {case.__name__: case for case in (starved, tested, left_out, endless, reads, leaves)}[sys.argv[1]]()
