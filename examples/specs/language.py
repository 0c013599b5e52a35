"""Hugging Face models for the specs beside this file: small configurations, random weights, nothing marked.

ppdsl check examples/specs/llama.ppspec --model examples/specs/language.py:llama
ppdsl graph --spec examples/specs/t5.ppspec --model examples/specs/language.py:t5

Needs transformers: pip install 'ppdsl[models]'. Dropout is off, so that a step can be compared with the whole model's.
"""

import torch
import transformers as hf

WORDS, LENGTH = 32, 12
SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**SMALL, "num_hidden_layers": 8, "num_key_value_heads": 2, "use_cache": False}


def tokens(rows, length=LENGTH):
    """Random words, never the one that pads."""
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(1))


def made(build, config, kwargs):
    """The model in double precision, in train mode, and the arguments of one micro-batch."""
    torch.manual_seed(0)
    model = build(config).double().train()
    doubles = {name: value.double() if value.is_floating_point() else value for name, value in kwargs.items()}
    return {"model": model, "args": (), "kwargs": doubles}


def gpt2(rows=2):
    """Twelve blocks; the output layer is tied to the embedding."""
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=12, n_head=4, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    words = tokens(rows)
    call = made(hf.GPT2LMHeadModel, config, {"input_ids": words, "labels": words})
    call["model"].loss_type = "ForCausalLM"  # what it takes anyway; saying so spares a warning
    return call


def llama(rows=2):
    """Eight layers that share one table of rotary positions."""
    words = tokens(rows)
    return made(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER), {"input_ids": words, "labels": words})


def mixtral(rows=2):
    """Eight layers of experts; the routers' own loss is part of the model's."""
    config = hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    config._experts_implementation = "eager"  # noqa: SLF001 - grouped products know no double precision
    words = tokens(rows)
    return made(hf.MixtralForCausalLM, config, {"input_ids": words, "labels": words})


def bert(rows=2):
    """An encoder that guesses masked words; its decoder is tied to the embedding."""
    config = hf.BertConfig(**SMALL, num_hidden_layers=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    words = tokens(rows)
    mask = torch.ones_like(words)
    mask[:, -2:] = 0
    return made(hf.BertForMaskedLM, config, {"input_ids": words, "attention_mask": mask, "labels": words})


def t5(rows=2):
    """Encoder and decoder; every layer of the decoder uses what the encoder says."""
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=4, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    words = tokens(rows)
    return made(hf.T5ForConditionalGeneration, config, {"input_ids": words, "labels": words.flip(1)})


def vit(rows=2):
    """A vision transformer of eight layers."""
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=8, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
    )  # fmt: skip
    images = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return made(hf.ViTForImageClassification, config, {"pixel_values": images, "labels": torch.arange(rows) % 5})


def whisper(rows=2):
    """Speech to text: an encoder of sound, a decoder of words."""
    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.randn(rows, 8, 32, generator=torch.Generator().manual_seed(3))
    return made(hf.WhisperForConditionalGeneration, config, {"input_features": sound, "labels": tokens(rows)})


def clip(rows=4):
    """Two towers that know nothing of each other until their embeddings are compared."""
    tower = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
    config = hf.CLIPConfig(
        text_config={
            "vocab_size": WORDS, "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 0, **tower,
        },
        vision_config={"image_size": 16, "patch_size": 4, **tower},
        projection_dim=8,
    )  # fmt: skip
    words = tokens(rows)
    words[:, -1] = 2
    images = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return made(hf.CLIPModel, config, {"input_ids": words, "pixel_values": images, "return_loss": torch.tensor(True)})


def mamba(rows=2):
    """Eight state-space layers."""
    config = hf.MambaConfig(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_cache=False,
    )  # fmt: skip
    words = tokens(rows)
    return made(hf.MambaForCausalLM, config, {"input_ids": words, "labels": words})
