"""Random graphs of stages, placements, schedules and transports on XLA devices: always the numbers of the plain run.

`PPDSL_XLA_SEEDS=100` runs more rounds; `python -m tests.runtime.xla_fuzz --minutes 30` as many as there is time for.
"""

from __future__ import annotations

import os

import pytest
import torch

from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.norms import NormsWrittenOut
from tests.runtime.xla_fuzz import held, round_of, wrong_in

pytestmark = pytest.mark.xla

SEEDS = range(int(os.environ.get("PPDSL_XLA_SEEDS", "16")))


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Start torch_xla before the first backward of this process."""
    xla_adapter.device_count()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_trains_like_the_plain_one(seed: int) -> None:
    """Three steps: loss, gradients, parameters, buffers; nothing compiled in the third; nothing left of it."""
    before = held()
    one = round_of(seed)
    assert wrong_in(one) == [], one.text
    del one
    after = held()
    assert (after.tensors, after.files) == (before.tensors, before.files)


def test_a_stage_that_nobody_uses_leaves_nothing_behind() -> None:
    """Its backward never runs, and what autograd kept for it has to go all the same."""
    one = round_of(1)
    used = {i for takes in one.model.takes for i in takes}
    assert set(range(len(one.model.takes) - 1)) - used, "seed 1 has such a stage"
    before = held().tensors
    assert wrong_in(one) == []
    del one
    assert held().tensors == before


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("parts", ["weight and bias", "weight", "nothing"])
def test_a_layer_norm_keeps_its_digits_where_the_mean_is_large(axes: int, parts: str) -> None:
    shape = (5, 4, 8)[-axes:]
    torch.manual_seed(2)
    wide = [
        torch.randn(2, 5, 4, 8, dtype=torch.float64) + 300,
        torch.randn(shape).double(),
        torch.randn(shape).double(),
    ]
    given = wide[: {"weight and bias": 3, "weight": 2, "nothing": 1}[parts]]
    found = []
    for tensors in ([t.to("xla:1", torch.float32) for t in given], [t.float().double() for t in given]):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with NormsWrittenOut():
            result = torch.nn.functional.layer_norm(leaves[0], shape, *leaves[1:])
        (result.sin() * 3).sum().backward()
        found.append([tensor.detach().cpu().double() for tensor in (result, *(leaf.grad for leaf in leaves))])
    for ours, exact in zip(*found, strict=True):
        assert float((ours - exact).abs().max()) <= 5e-4 * float(exact.abs().max())


def test_a_layer_norm_of_half_precision_keeps_the_type() -> None:
    x = torch.randn(3, 8).to("xla:0", torch.bfloat16).requires_grad_()
    with NormsWrittenOut():
        y = torch.nn.functional.layer_norm(x, (8,))
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    with NormsWrittenOut(), pytest.raises(RuntimeError, match="normalized_shape"):
        torch.nn.functional.layer_norm(x, (7,))
