"""The synthetic twins: a small random model of each family, as one row of config arguments. No torch here.

All share a width of 128, 4 heads over 2 key-value heads of 32, and 512 words, unless the family says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# 0.09 is 1/sqrt(128): activations keep their size through the layers, so that greedy choices are not near-ties.
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.09,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WITHOUT_GROUPS = ("num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class Twin:
    """`model_type` of transformers, what differs from the common arguments, and which of those it does not take."""

    model_type: str
    own: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()

    def kwargs(self) -> dict[str, Any]:
        """The arguments of its config class.

        >>> TWINS["llama"].kwargs()["num_key_value_heads"]
        2
        """
        return {k: v for k, v in _COMMON.items() if k not in self.drop} | dict(self.own)


_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _SLIDING,
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}
_GPT2: dict[str, Any] = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 2048, "n_inner": 256}
_SIZES_OF_GPT2 = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_GPT2_DROPS = (*_WITHOUT_GROUPS, "hidden_size", "intermediate_size", *_SIZES_OF_GPT2)
# Scale factors that default to one, at which a forgotten one would not show.
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "intermediate_size": 64,
    "shared_intermediate_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

TWINS: dict[str, Twin] = {
    "llama": Twin("llama"),
    "mistral": Twin("mistral", {"sliding_window": None}),
    "qwen2": Twin("qwen2", drop=("head_dim",)),
    "qwen3": Twin("qwen3"),
    "gemma": Twin("gemma", {"tie_word_embeddings": True}),
    "gemma2": Twin("gemma2", _GEMMA),
    "gemma3": Twin("gemma3_text", _GEMMA),
    "gpt2": Twin("gpt2", {**_GPT2, "tie_word_embeddings": True}, drop=_GPT2_DROPS),
    "gptj": Twin("gptj", {**_GPT2, "rotary_dim": 16}, drop=_GPT2_DROPS),
    "gpt_neox": Twin("gpt_neox", {"rotary_pct": 0.25}, drop=_WITHOUT_GROUPS),
    "gpt_neox_sequential": Twin("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": False}, drop=_WITHOUT_GROUPS),
    # vLLM's class knows no groups of query heads.
    "phi": Twin("phi", {"intermediate_size": 512}, drop=_WITHOUT_GROUPS),
    "phi3": Twin("phi3", {"sliding_window": None}, drop=("head_dim",)),
    "olmo2": Twin("olmo2", drop=("head_dim",)),
    "olmo3": Twin("olmo3", {"num_hidden_layers": 4, "layer_types": _SLIDING, "sliding_window": 16}, drop=("head_dim",)),
    "granite": Twin("granite", _GRANITE, drop=("head_dim",)),
    # Mamba but for every second layer, no experts.
    "granitemoehybrid": Twin("granitemoehybrid", {**_GRANITE, **_MAMBA}, drop=("head_dim",)),
    "stablelm": Twin("stablelm", drop=("head_dim",)),
    "stablelm_parallel": Twin("stablelm", {"use_parallel_residual": True}, drop=("head_dim",)),
    "starcoder2": Twin("starcoder2", {"sliding_window": None}, drop=("head_dim",)),
    "cohere": Twin("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}, drop=("head_dim",)),
    "nemotron": Twin("nemotron"),
    "opt": Twin(
        "opt",
        {"ffn_dim": 256, "word_embed_proj_dim": 128, "tie_word_embeddings": True},
        drop=(*_WITHOUT_GROUPS, "intermediate_size"),
    ),
    "opt_post_ln": Twin(
        "opt",
        {"ffn_dim": 256, "word_embed_proj_dim": 128, "tie_word_embeddings": True, "do_layer_norm_before": False},
        drop=(*_WITHOUT_GROUPS, "intermediate_size"),
    ),
    "bloom": Twin(
        "bloom",
        {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True},
        drop=(*_WITHOUT_GROUPS, "intermediate_size", *_SIZES_OF_GPT2),
    ),
    "smollm3": Twin("smollm3", {"no_rope_layers": [1, 0, 1]}, drop=("head_dim",)),
    "qwen2_moe": Twin(
        "qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 64, "norm_topk_prob": True}, drop=("head_dim",)
    ),
    "qwen3_moe": Twin("qwen3_moe", {**_MOE, "norm_topk_prob": True}),
    "mixtral": Twin("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The first layer dense, latent attention without and with a compressed query.
    "deepseek_v2": Twin("deepseek_v2", _DEEPSEEK, drop=_WITHOUT_GROUPS),
    "deepseek_v2_q_lora": Twin("deepseek_v2", {**_DEEPSEEK, "q_lora_rank": 48}, drop=_WITHOUT_GROUPS),
    # Gated delta nets but for every second layer.
    "qwen3_next": Twin(
        "qwen3_next", {**_DELTA_NET, **_MOE, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]}
    ),
    "qwen3_5": Twin("qwen3_5_text", _DELTA_NET),
    "olmoe": Twin("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, drop=("head_dim",)),
}
