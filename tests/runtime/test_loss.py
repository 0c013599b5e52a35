from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp

LENGTH, WORDS = 6, 5


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)

    def forward(self, x):
        with pp.stage(0):
            h = self.table(x)
        with pp.stage(1):
            h = torch.tanh(self.inner(h)) + h
        with pp.stage(2):
            return self.head(h)


class Labelled(Tagger):
    """Computes its own loss, of each word's prediction of the next one."""

    def forward(self, x, labels):
        logits = super().forward(x)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def cross_entropy(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def summed(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def batch(counts: tuple[int, ...] = (6, 1, 0, 5)) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with so many targets that count."""
    torch.manual_seed(4)
    x, y = torch.randint(WORDS, (len(counts), LENGTH)), torch.randint(WORDS, (len(counts), LENGTH))
    for row, count in enumerate(counts):
        y[row, count:] = -100
    return x, y


def tagger(kind: type[nn.Module] = Tagger) -> nn.Module:
    torch.manual_seed(5)
    return kind().double()


def close(one, two):
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-14)


def same_gradients(one: nn.Module, two: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            close(p.grad, q.grad)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(("loss", "reduction"), [(cross_entropy, "token_mean"), (summed, pp.TokenMean(of="sum"))])
def test_token_mean_is_the_mean_over_the_whole_batch(loss, reduction, microbatches: int) -> None:  # UR-042, UR-044
    x, y = batch()
    model, whole = tagger(), tagger()
    rows = len(x) // microbatches
    pipe = pp.pipeline(
        model, (x[:rows],), targets=y[:rows], loss=loss, microbatches=microbatches, reduction=reduction
    )  # fmt: skip
    expected = cross_entropy(whole(x), y)
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = pipe.step(x, targets=y)
    close(result.loss, expected.detach())
    same_gradients(model, whole)
    close(pipe.evaluate(x, targets=y).loss, expected.detach())


def test_several_steps_add_their_gradients_and_none_is_scaled_twice() -> None:  # UR-040
    model, whole = tagger(), tagger()
    x, y = batch()
    pipe = pp.pipeline(
        model, (x[:1],), targets=y[:1], loss=cross_entropy, microbatches=4, reduction="token_mean"
    )  # fmt: skip
    for counts in ((6, 1, 0, 5), (1, 1, 1, 1), (6, 6, 6, 3)):
        x, y = batch(counts)
        cross_entropy(whole(x), y).backward()
        pipe.step(x, targets=y)
    same_gradients(model, whole)


def test_another_ignored_value_another_tensor_and_shifted_labels() -> None:
    x, y = batch((6, 2, 3, 5))
    model, whole = tagger(Labelled), tagger(Labelled)
    options = {"loss": None, "microbatches": 4}
    pipe = pp.pipeline(model, (x[:1], y[:1]), reduction=pp.TokenMean(target="labels", shift=1), **options)
    expected = whole(x, y)
    expected.backward()
    close(pipe.step(x, y).loss, expected.detach())
    same_gradients(model, whole)

    padded = torch.where(y == -100, 0, y)
    loss = lambda out, t: functional.cross_entropy(out.flatten(0, 1), t.flatten(), ignore_index=0)  # noqa: E731
    model, whole = tagger(), tagger()
    pipe = pp.pipeline(
        model, (x[:1],), targets=y[:1], loss=loss, microbatches=4, reduction=pp.TokenMean(ignore_index=0)
    )  # fmt: skip
    expected = loss(whole(x), padded)
    close(pipe.step(x, targets=padded).loss, expected.detach())


def test_when_all_targets_are_ignored_it_is_as_torch_has_it() -> None:
    x, y = batch((0, 0, 0, 0))
    model, whole = tagger(), tagger()
    pipe = pp.pipeline(
        model, (x[:1],), targets=y[:1], loss=cross_entropy, microbatches=4, reduction="token_mean"
    )  # fmt: skip
    expected = cross_entropy(whole(x), y)
    expected.backward()
    with pytest.warns(pp.PpdslWarning, match="is nan in micro-batches"):
        assert pipe.step(x, targets=y).loss.isnan()
    assert expected.isnan()
    same_gradients(model, whole)
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())

    pipe = pp.pipeline(
        tagger(), (x[:1],), targets=y[:1], loss=summed, microbatches=4, reduction=pp.TokenMean(of="sum")
    )  # fmt: skip
    assert pipe.step(x, targets=y).loss.item() == 0.0


def test_a_plain_mean_warns_when_targets_are_ignored_unequally() -> None:  # UR-042
    x, y = batch((6, 1, 2, 5))
    pipe = pp.pipeline(tagger(), (x[:1],), targets=y[:1], loss=cross_entropy, microbatches=4)
    with pytest.warns(pp.PpdslWarning, match="From 0 to 5 targets of a micro-batch in `targets.*` are -100"):
        loss = pipe.step(x, targets=y).loss
    whole = tagger()
    close(loss, torch.stack([cross_entropy(whole(x[m : m + 1]), y[m : m + 1]) for m in range(4)]).mean().detach())


def test_a_batch_without_integer_targets_says_what_to_name() -> None:
    x = torch.randn(4, 3)
    pipe = pp.pipeline(
        nn.Linear(3, 1), (x[:2],), targets=x[:2, :1], loss=functional.mse_loss, microbatches=2, reduction="token_mean"
    )  # fmt: skip
    with pytest.raises(pp.CallError, match="token_mean needs one target of integers, but the call has none"):
        pipe.step(x, targets=x[:, :1])
    with pytest.raises(ValueError, match="of is 'median'"):
        pp.TokenMean(of="median")


class Experts(nn.Module):
    """Returns side losses of stages 0 and 2 beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        with pp.stage(0):
            h = self.a(x)
            first = h.square().mean()
        with pp.stage(1):
            h = torch.tanh(self.b(h))
        with pp.stage(2):
            h = self.c(h)
            second = h.square().mean()
        with pp.stage(3):
            return self.d(h), (first, second)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_side_losses_that_the_model_returns_reach_their_stages(ranks: int, microbatches: int) -> None:  # UR-045
    def loss(output, target):
        return functional.mse_loss(output[0], target) + 0.1 * sum(output[1])

    torch.manual_seed(6)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    torch.manual_seed(7)
    model = Experts().double()
    torch.manual_seed(7)
    whole = Experts().double()
    rows = 8 // microbatches
    pipe = pp.pipeline(
        model, (x[:rows],), targets=y[:rows], loss=loss, microbatches=microbatches,
        placement={key: key % ranks for key in range(4)},
    )  # fmt: skip
    expected = loss(whole(x), y)
    expected.backward()
    close(pipe.step(x, targets=y).loss, expected.detach())
    same_gradients(model, whole)


def test_a_spec_asks_for_the_mean_over_tokens(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
            self.double()

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(words))

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    spec = tmp_path / "words.ppspec"
    spec.write_text("pipeline words { loss = token_mean microbatches = 4 stage a { table } stage b { rest } }")
    words = torch.arange(40).reshape(8, 5) % 7
    targets = words.clone()
    targets[0], targets[3, :2] = -100, -100
    model, plain = Words(), Words()
    pipe = pp.pipeline(model, (words[:2],), targets=targets[2:4], loss=loss, spec=spec)
    result = pipe.step(words, targets=targets)
    expected = loss(plain(words), targets)
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
