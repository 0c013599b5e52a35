"""A spec's memory limit holds for the schedule: `auto` keeps it, and a schedule that does not is an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.diagnostics import PpdslError, SpecError
from ppdsl.plan.lifetimes import peak_activations
from ppdsl.runtime.pipeline import Pipeline
from ppdsl.spec.load import load_spec_text

ROWS, WIDTH, MICROBATCHES = 8, 16, 8
VALUE = ROWS * WIDTH * 4
"""Bytes of a value between two stages."""
STATE = 2 * (WIDTH + 1) * WIDTH * 4
"""Bytes of a layer's parameters and their gradients."""


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def pipe_under(schedule: str, values: int) -> Pipeline:
    """Return four stages, each of which may hold as many values."""
    lines = [
        "pipeline limited {",
        f"    microbatches = {MICROBATCHES}",
        f"    schedule     = {schedule}",
        f"    memory       = {STATE + values * VALUE}B",
        "    ranks        = 4",
        *(f"    stage {i} @ {i} {{ layers[{i}] }}" for i in range(4)),
        "}",
        "",
    ]
    spec = "\n".join(lines)
    x = torch.randn(ROWS, WIDTH)
    return pp.pipeline(
        Chain(), (x,), targets=x, loss=nn.functional.mse_loss, spec=load_spec_text(spec, "limited.ppspec")
    )


def test_auto_keeps_what_the_limit_leaves_beside_parameters_and_gradients() -> None:
    tight, free = pipe_under("auto", 4), pipe_under("auto", 200)
    for pipe, most in ((tight, 4 * VALUE), (free, 200 * VALUE)):
        assert all(peak.bytes <= most for peak in peak_activations(pipe.schedule, pipe.graph))
    assert max(p.bytes for p in peak_activations(free.schedule, free.graph)) > 4 * VALUE
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    assert torch.isfinite(tight.step(x, targets=x).loss)


def test_a_schedule_that_holds_more_than_the_limit_is_an_error_with_both_numbers() -> None:
    with pytest.raises(SpecError) as caught:
        pipe_under("gpipe", 4)
    (finding,) = caught.value.diagnostics
    assert finding.code == "does-not-fit"
    assert "under gpipe, but the limit leaves 2 KiB" in finding.message
    assert finding.labels[0].span.line > 1


def test_a_limit_that_no_schedule_keeps_is_an_error() -> None:
    with pytest.raises(PpdslError, match="No schedule fits the memory"):
        pipe_under("auto", 0)
