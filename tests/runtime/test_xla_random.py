"""Random graphs of stages, placements, schedules and transports on XLA devices: always the numbers of the plain run."""

from __future__ import annotations

import copy
import os
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ppdsl as pp
from ppdsl.runtime.xla import adapter as xla_adapter

pytestmark = pytest.mark.xla

SEEDS = range(int(os.environ.get("PPDSL_XLA_SEEDS", "8")))
WIDTH, ROWS = 3, 2


class Net(nn.Module):
    """Stages that take what any earlier ones made: activations, integers, detached values; ties, frozen weights."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        count = chance.randint(2, 6)
        self.takes = [sorted(chance.sample(range(i), min(i, chance.randint(1, 3)))) for i in range(count)]
        self.extras = [chance.choice(["none", "half", "detached", "integer", "transposed"]) for _ in range(count)]
        self.keys = [chance.randint(0, i) for i in range(count)]
        self.tied = [chance.random() < 0.4 for _ in range(count)]
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.drops = nn.ModuleList(nn.Dropout(0.0) for _ in range(count))
        for layer in self.layers:
            layer.requires_grad_(chance.random() > 0.25)
        self.layers[0].requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: list[list[torch.Tensor]] = []
        for number, layer in enumerate(self.layers):
            with pp.stage(self.keys[number]):
                parts = [value for i in self.takes[number] for value in made[i]]
                total = sum((p.t() if p.shape[0] == WIDTH else p).to(x.dtype) for p in parts) if parts else x
                h = torch.tanh(self.drops[number](layer(total)))
                if self.tied[number]:
                    h = self.shared(h)
                made.append([h, *self.extra(number, h)])
        with pp.stage(self.keys[-1]):
            return made[-1][0]

    def extra(self, number: int, h: torch.Tensor) -> list[torch.Tensor]:
        match self.extras[number]:
            case "half":
                return [h * 0.5]
            case "detached":
                return [h.detach() + 1]
            case "integer":
                return [(h * 9).round().long()]
            case "transposed":
                return [h.t() * 1]
        return []


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_trains_like_the_plain_one(seed: int) -> None:
    xla_adapter.device_count()
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model: Any = Net(chance).double()
    plain = copy.deepcopy(model)
    microbatches = chance.randint(1, 4)
    options: dict[str, Any] = {
        "schedule": chance.choice(["1f1b", "gpipe", "sequential", "zero_bubble", "eager_1f1b"]),
        "placement": {key: chance.randrange(4) for key in set(model.keys)},
        "transport": chance.choice(["permute", "host"]),
        "recompute": chance.random() < 0.3,
    }
    x = torch.randn(ROWS * microbatches, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PpdslWarning)
        try:
            pipe = pp.pipeline(
                model, (x[:ROWS],), loss=loss_of, targets=(), microbatches=microbatches, devices="xla", **options
            )
        except pp.ScheduleError:
            # The family does not fit a random placement; another one does.
            options["schedule"] = "gpipe"
            pipe = pp.pipeline(
                model, (x[:ROWS],), loss=loss_of, targets=(), microbatches=microbatches, devices="xla", **options
            )
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(3):
            before = xla_adapter.compilations()
            loss = pipe.step(x).loss
            assert number < 2 or xla_adapter.compilations() == before
            total = sum(loss_of(plain(part)) / microbatches for part in x.split(ROWS))
            total.backward()  # type: ignore[union-attr]
            torch.testing.assert_close(loss, total.detach(), rtol=1e-9, atol=1e-12)  # type: ignore[union-attr]
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                if one.grad is None or other.grad is None:
                    # A gradient that autograd leaves out crosses an edge as zeros.
                    found = one.grad if other.grad is None else other.grad
                    assert found is None or not found.any(), f"{name} under {options}"
                    continue
                torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-8, atol=1e-11, msg=f"{name} {options}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
