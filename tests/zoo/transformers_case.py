"""How models of Hugging Face transformers are built small, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Call, Case, Mark, cuts

__all__ = [
    "DECODER",
    "LAYERS",
    "SMALL",
    "VOCABULARY",
    "captions",
    "layer_cuts",
    "pixels",
    "sequences",
    "speech_features",
    "text",
    "transformers_case",
    "waveforms",
]

BATCH, LENGTH, VOCABULARY = 2, 16, 96

Prepare = Callable[[Any], None]


def _build(
    model: str,
    config: str,
    /,
    *,
    attention: str | None = None,
    experts: str | None = None,
    prepare: Prepare | None = None,
    **options: object,
) -> nn.Module:
    import transformers  # the import takes seconds

    settings = getattr(transformers, config)(**options)
    if attention is not None:
        settings._attn_implementation = attention
    if experts is not None:
        settings._experts_implementation = experts
    built: nn.Module = getattr(transformers, model)(settings)
    if prepare is not None:
        prepare(built)
    return built


def _generator(microbatch: int) -> torch.Generator:
    return torch.Generator().manual_seed(300 + microbatch)


def _padding(microbatch: int, length: int = LENGTH) -> torch.Tensor:
    """Return a mask with padding on the right of the second sequence, more of it in later micro-batches."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, length - 3 - microbatch :] = 0
    return mask


def text(microbatch: int, *, mask: bool = True, labels: bool = True, **options: object) -> Call:
    """Return token ids, a padding mask and, as labels, the ids with -100 at the padding."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=_generator(microbatch))
    padding = _padding(microbatch)
    kwargs: dict[str, object] = {"input_ids": tokens, **options}
    if mask:
        kwargs["attention_mask"] = padding
    if labels:
        kwargs["labels"] = tokens.masked_fill(padding == 0, -100) if mask else tokens.clone()
    return Call(kwargs=kwargs)


def sequences(microbatch: int) -> Call:
    """Return what an encoder-decoder takes: source tokens with a mask, and target tokens as labels."""
    call = text(microbatch)
    targets = torch.randint(3, VOCABULARY, (BATCH, 12), generator=_generator(microbatch + 50))
    return Call(kwargs={**call.kwargs, "labels": targets})


def pixels(microbatch: int, size: int) -> Call:
    """Return images with their classes."""
    generator = _generator(microbatch)
    images = torch.randn(BATCH, 3, size, size, generator=generator)
    return Call(kwargs={"pixel_values": images, "labels": torch.randint(0, 5, (BATCH,), generator=generator)})


def speech_features(microbatch: int) -> Call:
    """Return spectrograms with their transcripts."""
    generator = _generator(microbatch)
    features = torch.randn(BATCH, 16, 32, generator=generator)
    return Call(
        kwargs={"input_features": features, "labels": torch.randint(3, VOCABULARY, (BATCH, 8), generator=generator)}
    )


def waveforms(microbatch: int) -> Call:
    """Return sound with padding, and its transcripts."""
    generator = _generator(microbatch)
    mask = torch.ones(BATCH, 640, dtype=torch.int64)
    mask[1, 600 - 8 * microbatch :] = 0
    return Call(
        kwargs={
            "input_values": torch.randn(BATCH, 640, generator=generator),
            "attention_mask": mask,
            "labels": torch.randint(1, 20, (BATCH, 4), generator=generator),
        }
    )


def captions(microbatch: int) -> Call:
    """Return pairs of text and image for a contrastive loss."""
    tokens = text(microbatch, labels=False)
    images = torch.randn(BATCH, 3, 32, 32, generator=_generator(microbatch))
    return Call(kwargs={**tokens.kwargs, "pixel_values": images, "return_loss": True})


def transformers_case(
    name: str,
    family: str,
    marks: tuple[Mark, ...],
    call: Callable[[int], Call] = text,
    *,
    head: str = "ForCausalLM",
    config: str | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    refused_in_eval: tuple[str, ...] = (),
    refused_in_train: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """Return the case of one class of transformers, `{family}{head}`, with its configuration's options."""
    make = partial(_build, f"{family}{head}", config or f"{family}Config", **options)
    return Case(
        name,
        make,
        call,
        marks,
        loss=loss,
        packages=("transformers",),
        refused_in_eval=refused_in_eval,
        refused_in_train=refused_in_train,
    )


def layer_cuts(layers: str) -> tuple[Mark, ...]:
    """Return marks that begin a stage at layers 1, 2 and 3 of a list of layers."""
    return cuts(*(f"{layers}.{index}" for index in (1, 2, 3)))


LAYERS = cuts("model.layers.1", "model.layers.2", "model.layers.3")

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False}
