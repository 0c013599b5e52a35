"""What split backwards keep: less than all micro-batches at once, and nothing after a step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ppdsl as pp

ROWS, WIDTH, MICROBATCHES = 16, 32, 8


class Hidden(nn.Module):
    """Passes its input on and counts how many of the tensors it has passed on are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Any]] = []
        self.peak = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.seen.append(weakref.ref(x.untyped_storage()))
            self.peak = max(self.peak, self.alive)
        return x

    @property
    def alive(self) -> int:
        """How many are alive now."""
        self.seen = [ref for ref in self.seen if ref() is not None]
        return len(self.seen)


class Deep(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.hidden = Hidden()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), self.hidden, nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key, block in enumerate(self.blocks):
            with pp.stage(key):
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def make(schedule: str, *, recompute: bool = False) -> tuple[pp.Pipeline, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    placement = {key: key % 2 for key in range(4)} if schedule == "gpipe" else None
    pipe = pp.pipeline(
        Deep(recompute=recompute), (x[:ROWS],), targets=x[:ROWS], loss=functional.mse_loss, schedule=schedule,
        microbatches=MICROBATCHES, placement=placement,
    )  # fmt: skip
    return pipe, x


def peak(pipe: pp.Pipeline, x: torch.Tensor) -> int:
    """Return the most hidden tensors that live in a step; none may be left after it, nor wait for the collector."""
    hidden = pipe.module.hidden
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            hidden.peak = 0
            pipe.step(x, targets=x)
            assert hidden.alive == 0
    finally:
        gc.enable()
    return hidden.peak


def test_nothing_is_left_after_a_step_and_the_peak_is_below_gpipes() -> None:
    peaks = {schedule: peak(*make(schedule)) for schedule in ("gpipe", "zbv", "interleaved_zero_bubble", "v_min")}
    assert peaks["gpipe"] == 4 * MICROBATCHES
    # What the schedule says that both ranks hold, and not one more.
    assert peaks["zbv"] <= 2 * 4
    assert peaks["interleaved_zero_bubble"] <= 2 * 4
    assert peaks["v_min"] <= peaks["zbv"]


def test_what_is_recomputed_is_not_kept_until_the_weight_gradients() -> None:
    pipe, x = make("zbv", recompute=True)
    with pytest.warns(pp.PpdslWarning, match="under saved-tensor hooks"):
        pipe.step(x, targets=x)
    assert peak(pipe, x) <= 2


def test_one_model_under_changing_schedules_always_has_the_plain_gradients() -> None:
    torch.manual_seed(0)
    model, reference = Deep(recompute=False).double(), Deep(recompute=False).double()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64)
    for m in range(MICROBATCHES):
        part = x[m * ROWS : (m + 1) * ROWS]
        (functional.mse_loss(reference(part), part) / MICROBATCHES).backward()
    pipes = [
        pp.pipeline(
            model, (x[:ROWS],), targets=x[:ROWS], loss=functional.mse_loss, schedule=schedule, microbatches=MICROBATCHES
        )
        for schedule in ("zbv", "1f1b", "zero_bubble(h2)", "gpipe", "dualpipev")
    ]
    for pipe in [*pipes, *pipes]:
        model.zero_grad()
        pipe.step(x, targets=x)
        for one, two in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


def test_a_hook_after_accumulation_runs_once_for_each_micro_batch() -> None:
    pipe, x = make("zbv")
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            calls[name] = calls.get(name, 0) + 1

        return hook

    for name, parameter in pipe.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    pipe.step(x, targets=x)
    assert calls == {name: MICROBATCHES for name, _ in pipe.module.named_parameters()}
