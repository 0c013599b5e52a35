"""Models of transformers to measure with, unchanged: marked from outside, in four stages.

Torch's traced stages refuse both under the schedules that are measured here, so that beside ppdsl stands only the
computation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp
from tests.benchmarks.workloads import Part, Workload

__all__ = ["HUGGING_FACE"]

_LAYERS, _WIDTH, _LENGTH, _WORDS = 8, 128, 64, 1000


def _gpt2(stages: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_WORDS, n_positions=_LENGTH, n_embd=_WIDTH, n_layer=_LAYERS, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    return _marked(model, model.transformer.h, stages)


def _llama(stages: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_WORDS, max_position_embeddings=_LENGTH, hidden_size=_WIDTH, intermediate_size=3 * _WIDTH,
        num_hidden_layers=_LAYERS, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return _marked(model, model.model.layers, stages)


def _marked(model: Any, blocks: Any, stages: int) -> nn.Module:
    for stage in range(1, stages):
        pp.begin(blocks[stage * len(blocks) // stages], stage)
    marked: nn.Module = model
    return marked


def _parts_of_gpt2(model: Any) -> list[Part]:
    inner, positions = model.transformer, torch.arange(_LENGTH, device=model.device).unsqueeze(0)
    return _parts(
        inner.h,
        before=lambda ids: inner.wte(ids) + inner.wpe(positions),
        block=lambda block, h: block(h, None, None, position_ids=positions),
        after=lambda h: model.lm_head(inner.ln_f(h)),
    )


def _parts_of_llama(model: Any) -> list[Part]:
    inner, positions = model.model, torch.arange(_LENGTH, device=model.device).unsqueeze(0)
    turns = inner.rotary_emb(torch.zeros(1, _LENGTH, _WIDTH, device=model.device), position_ids=positions)
    return _parts(
        inner.layers,
        before=inner.embed_tokens,
        block=lambda block, h: block(h, attention_mask=None, position_embeddings=turns, position_ids=positions),
        after=lambda h: model.lm_head(inner.norm(h)),
    )


def _parts(
    blocks: Any,
    before: Callable[[Tensor], Tensor],
    block: Callable[[Any, Tensor], Any],
    after: Callable[[Tensor], Tensor],
) -> list[Part]:
    def part(stage: int, stages: int = 4) -> Part:
        mine = [blocks[i] for i in range(stage * len(blocks) // stages, (stage + 1) * len(blocks) // stages)]

        def run(h: Tensor) -> Tensor:
            h = before(h) if stage == 0 else h
            for one in mine:
                made = block(one, h)
                h = made[0] if isinstance(made, tuple) else made
            return after(h) if stage == stages - 1 else h

        return Part(stage, run, ("x" if stage == 0 else f"h{stage - 1}",), (f"h{stage}",))

    return [part(stage) for stage in range(4)]


def _tokens(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(_WORDS, (rows, _LENGTH), generator=generator)
    return ids, ids.roll(-1, 1)


def _loss(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


HUGGING_FACE = {
    workload.name: workload
    for workload in (
        Workload("hf_gpt2", _gpt2, _tokens, _loss, 2, _parts_of_gpt2, chain=False),
        Workload("hf_llama", _llama, _tokens, _loss, 2, _parts_of_llama, chain=False),
    )
}
"""By name; the models are built, and transformers is loaded, when one is asked for."""
