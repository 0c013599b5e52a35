"""Traps around gradient paths and structures that are no plain comparison: errors, optimizers, models of a library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.diagnostics import CallError, RecordingError
from tests.trust.entry import ROWS, Entry, Setup, differences, pipeline_of
from tests.trust.graphs import WIDTH, Layers, NoParameters, OnlyFirstLearns, mean_square, numbers, plain
from tests.trust.structures import Mode, containers

MICROBATCHES = 3


class Counting(Layers):
    """Uses a value in every other call only, as a Python counter says."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        with pp.stage(0):
            h, t = self.a(x), self.b(x)
        with pp.stage(1):
            h = self.c(h)
        with pp.stage(2):
            return self.d(h) + t if self.calls % 2 else self.d(h)


def test_a_branch_that_python_counts_is_refused() -> None:  # UR-019
    x = numbers(1, WIDTH)
    with pytest.raises(RecordingError, match="Two recordings of the same micro-batch differ here"):
        pp.record(Counting(), x)


@pytest.mark.parametrize("model", [NoParameters, OnlyFirstLearns])
def test_a_rank_without_parameters_has_an_optimizer_like_the_others(model: type[Layers]) -> None:  # UR-023, UR-046
    setup, twin = plain(model)(MICROBATCHES), plain(model)(MICROBATCHES)
    pipe = pipeline_of(setup, MICROBATCHES)
    ranks = []
    for stage in pipe.graph.stages:
        names = [name for name in stage.parameters if setup.model.get_parameter(name).requires_grad]
        # A list of one group may be empty; an empty list of parameters torch refuses.
        optimizer = torch.optim.AdamW([{"params": [setup.model.get_parameter(name) for name in names]}], lr=0.1)
        ranks.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)))
    single = torch.optim.AdamW([p for p in twin.model.parameters() if p.requires_grad], lr=0.1)
    other = torch.optim.lr_scheduler.StepLR(single, 1)
    for _ in range(2):
        pipe.step(*setup.args, targets=setup.targets)
        parts = [torch.split(tensor, ROWS) for tensor in (*twin.args, *twin.targets)]
        for x, y in zip(*parts, strict=True):
            (mean_square(twin.model(x), y) / MICROBATCHES).backward()
        for optimizer, scheduler in [*ranks, (single, other)]:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(setup.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_list_of_micro_batches_is_no_batch() -> None:  # UR-038
    setup = plain(NoParameters)(MICROBATCHES)
    pipe = pipeline_of(setup, MICROBATCHES)
    pieces = list(setup.args[0].split(ROWS))
    with pytest.raises(CallError, match=r"Argument `x` is a list .*recorded a tensor|`x`"):
        pipe.step(pieces, targets=setup.targets)
    with pytest.raises(CallError):
        pipe.step(*pieces, targets=setup.targets)
    pipe.step(*setup.args, targets=setup.targets)


def test_values_that_are_no_tensors_are_constants_that_are_looked_at() -> None:  # UR-032
    setup = containers(MICROBATCHES)
    pipe = pipeline_of(setup, MICROBATCHES)
    (batch,) = setup.args
    pipe.step(batch, targets=setup.targets, scale=3.0)
    with pytest.raises(CallError, match="scale"):
        pipe.step(batch, targets=setup.targets, scale=4.0)
    with pytest.raises(CallError, match="batch"):
        pipe.step({"x": batch["x"]}, targets=setup.targets, scale=3.0)
    with pytest.raises(CallError, match="mode"):
        pipe.step(batch, Mode.FAST, targets=setup.targets, scale=3.0)
    pipe.step(batch, targets=setup.targets, scale=3.0)


def test_keys_in_another_order_are_not_taken_for_the_same() -> None:  # UR-033
    setup = containers(MICROBATCHES)
    pipe = pipeline_of(setup, MICROBATCHES)
    (batch,) = setup.args
    with pytest.raises(CallError, match="Argument `batch` has its keys in another order"):
        pipe.step(dict(reversed(batch.items())), targets=setup.targets, scale=3.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_input_is_made_to_require_a_gradient(recompute: bool) -> None:  # UR-031
    setup = plain(NoParameters)(MICROBATCHES)
    pipe = pipeline_of(setup, MICROBATCHES, recompute=recompute)
    pipe.step(*setup.args, targets=setup.targets)
    for tensor in (*setup.args, *setup.targets):
        assert not tensor.requires_grad
        assert tensor.grad is None


# ---------------------------------------------------------------- a model of a library


def gpt2(microbatches: int) -> Setup:
    """A small GPT-2 of the library, cut after its first block; labels go to its own loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=6, n_embd=8, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()
    pp.begin(model.transformer.h[1], 1)
    pp.begin(model.transformer.ln_f, 2)
    words = torch.randint(11, (ROWS * microbatches, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(words)
    mask[::2, 4:] = 0
    return Setup(model, (), {"input_ids": words, "attention_mask": mask, "labels": words})


def test_gpt2_trains_like_the_plain_loop() -> None:  # UR-027, UR-035, UR-036
    assert differences(Entry("gpt2", ("UR-027",), gpt2), 2) == []


def test_a_batch_of_a_tokenizer_is_given_by_name() -> None:  # UR-037
    transformers = pytest.importorskip("transformers")
    setup = gpt2(2)
    pipe = pipeline_of(setup, 2)
    encoding = transformers.BatchEncoding(setup.kwargs)
    torch.testing.assert_close(pipe.evaluate(**encoding).loss, pipe.evaluate(**setup.kwargs).loss)


class Names(nn.Module):
    """A refused value between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            places = (h > 0).nonzero()
        with pp.stage(1):
            return self.b(h) + places.sum()


def test_a_value_that_cannot_cross_is_named_with_its_line() -> None:  # UR-027
    with pytest.raises(RecordingError, match="nonzero") as caught:
        pp.record(Names(), torch.zeros(ROWS, WIDTH))
    assert "test_paths.py" in str(caught.value)
