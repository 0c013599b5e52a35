from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import ppdsl as pp
from tests.runtime.models import CASES, batch_of, pipeline_of, plain_step

INF = float("inf")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("name", ["chain", "tied", "frozen", "strided", "no_grad_edge", "own_loss", "norm"])
def test_clipping_equals_torchs_of_the_unsplit_model(name: str, norm_type: float) -> None:  # UR-118
    case = CASES[name]
    model, whole = case.model(), case.model()
    inputs, targets = batch_of(case)
    pipe = pipeline_of(case, model)
    pipe.step(*inputs, targets=targets or None)
    plain_step(case, whole)
    norm = pipe.clip_grad_norm_(0.01, norm_type)
    expected = clip_grad_norm_(whole.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
    assert norm.dtype == expected.dtype
    for one, two in zip(model.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-16)


def test_the_norm_of_equal_gradients_is_torchs_to_the_last_bit() -> None:
    case = CASES["tied"]
    model = case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    pipe.step(*inputs, targets=targets)
    expected = clip_grad_norm_(list(model.parameters()), INF)
    assert torch.equal(pipe.clip_grad_norm_(INF), expected)


def test_stages_of_norm_3_and_4_are_clipped_by_5() -> None:  # UR-117
    case = CASES["chain"]
    model = case.model()
    pipe = pipeline_of(case, model)
    for parameter, norm in ((model.a.bias, 3.0), (model.c.bias, 4.0)):
        parameter.grad = torch.tensor([norm, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert pipe.clip_grad_norm_(1.0).item() == 5.0
    torch.testing.assert_close(model.a.bias.grad[0].item(), 0.6, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(model.c.bias.grad[0].item(), 0.8, rtol=1e-6, atol=0.0)
    assert model.b.weight.grad is None


def test_without_any_gradient_the_norm_is_zero() -> None:
    case = CASES["chain"]
    assert pipeline_of(case, case.model()).clip_grad_norm_(1.0).item() == 0.0


def test_a_norm_that_is_not_finite_is_torchs_or_an_error_that_names_the_parameter() -> None:
    case = CASES["chain"]
    model = case.model()
    pipe = pipeline_of(case, model)
    inputs, targets = batch_of(case)
    pipe.step(*inputs, targets=targets)
    model.b.bias.grad[1] = INF
    with pytest.raises(pp.RunError, match=r"norm-not-finite(.|\n)*rank 1 \| b.bias: inf"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert torch.isfinite(model.a.weight.grad).all()
    assert pipe.clip_grad_norm_(1.0).item() == INF
    pipe.step(*inputs, targets=targets)


class Lopsided(nn.Module):
    """A stage of an embedding only, one without parameters, one that is frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        with pp.stage(0):
            h = self.table(x)
        with pp.stage(1):
            h = torch.tanh(h) * 2
        with pp.stage(2):
            h = self.frozen(h)
        with pp.stage(3):
            return self.head(h)


def test_a_stage_that_owns_nothing_takes_part() -> None:  # UR-070
    torch.manual_seed(3)
    model = Lopsided()
    x, y = torch.randint(5, (8,)), torch.randint(3, (8,))
    pipe = pp.pipeline(model, (x[:2],), targets=y[:2], loss=functional.cross_entropy, microbatches=4)
    pipe.step(x, targets=y)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    assert torch.equal(pipe.clip_grad_norm_(1e9), expected)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    case = CASES["chain"]
    model = case.model()
    pipe = pipeline_of(case, model)
    model.a.weight.grad = torch.zeros(4, 4, dtype=torch.float64).to_sparse()
    with pytest.raises(pp.CallError, match=r"Parameter `a\.weight` has a sparse gradient"):
        pipe.clip_grad_norm_(1.0)
