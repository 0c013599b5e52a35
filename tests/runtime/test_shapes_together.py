"""Batches of other sizes and shapes together with what else a pipeline does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.schedule.csv_text import from_rows
from ppdsl.spec.load import load_spec_text
from tests.runtime.models import CASES, Base
from tests.runtime.uneven import apart, make, plain_uneven, rows_of

OWN = [
    ["0F0", "0F1", "0F2", "0B2", "0B0", "0B1"],
    ["1F0", "1F1", "1F2", "1B2", "1B0", "1B1"],
    ["2F0", "2F1", "2F2", "2B2", "2B0", "2B1"],
]


def test_an_order_of_the_users_own_runs_fewer_and_uneven_micro_batches() -> None:
    case = CASES["chain"]
    for rows in (6, 7, 2, 1):
        model, plain = case.model(), case.model()
        pipe = make(case, model, 3, schedule=from_rows(OWN))
        inputs, targets = rows_of(case, rows)
        result = pipe.step(*inputs, targets=targets, outputs="all", timeline=True)
        assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, 3)) == []
        ran = [str(event.action) for event in result.timeline.events if event.rank == 0]
        kept = [text for text in OWN[0] if int(text[2:]) < min(rows, 3)]
        assert ran == kept
        assert str(pipe.schedule).startswith("rank 0 | 0F0 0F1 0F2"), "the pipeline's own plan stays"


class Dropping(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        with pp.stage(0):
            h = self.drop(self.a(x))
        with pp.stage(1):
            return self.b(h)


def test_random_numbers_of_an_uneven_batch_follow_step_and_micro_batch() -> None:
    torch.manual_seed(0)
    model = Dropping().double()
    x = torch.randn(7, 4).double()
    pipe = pp.pipeline(model, (x[:2],), loss=lambda y: y.square().mean(), targets=(), microbatches=4)
    result = pipe.step(x, outputs="all")
    parts = []
    for number, part in enumerate(x.tensor_split(4)):
        with pipe.randomness(step=0, microbatch=number):
            parts.append(model(part))
    assert torch.equal(result.outputs, torch.cat(parts).detach())


class Balanced(Base):
    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
            pp.aux_loss(h.square().mean(), weight=0.5)
            pp.metric("rows", torch.tensor(float(x.shape[0])), reduce="sum")
        with pp.stage(1):
            return self.b(h)


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_side_losses_and_metrics_of_uneven_micro_batches_count_by_their_rows(rows: int) -> None:
    torch.manual_seed(0)
    model = Balanced().double()
    x, y = torch.randn(2, rows, 4).double()
    pipe = pp.pipeline(model, (x[:2],), targets=y[:2].clone(), loss=functional.mse_loss, microbatches=4)
    result = pipe.step(x, targets=y)
    expected = functional.mse_loss(model(x), y) + 0.5 * model.a(x).square().mean()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    assert float(result.metrics["rows"]) == rows
    gradients = torch.autograd.grad(expected, [model.a.weight, model.b.bias])
    torch.testing.assert_close(model.a.weight.grad, gradients[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.b.bias.grad, gradients[1], rtol=1e-10, atol=1e-12)


class Attention(nn.Module):
    """Costs more than everything else on long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        return x + (self.mix(x) @ x.transpose(1, 2)).softmax(-1) @ x


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_spec_divides_other_shapes_as_it_divided_the_example() -> None:
    spec = load_spec_text("pipeline net { split layers[*] into 2 by flops as part[i] @ i }", "net.ppspec")
    torch.manual_seed(0)
    model = Growing().double()
    short, long = (
        [stage.modules for stage in pp.record(model, torch.randn(2, length, 4).double(), spec=spec).stages]
        for length in (3, 200)
    )
    assert short != long, "the spec would divide a long sequence elsewhere"
    pipe = pp.pipeline(model, (torch.randn(2, 3, 4).double(),), spec=spec, microbatches=4, batch_axis={"x": 0})
    for rows, length in ((8, 200), (7, 3), (3, 50)):
        given = torch.randn(rows, length, 4).double()
        with torch.no_grad():
            assert torch.allclose(pipe(given), model(given), rtol=1e-10)
    assert [stage.modules for stage in pipe.graph.stages] == short


def test_two_pipelines_with_examples_of_other_shapes_share_a_model() -> None:  # UR-091
    case = CASES["chain"]
    model, plain = case.model(), case.model()
    one, two = make(case, model), make(case, model, 2)
    for rows in (8, 5, 3):
        for pipe, count in ((one, 4), (two, 2)):
            inputs, targets = rows_of(case, rows)
            result = pipe.step(*inputs, targets=targets, outputs="all")
            assert apart(pipe, result, plain, *plain_uneven(case, plain, rows, count)) == []


def test_a_model_learns_to_give_back_its_own_input() -> None:
    case = CASES["chain"]
    model, plain = case.model(), case.model()
    (x,), _ = rows_of(case, 7)
    pipe = pp.pipeline(model, (x[:2],), loss=functional.mse_loss, microbatches=4)
    for rows in (7, 8, 3):
        (x,), _ = rows_of(case, rows)
        model.zero_grad()
        loss = pipe.step(x, targets=x).loss
        torch.testing.assert_close(loss, functional.mse_loss(plain(x), x).detach(), rtol=1e-12, atol=1e-12)


def test_inputs_with_two_rows_for_each_of_the_batch_are_cut_in_pairs() -> None:
    class Pairs(Base):
        def forward(self, x, both):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                return self.b(h) + both.view(-1, 2, 4).sum(1)

    torch.manual_seed(0)
    model = Pairs().double()
    x, both = torch.randn(8, 4).double(), torch.randn(16, 4).double()
    pipe = pp.pipeline(model, (x[:2], both[:4]), microbatches=4)
    for rows in (8, 7, 3):
        with torch.no_grad():
            expected = model(x[:rows], both[: 2 * rows])
        assert torch.allclose(pipe(x[:rows], both[: 2 * rows]), expected, rtol=1e-12)
    with pytest.raises(pp.CallError) as caught:
        pipe(x[:7], both[:13])
    assert str(caught.value) == (
        "error[rows-differ]: Inputs have different numbers of rows: `x` has 7, `both` has 13 (recorded with 2 for each "
        "of the batch).\nhelp: give every input and target the same rows of the batch"
    )


def test_a_model_that_compares_all_rows_of_a_micro_batch_trains_on_uneven_ones() -> None:
    class Similarity(Base):
        def forward(self, x):
            with pp.stage(0):
                h = self.a(x)
            with pp.stage(1):
                h = self.b(h)
                return h @ h.T

    torch.manual_seed(0)
    model = Similarity().double()
    x = torch.randn(5, 4).double()
    pipe = pp.pipeline(model, (x[:3],), loss=lambda y: y.square().mean(), targets=(), microbatches=2)
    expected = sum(model(part).square().mean() * (len(part) / 5) for part in (x[:3], x[3:]))
    torch.testing.assert_close(pipe.step(x).loss, expected.detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(pp.CallError, match="ambiguous-output"):
        pipe(x)


def test_evaluating_before_the_first_step_and_under_no_grad_in_any_shape() -> None:  # UR-087, UR-088
    case = CASES["fan_out"]
    model, plain = case.model(), case.model()
    pipe = make(case, model, batch_axis={"x": 0, "targets[0]": 0, "output": 0})
    for rows in (3, 7):
        inputs, targets = rows_of(case, rows)
        with torch.no_grad():
            loss = pipe.step(*inputs, targets=targets).loss
            torch.testing.assert_close(loss, functional.mse_loss(plain(*inputs), *targets), rtol=1e-12, atol=1e-12)
        assert all(parameter.grad is None for parameter in model.parameters())
    inputs, targets = rows_of(case, 7)
    result = pipe.step(*inputs, targets=targets, outputs="all")
    assert apart(pipe, result, plain, *plain_uneven(case, plain, 7, 4)) == []
