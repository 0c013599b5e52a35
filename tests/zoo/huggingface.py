"""The models of Hugging Face transformers in the table, from small configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.zoo.case import Call, Case, Mark, cuts
from tests.zoo.transformers_case import (
    DECODER,
    LAYERS,
    SMALL,
    VOCABULARY,
    captions,
    layer_cuts,
    pixels,
    sequences,
    speech_features,
    text,
    transformers_case,
    waveforms,
)

__all__ = ["HUGGINGFACE_CASES"]

_GEMMA: dict[str, Any] = {**DECODER, "head_dim": 8, "sliding_window": 8}
_EXPERTS: dict[str, Any] = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    **DECODER,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _llama(name: str, call: Callable[[int], Call] = text, **options: Any) -> Case:
    return transformers_case(name, "Llama", LAYERS, call, **{**DECODER, **options})


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


def _decoders() -> tuple[Case, ...]:
    gpt2_cuts = cuts("transformer.h.1", "transformer.h.2", "transformer.h.3")
    return (
        transformers_case("gpt2", "GPT2", gpt2_cuts, head="LMHeadModel", use_cache=False, **_GPT2),
        _llama("llama"),
        _llama("llama_nomask", partial(text, mask=False)),
        _llama("llama_eager_attn", attention="eager"),
        transformers_case("mistral", "Mistral", LAYERS, **DECODER, sliding_window=8),
        transformers_case("qwen2", "Qwen2", LAYERS, **DECODER),
        transformers_case("qwen3", "Qwen3", LAYERS, **DECODER, head_dim=8),
        transformers_case(
            "bloom",
            "Bloom",
            cuts("transformer.h.1", "transformer.h.2", "transformer.h.3"),
            vocab_size=VOCABULARY,
            hidden_size=32,
            n_layer=4,
            n_head=4,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            use_cache=False,
        ),
        transformers_case(
            "opt",
            "OPT",
            cuts("model.decoder.layers.1", "model.decoder.layers.2", "model.decoder.layers.3"),
            **{**SMALL, "word_embed_proj_dim": 32, "ffn_dim": 48, "use_cache": False},
        ),
        transformers_case("gemma", "Gemma", LAYERS, **DECODER, head_dim=8),
        transformers_case("gemma2", "Gemma2", LAYERS, **_GEMMA),
        transformers_case("gemma3", "Gemma3", LAYERS, config="Gemma3TextConfig", **_GEMMA),
        transformers_case(
            "falcon",
            "Falcon",
            cuts("transformer.h.1", "transformer.h.2", "transformer.h.3"),
            **{**SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False},
        ),
        transformers_case(
            "gpt_neox",
            "GPTNeoX",
            cuts("gpt_neox.layers.1", "gpt_neox.layers.2", "gpt_neox.layers.3"),
            **{**SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False},
        ),
        transformers_case("phi3", "Phi3", LAYERS, **DECODER, resid_pdrop=0.1),
        _llama("llama_cache", use_cache=True),
        transformers_case("gpt2_cache", "GPT2", gpt2_cuts, head="LMHeadModel", use_cache=True, **_GPT2),
        _llama(
            "llama_hidden_attn_out",
            partial(text, output_hidden_states=True, output_attentions=True),
            attention="eager",
        ),
        _llama("llama_grad_ckpt", prepare=_checkpointed),
    )


def _experts() -> tuple[Case, ...]:
    return (
        transformers_case("mixtral", "Mixtral", LAYERS, **_EXPERTS, output_router_logits=True),
        transformers_case("mixtral_eager_experts", "Mixtral", LAYERS, experts="eager", **_EXPERTS),
        transformers_case(
            "qwen3_moe",
            "Qwen3Moe",
            LAYERS,
            **DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
        transformers_case("gpt_oss", "GptOss", LAYERS, **_EXPERTS, head_dim=8, sliding_window=8),
        transformers_case("deepseek_v3", "DeepseekV3", LAYERS, **_DEEPSEEK),
        transformers_case("deepseek_v3_eager_experts", "DeepseekV3", LAYERS, experts="eager", **_DEEPSEEK),
        transformers_case(
            "qwen3_next",
            "Qwen3Next",
            LAYERS,
            **DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    )


def _state_space() -> tuple[Case, ...]:
    layers = cuts("backbone.layers.1", "backbone.layers.2", "backbone.layers.3")
    return (
        transformers_case("mamba", "Mamba", layers, **_MAMBA),
        transformers_case("mamba2", "Mamba2", layers, **_MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    )


def _encoders() -> tuple[Case, ...]:
    masked = partial(transformers_case, head="ForMaskedLM")
    return (
        masked("bert", "Bert", layer_cuts("bert.encoder.layer"), **SMALL),
        masked("roberta", "Roberta", layer_cuts("roberta.encoder.layer"), **SMALL),
        masked(
            "distilbert",
            "DistilBert",
            layer_cuts("distilbert.transformer.layer"),
            vocab_size=VOCABULARY,
            dim=32,
            hidden_dim=48,
            n_layers=4,
            n_heads=4,
            max_position_embeddings=64,
        ),
        masked(
            "albert_call_index",
            "Albert",
            tuple(Mark("albert.encoder.albert_layer_groups.0", call, call=call) for call in (1, 2, 3)),
            **SMALL,
            embedding_size=16,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
    )


def _encoder_decoders() -> tuple[Case, ...]:
    return (
        transformers_case(
            "t5",
            "T5",
            cuts("encoder.block.1", "decoder", "decoder.block.1"),
            sequences,
            head="ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            use_cache=False,
            pad_token_id=0,
            decoder_start_token_id=0,
        ),
        transformers_case(
            "bart",
            "Bart",
            cuts("model.encoder.layers.1", "model.decoder", "model.decoder.layers.1"),
            sequences,
            head="ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=64,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        ),
        transformers_case(
            "whisper",
            "Whisper",
            cuts("model.encoder.layers.1", "model.decoder", "model.decoder.layers.1"),
            speech_features,
            head="ForConditionalGeneration",
            vocab_size=VOCABULARY,
            num_mel_bins=16,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_source_positions=16,
            max_target_positions=32,
            dropout=0.1,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
    )


def _perception() -> tuple[Case, ...]:
    return (
        transformers_case(
            "hf_vit",
            "ViT",
            cuts("vit.layers.1", "vit.layers.2", "vit.layers.3"),
            partial(pixels, size=32),
            head="ForImageClassification",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            num_labels=5,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
        transformers_case(
            "clip",
            "CLIP",
            cuts("vision_model.encoder.layers.1", "text_model", "text_model.encoder.layers.1"),
            captions,
            head="Model",
            projection_dim=16,
            text_config={**SMALL, "num_hidden_layers": 2, "attention_dropout": 0.1},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
                "attention_dropout": 0.1,
            },
        ),
        transformers_case(
            "wav2vec2_ctc",
            "Wav2Vec2",
            layer_cuts("wav2vec2.encoder.layers"),
            waveforms,
            head="ForCTC",
            # It draws its mask with numpy between modules of two stages.
            refused_in_train=("python-random", "unstable-recording"),
            vocab_size=24,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            mask_time_length=2,
            mask_time_prob=0.3,
            layerdrop=0.0,
            ctc_loss_reduction="mean",
        ),
        transformers_case(
            "hf_swin",
            "Swin",
            cuts("swin.encoder.layers.1", "swin.encoder.layers.2", "swin.encoder.layers.3"),
            partial(pixels, size=64),
            head="ForImageClassification",
            image_size=64,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1, 2, 1],
            num_heads=[2, 2, 4, 4],
            window_size=2,
            num_labels=5,
            hidden_dropout_prob=0.1,
        ),
    )


HUGGINGFACE_CASES = (
    *_decoders(),
    *_experts(),
    *_state_space(),
    *_encoders(),
    *_encoder_decoders(),
    *_perception(),
)
