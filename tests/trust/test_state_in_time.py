"""What a user changes on a model between steps is heard: buffers, modes, schedules; inference leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp
from tests.trust.entry import ROWS, plain_loop
from tests.trust.graphs import WIDTH, Layers, SkipToTwo, mean_square
from tests.trust.test_modes import MICROBATCHES, assert_close, gradients, pipeline_of, setup_of


class Rotated(Layers):
    """All three stages read one table, and each one counts into a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        for number in range(3):
            self.register_buffer(f"seen{number}", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate((self.a, self.b, self.c)):
            with pp.stage(number):
                x = torch.tanh(layer(x)) * self.table
                seen = getattr(self, f"seen{number}")
                seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Own(Layers):
    """Asks for its mode itself, in three ways."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            x = self.a(x)
            x = x * 2 if self.training else x
        with pp.stage(1):
            x = functional.dropout(self.b(x), 0.0 if self.b.training else 1.0, training=not self.b.training)
        with pp.stage(2):
            return self.c(x) + (1.0 if self.c.training else 0.0)


def replace(model: nn.Module, how: str) -> None:
    if how == "in place":
        model.table.mul_(2.0)
    elif how == "a slice of it":
        model.table[1:] = 0.25
    else:
        model.table = model.table.flip(0) * 3.0


@pytest.mark.parametrize("how", ["in place", "a slice of it", "by another tensor"])
def test_a_buffer_that_all_stages_read_may_be_changed_between_steps(how: str) -> None:  # UR-114
    setup, plain = setup_of(Rotated()), setup_of(Rotated())
    pipe = pipeline_of(setup, MICROBATCHES)
    for _ in range(2):
        result = pipe.step(*setup.args, targets=setup.targets)
        loss, _ = plain_loop(plain, MICROBATCHES)
        torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0.0)
        with torch.no_grad():
            for one in (setup, plain):
                replace(one.model, how)
    assert_close(gradients(setup.model), gradients(plain.model))
    for (name, ours), theirs in zip(setup.model.named_buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("parts", ["", "a", "b", "c", "abc"])
def test_modes_that_forward_asks_for_are_those_of_the_moment(parts: str) -> None:  # UR-090
    setup, plain = setup_of(Own()), setup_of(Own())
    pipe = pipeline_of(setup, MICROBATCHES)
    for mode in (False, True, False):
        for one in (setup, plain):
            one.model.train(mode)
            for name in parts:
                one.model.get_submodule(name).train(not mode)
        result = pipe.step(*setup.args, targets=setup.targets)
        loss, _ = plain_loop(plain, MICROBATCHES)
        torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0.0)
    assert_close(gradients(setup.model), gradients(plain.model))


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_and_the_outputs_are_the_models(scope: type, loss: bool) -> None:  # UR-088
    setup = setup_of(SkipToTwo())
    options = {"loss": mean_square, "targets": setup.targets[0][:ROWS]} if loss else {}
    pipe = pp.pipeline(setup.model, (setup.args[0][:ROWS],), microbatches=MICROBATCHES, **options)
    with scope():
        given = {"targets": setup.targets} if loss else {}
        run = pipe.step if loss else pipe.evaluate
        result = run(*setup.args, outputs="all", **given)
        expected = setup.model(*setup.args)
    torch.testing.assert_close(result.outputs, expected, rtol=1e-12, atol=1e-12)
    assert (result.loss is None) == (not loss)
    assert result.outputs.grad_fn is None
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    # What came out of inference goes into the next call, and into training.
    outputs = result.outputs.clone()
    torch.testing.assert_close(pipe(outputs), setup.model(outputs), rtol=1e-12, atol=1e-12)


def test_inference_between_the_steps_of_two_pipelines_over_one_model() -> None:  # UR-089, UR-091
    """One with long inputs trains, one with short inputs gives outputs, as prefill and decode do."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            with pp.stage(0):
                h = self.table(x)
            with pp.stage(1):
                h = torch.tanh(self.inner(h)) + h.mean(1, keepdim=True)
            with pp.stage(2):
                return self.head(h)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    model, twin = Words(), Words()
    long, short = torch.randint(9, (6, 7)), torch.randint(9, (4, 1))
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    training = pp.pipeline(model, (long[:2],), targets=long[:2], loss=loss, microbatches=3)
    decoding = pp.pipeline(model, (short[:2],), microbatches=2)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.05) for one in (model, twin)]
    for _ in range(3):
        training.step(long, targets=long)
        loss(twin(long), long).backward()
        torch.testing.assert_close(decoding(short), twin(short).detach(), rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(decoding(short), twin(short).detach(), rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_one_model_under_one_schedule_after_the_other_has_all_gradients_each_time() -> None:  # UR-086
    model, plain = SkipToTwo(), setup_of(SkipToTwo())
    plain_loop(plain, MICROBATCHES)
    setup = setup_of(model)
    names = ("zero_bubble(h1)", "1f1b", "zero_bubble(h2)", "gpipe", "zero_bubble(h1)")
    for schedule in names:
        pipeline_of(setup, MICROBATCHES, schedule=schedule).step(*setup.args, targets=setup.targets)
        assert_close(gradients(model), gradients(plain.model))
        model.zero_grad()


def test_a_returned_loss_and_outputs_hold_no_graph_and_no_other_memory() -> None:  # UR-085
    setup = setup_of(SkipToTwo())
    pipe = pipeline_of(setup, MICROBATCHES)
    result = pipe.step(*setup.args, targets=setup.targets, outputs="all")
    for tensor in (result.loss, result.outputs):
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    # They are the caller's: what is written to them changes nothing.
    result.outputs.zero_()
    again = pipe.evaluate(*setup.args, targets=setup.targets, outputs="all")
    assert again.outputs.abs().sum() > 0
