"""After training, and between steps, `pipe.module` is the plain model with all its methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import GPT2LMHeadModel

import ppdsl as pp
from tests.runtime.gpt2_curves import batches, gpt2, next_bytes, optimizer_of, piped

STEPS = 3


def whole() -> GPT2LMHeadModel:
    """Return the model that the plain loop has trained."""
    model = gpt2()
    optimizer = optimizer_of(model.parameters())
    for tokens in batches(STEPS):
        next_bytes(model(input_ids=tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture
def trained() -> tuple[pp.Pipeline, GPT2LMHeadModel]:
    pipe = piped(gpt2(), "interleaved", 2)
    optimizer = optimizer_of(pipe.parameters())
    for tokens in batches(STEPS):
        pipe.step(input_ids=tokens, targets=tokens)
        optimizer.step()
        optimizer.zero_grad()
    return pipe, whole()


def test_it_is_the_users_own_object_and_computes_what_the_plain_one_computes(
    trained: tuple[pp.Pipeline, GPT2LMHeadModel],
) -> None:
    pipe, plain = trained
    (tokens,) = batches(1)
    assert type(pipe.module) is GPT2LMHeadModel
    torch.testing.assert_close(pipe.module(tokens).logits, plain(tokens).logits, rtol=1e-9, atol=1e-11)
    # Another number of rows, another length, a cache, gradients of its own: all that the pipeline was not built for.
    own = pipe.module(tokens[:3, :5], labels=tokens[:3, :5], use_cache=True)
    own.loss.backward()
    assert own.past_key_values is not None
    assert pipe.module.lm_head.weight.grad is not None


def test_it_generates_between_steps(trained: tuple[pp.Pipeline, GPT2LMHeadModel]) -> None:
    pipe, plain = trained
    (tokens,) = batches(1)
    prompt = tokens[:2, :4]
    for model in (pipe.module, plain):
        model.eval()
        model.generation_config.pad_token_id = 0
    for beams in (1, 2):
        ours, theirs = (
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, num_beams=beams)
            for model in (pipe.module, plain)
        )
        assert torch.equal(ours, theirs)
        assert ours.shape == (2, 12)
    pipe.module.train()
    plain.train()
    assert pipe.step(input_ids=tokens, targets=tokens).loss.item() == pytest.approx(
        next_bytes(plain(input_ids=tokens), tokens).item(), rel=1e-10
    )


def test_it_is_saved_and_found_again_by_its_own_library(
    trained: tuple[pp.Pipeline, GPT2LMHeadModel], tmp_path: Path
) -> None:
    pipe, plain = trained
    (tokens,) = batches(1)
    pipe.module.save_pretrained(tmp_path / "own")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "own", dtype=torch.float64)
    assert again.lm_head.weight is again.transformer.wte.weight
    torch.testing.assert_close(again(tokens).logits, plain(tokens).logits, rtol=1e-9, atol=1e-11)
    # What it wrote fills a pipeline, and what a pipeline writes it reads.
    with torch.device("meta"):
        other = piped(gpt2(), "zbv", 2)
    pp.materialize(other, tmp_path / "own")
    assert all(torch.equal(a, b) for a, b in zip(other.module.parameters(), again.parameters(), strict=True))
    (tmp_path / "own" / "model.safetensors").unlink()
    pp.export_safetensors(pipe, tmp_path / "own" / "model.safetensors")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "own", dtype=torch.float64)
    torch.testing.assert_close(again(tokens).logits, plain(tokens).logits, rtol=1e-9, atol=1e-11)


def test_its_hooks_and_forward_are_not_left_changed(trained: tuple[pp.Pipeline, GPT2LMHeadModel]) -> None:
    pipe, _ = trained
    fresh = gpt2()
    assert pipe.module.forward.__func__ is type(fresh).forward
    for ours, theirs in zip(pipe.module.modules(), fresh.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert "forward" not in vars(ours)
        assert len(ours._backward_hooks) == len(theirs._backward_hooks)
