"""The table of families: where each canonical point lives on each engine, or why it does not.

A new family is a few lines here. A string in place of a site is a refusal: the reason and the nearest point.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adapters.sites import Family, Head, Kind, Site, Sites

_L = "model.layers.{l}"
_OUTSIDE: Sites = {"logits": Site("", "out"), "sampled": Site("", "out")}


def _out(path: str, **k: Any) -> Site:
    return Site(path, "out", **k)


def _in(path: str, **k: Any) -> Site:
    return Site(path, "in", **{"arg": "hidden_states"} | k)


def _separate(attn: str) -> dict[str, Site | str]:
    """Three projections."""
    heads = {"q": "q", "k": "kv", "v": "kv"}
    return {p: _out(f"{attn}.{p}_proj", heads=h) for p, h in heads.items()}


def _fused(path: str, query_parts: int = 1) -> dict[str, Site | str]:
    """One projection, [q | k | v]; with two query parts, every head's query is followed by its gate."""
    part = (0, query_parts) if query_parts > 1 else None
    return {
        "q": _out(path, columns="q", heads="q", query_parts=query_parts, part=part),
        "k": _out(path, columns="k", heads="kv", query_parts=query_parts),
        "v": _out(path, columns="v", heads="kv", query_parts=query_parts),
    }


def _interleaved(path: str) -> dict[str, Site | str]:
    """One projection, [q0 k0 v0 | q1 k1 v1 | ...]."""
    return {p: _out(path, heads="q", part=(i, 3)) for i, p in enumerate("qkv")}


def _block(layer: str, attn: str, o: str, mid: str, mlp: str, pre: str, down: str) -> dict[str, Site | str]:
    """A block whose sublayers each are a module, with the residual stream in plain sight."""
    return {
        "resid_pre": _in(layer),
        "attn_in": _in(f"{layer}.{attn}"),
        "pattern": Site(f"{layer}.{attn}", "attention", "pattern"),
        "z": _in(f"{layer}.{attn}.{o}", heads="v"),
        "attn_out": _out(f"{layer}.{attn}"),
        "resid_mid": _in(f"{layer}.{mid}", held=True),
        "mlp_in": _in(f"{layer}.{mlp}"),
        "mlp_pre": _out(f"{layer}.{mlp}.{pre}"),
        "mlp_act": _in(f"{layer}.{mlp}.{down}"),
        "mlp_out": _out(f"{layer}.{mlp}"),
        "resid_post": _out(layer),
    }


def _ends(embed: str, norm: str) -> dict[str, Site | str]:
    return {"embed": _out(embed), "final_norm": _out(norm), **_OUTSIDE}


def _apart(sites: Sites, *names: str) -> dict[str, Site | str]:
    """Inputs that something else reads as well."""
    return {n: replace(s, form="replaced") for n in names if isinstance(s := sites[n], Site)}


# ---- transformers

_LLAMA_HF = {
    **_ends("model.embed_tokens", "model.norm"),
    **_block(_L, "self_attn", "o_proj", "post_attention_layernorm", "mlp", "gate_proj", "down_proj"),
    **_separate(f"{_L}.self_attn"),
}
_PHI3_HF = {
    **_LLAMA_HF,
    **_fused(f"{_L}.self_attn.qkv_proj"),
    "mlp_pre": _out(f"{_L}.mlp.gate_up_proj", columns="gate"),
}

# ---- vLLM: the residual add is fused into the next norm, which overwrites what it adds

_PAIRS: Sites = {
    "resid_pre": _in(_L, form="pair", index=1),
    "resid_mid": _in(f"{_L}.post_attention_layernorm", form="pair"),
    "resid_post": _out(_L, form="pair"),
}
_LLAMA_PLAIN_VLLM = {
    **_LLAMA_HF,
    **_fused(f"{_L}.self_attn.qkv_proj"),
    "resid_pre": _in(_L, index=1),
    "attn_in": _in(f"{_L}.self_attn", index=1),
    "pattern": Site(f"{_L}.self_attn.attn", "attention", "pattern"),
    "mlp_pre": _out(f"{_L}.mlp.gate_up_proj", columns="gate"),
}
_LLAMA_VLLM = {**_LLAMA_PLAIN_VLLM, **_PAIRS}
# vLLM's class that wraps the code of transformers: its modules with projections fused, a leading axis of one, and
# attention layers outside the module tree.
_FUSED_QKV = _fused(f"{_L}.self_attn.qkv_proj")
_FUSED_GATE: Sites = {"mlp_pre": _out(f"{_L}.mlp.gate_up_proj", columns="gate")}


def _wrapped(hf: Sites, fused: Sites = _FUSED_GATE) -> dict[str, Site | str]:
    sites = {**hf, **_FUSED_QKV, **fused}
    lead = {n: replace(s, lead=n not in _OUTSIDE) if isinstance(s, Site) else s for n, s in sites.items()}
    return {**lead, "pattern": Site("attention_instances.{l}", "attention", "pattern")}


# ---- what sets layers and configs apart

_MOE_NEURONS = (
    "each expert has neurons of its own and a token visits only some of them, so there is no one basis to index; the "
    "nearest points are router, mlp_in and mlp_out"
)
_MOE_REFUSED: Sites = {"mlp_pre": _MOE_NEURONS, "mlp_act": _MOE_NEURONS}


def _moe(hf_gate: str, vllm_gate: str) -> Kind:
    """transformers' router modules choose as well, so an edit of their logits has to make them choose again."""
    return Kind(
        {**_MOE_REFUSED, "router": _out(f"{_L}.{hf_gate}", form="router")},
        {**_MOE_REFUSED, "router": _out(f"{_L}.{vllm_gate}")},
    )


_PARALLEL_MID = (
    "attention and MLP read the same stream in parallel, so nothing lies between them; the nearest points are "
    "resid_pre and resid_post"
)
_PARALLEL = Kind({"resid_mid": _PARALLEL_MID}, {"resid_mid": _PARALLEL_MID})


def _shared_norm(hf: Sites, vllm: Sites) -> Kind:
    """Attention and MLP read one norm's output: an edit of either input must not reach the other."""
    return Kind(_apart(hf, "attn_in", "mlp_in"), _apart(vllm, "attn_in", "mlp_in")) | _PARALLEL


def _recurrent(mixer: str, what: str, **k: Any) -> Kind:
    """Layers that keep a state where others attend."""
    why = (
        f"this layer is a {what}: it keeps a recurrent state instead of attending to positions; the nearest points are "
        "attn_in and attn_out"
    )
    module = f"{_L}.{mixer}"
    sites: Sites = {
        **dict.fromkeys(("q", "k", "v", "pattern", "z"), why),
        "attn_in": _in(module),
        "attn_out": _out(module, **k),
    }
    return Kind(sites, sites)


# Norms after the sublayers: what is added to the residual is the norm's output, so attn_out and mlp_out are that.
_POST_NORMS: Sites = {
    "attn_out": _out(f"{_L}.post_attention_layernorm"),
    "mlp_out": _out(f"{_L}.post_feedforward_layernorm"),
}
_GEMMA2_HF = {**_LLAMA_HF, **_POST_NORMS, "resid_mid": _in(f"{_L}.pre_feedforward_layernorm", held=True)}
_GEMMA2_VLLM = {
    **_LLAMA_VLLM,
    **_POST_NORMS,
    "resid_mid": _in(f"{_L}.pre_feedforward_layernorm", form="pair"),
}
# transformers scales inside the embedding module, vLLM after it: what enters the first layer is the same on both.
_SCALED_EMBED: Sites = {"embed": _in("model.layers.0", form="pair", index=1)}

# No norms before the sublayers: they read the stream itself, so what they read and the stream must be kept apart.
_OLMO2_HF = {
    **_LLAMA_HF,
    **_POST_NORMS,
    "resid_mid": _in(f"{_L}.mlp", held=True),
    **_apart(_LLAMA_HF, "attn_in", "mlp_in"),
}
_OLMO3_VLLM = {
    **_LLAMA_PLAIN_VLLM,
    **{n: s for n, s in _OLMO2_HF.items() if n in ("attn_out", "mlp_out", "resid_mid", "mlp_in")},
    **_apart(_LLAMA_PLAIN_VLLM, "attn_in"),
}

# ---- families

_LLAMA = Family("llama", _LLAMA_HF, _LLAMA_VLLM)
_QWEN2_MOE = Family("qwen2_moe", _LLAMA_HF, _LLAMA_VLLM, {"moe": _moe("mlp.gate", "mlp.gate")})
_MIXTRAL = Family(
    "mixtral",
    _LLAMA_HF,
    {
        **_LLAMA_VLLM,
        "mlp_in": _in(f"{_L}.block_sparse_moe"),
        "mlp_out": _out(f"{_L}.block_sparse_moe"),
    },
    {"moe": _moe("mlp.gate", "block_sparse_moe.gate")},
)
_GATED_Q_HF: Sites = {"q": _out(f"{_L}.self_attn.q_proj", heads="q", part=(0, 2))}
_QWEN3_NEXT = Family(
    "qwen3_next",
    {**_LLAMA_HF, **_GATED_Q_HF},
    {**_LLAMA_VLLM, **_fused(f"{_L}.self_attn.qkv_proj", 2)},
    {"linear": _recurrent("linear_attn", "gated delta net"), "moe": _moe("mlp.gate", "mlp.gate")},
    defaults={"full_attention_interval": 4},
)

_LATENT = (
    "latent attention caches one compressed row per token and expands it into keys and values again at every pass, so "
    "an edit here would be forgotten at the next token; the nearest are z and "
    "m.at('model.layers.N.self_attn.kv_a_layernorm').output"
)
_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    {**_LLAMA_HF, "k": _LATENT, "v": _LATENT},
    {**_LLAMA_VLLM, "q": _LLAMA_HF["q"], "k": _LATENT, "v": _LATENT},
    {
        "moe": _moe("mlp.gate", "mlp.gate"),
        "q_lora": Kind(
            {"q": _out(f"{_L}.self_attn.q_b_proj", heads="q")},
            {"q": _out(f"{_L}.self_attn.q_b_proj", heads="q")},
        ),
    },
    defaults={"first_k_dense_replace": 0},
)

# Granite multiplies what a sublayer returns before adding it, and the product is what the point means.
_SCALED: Sites = {n: _out(f"{_L}.{m}", scale="residual_multiplier")
                  for n, m in (("attn_out", "self_attn"), ("mlp_out", "mlp"))}  # fmt: skip
_GRANITE = Family(
    "granite", {**_LLAMA_HF, **_SCALED}, {**_LLAMA_PLAIN_VLLM, **_SCALED}, head=Head(over="logits_scaling")
)
_SHARED_MLP = (
    "experts and a shared MLP read one norm's output side by side, and what they return is added up between modules; "
    "the nearest points are resid_mid and resid_post"
)
_SHARED_MLP_SITES: Sites = dict.fromkeys(("mlp_in", "router", "mlp_pre", "mlp_act", "mlp_out"), _SHARED_MLP)
# Mamba but for a few layers; the MLP is named for what it is beside experts, also where there are none.
_SCALED_HYBRID: Sites = {
    "attn_out": _SCALED["attn_out"],
    "mlp_in": _in(f"{_L}.shared_mlp"),
    "mlp_pre": _out(f"{_L}.shared_mlp.input_linear", columns="gate"),
    "mlp_act": _in(f"{_L}.shared_mlp.output_linear"),
    "mlp_out": _out(f"{_L}.shared_mlp", scale="residual_multiplier"),
}
_GRANITE_HYBRID = Family(
    "granitemoehybrid",
    {**_LLAMA_HF, **_SCALED_HYBRID},
    {**_LLAMA_PLAIN_VLLM, **_SCALED_HYBRID},
    {
        "linear": _recurrent("mamba", "Mamba recurrence", scale="residual_multiplier"),
        "moe": Kind(_SHARED_MLP_SITES, _SHARED_MLP_SITES),
    },
    head=Head(over="logits_scaling"),
)
_RUN_AS_ANOTHER = (
    "vLLM runs this config (use_parallel_residual) as a sequential one, so nothing in it is this model's; the nearest "
    "is the same point on engine='hf'"
)
_NOT_THE_MODEL: Sites = dict.fromkeys((n for n in _LLAMA_PLAIN_VLLM if n not in _OUTSIDE), _RUN_AS_ANOTHER)
_STABLELM = Family(
    "stablelm",
    _LLAMA_HF,
    _LLAMA_PLAIN_VLLM,
    {"parallel": Kind(_shared_norm(_LLAMA_HF, _LLAMA_PLAIN_VLLM).hf, _NOT_THE_MODEL)},
    defaults={"use_parallel_residual": False},
)
_COHERE = Family(
    "cohere",
    _LLAMA_HF,
    _LLAMA_PLAIN_VLLM,
    {"always": _shared_norm(_LLAMA_HF, _LLAMA_PLAIN_VLLM)},
    head=Head(times="logit_scale"),
)
_UP: Sites = {"mlp_pre": _out(f"{_L}.mlp.up_proj")}
_STARCODER2_HF = {**_LLAMA_HF, "mlp_pre": _out(f"{_L}.mlp.c_fc"), "mlp_act": _in(f"{_L}.mlp.c_proj")}

_G = "transformer.h.{l}"
_GPT2_HF = {
    **_ends("transformer.wte", "transformer.ln_f"),
    **_block(_G, "attn", "c_proj", "ln_2", "mlp", "c_fc", "c_proj"),
    **_fused(f"{_G}.attn.c_attn"),
}
_GPT2_VLLM = {**_GPT2_HF, "pattern": Site(f"{_G}.attn.attn", "attention", "pattern")}
_UPCAST = (
    "reorder_and_upcast_attn computes the probabilities inside the attention module, where nothing can reach them; the "
    "nearest points are q, k and z"
)
_NO_SEAM = (
    "this family's code in transformers computes the probabilities inside its attention module, where nothing can "
    "reach them; the nearest points are q, k and z"
)
_GPTJ_HF = {
    **_ends("transformer.wte", "transformer.ln_f"),
    **_block(_G, "attn", "out_proj", "ln_1", "mlp", "fc_in", "fc_out"),
    **_separate(f"{_G}.attn"),
    "pattern": _NO_SEAM,
}
_GPTJ_VLLM = {
    **_GPTJ_HF,
    **_fused(f"{_G}.attn.qkv_proj"),
    "resid_pre": _in(_G, index=1),
    "attn_in": _in(f"{_G}.attn", index=1),
    "pattern": Site(f"{_G}.attn.attn", "attention", "pattern"),
}
_N = "gpt_neox.layers.{l}"
_NEOX_HF = {
    **_ends("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
    **_block(_N, "attention", "dense", "post_attention_layernorm", "mlp", "dense_h_to_4h", "dense_4h_to_h"),
    **_interleaved(f"{_N}.attention.query_key_value"),
}
_NEOX_VLLM = {
    **_NEOX_HF,
    **_fused(f"{_N}.attention.query_key_value"),
    "resid_pre": _in(_N, index=1),
    "attn_in": _in(f"{_N}.attention", index=1),
    "pattern": Site(f"{_N}.attention.attn", "attention", "pattern"),
}
_PHI_HF = {
    **_ends("model.embed_tokens", "model.final_layernorm"),
    **_block(_L, "self_attn", "dense", "input_layernorm", "mlp", "fc1", "fc2"),
    **_separate(f"{_L}.self_attn"),
}
_PHI_VLLM = {
    **_PHI_HF,
    **_fused(f"{_L}.self_attn.qkv_proj"),
    "resid_pre": _in(_L, index=1),
    "attn_in": _in(f"{_L}.self_attn", index=1),
    "pattern": Site(f"{_L}.self_attn.attn", "attention", "pattern"),
}
_O = "model.decoder.layers.{l}"
_OPT_HF = {
    **_ends("model.decoder.embed_tokens", "model.decoder.final_layer_norm"),
    **_block(_O, "self_attn", "out_proj", "final_layer_norm", "fc1", "", "fc2"),
    **_separate(f"{_O}.self_attn"),
    "mlp_pre": _out(f"{_O}.fc1"),
    "mlp_act": _in(f"{_O}.fc2"),
    "mlp_out": _out(f"{_O}.fc2"),
}
_OPT_VLLM = {
    **_OPT_HF,
    **_fused(f"{_O}.self_attn.qkv_proj"),
    "pattern": Site(f"{_O}.self_attn.attn", "attention", "pattern"),
}
_POST_LN = (
    "this config normalises after each add (do_layer_norm_before is false): the next sublayer adds to a norm's output, "
    "so no sublayer's output is what the stream changes by; the nearest points are resid_pre and resid_post"
)
_POST_LN_SITES: Sites = dict.fromkeys(("attn_out", "resid_mid", "mlp_out", "final_norm"), _POST_LN)
_B = "transformer.h.{l}"
_CONTAINS = (
    "BLOOM's sublayers return their output with the residual already added; the nearest points are resid_mid and "
    "resid_post, and m.at('transformer.h.N.self_attention.dense').output is what attention adds"
)
_FROM_NORM = (
    "apply_residual_connection_post_layernorm adds to a norm's output instead of the stream; the nearest points are "
    "resid_pre and resid_post"
)
_FROM_NORM_SITES: Sites = {"resid_mid": _FROM_NORM}
_BLOOM_HF = {
    **_ends("transformer.word_embeddings", "transformer.ln_f"),
    **_block(_B, "self_attention", "dense", "post_attention_layernorm", "mlp", "dense_h_to_4h", "dense_4h_to_h"),
    **_interleaved(f"{_B}.self_attention.query_key_value"),
    "pattern": _NO_SEAM,
    "attn_out": _CONTAINS,
    "mlp_out": _CONTAINS,
}
_ALIBI = (
    "vLLM's kernel adds position biases (ALiBi) to the scores, which are not recomputed here; the nearest points are "
    "q, k and z"
)
_BLOOM_VLLM = {
    **_BLOOM_HF,
    **_fused(f"{_B}.self_attention.query_key_value"),
    "resid_pre": _in(_B, index=1),
    "attn_in": _in(f"{_B}.self_attention", index=1),
    "pattern": _ALIBI,
}

_ROWS = (
    _LLAMA,
    replace(_LLAMA, name="mistral"),
    replace(_LLAMA, name="qwen2"),
    replace(_LLAMA, name="qwen3"),
    Family("smollm3", _LLAMA_HF, _wrapped(_LLAMA_HF)),
    Family("gemma", _LLAMA_HF, {**_LLAMA_VLLM, **_SCALED_EMBED}),
    Family("gemma2", _GEMMA2_HF, {**_GEMMA2_VLLM, **_SCALED_EMBED}),
    Family("gemma3_text", _GEMMA2_HF, {**_GEMMA2_VLLM, **_SCALED_EMBED}),
    Family("phi3", _PHI3_HF, _LLAMA_VLLM),
    Family("olmo2", _OLMO2_HF, _wrapped(_OLMO2_HF)),
    Family("olmo3", _OLMO2_HF, _OLMO3_VLLM),
    Family("starcoder2", _STARCODER2_HF, _wrapped(_STARCODER2_HF, {})),
    Family("nemotron", {**_LLAMA_HF, **_UP}, {**_LLAMA_VLLM, **_UP}),
    _GRANITE,
    _GRANITE_HYBRID,
    _STABLELM,
    _COHERE,
    _QWEN2_MOE,
    replace(_QWEN2_MOE, name="qwen3_moe"),
    replace(_QWEN2_MOE, name="olmoe"),
    _MIXTRAL,
    _DEEPSEEK_V2,
    _QWEN3_NEXT,
    replace(_QWEN3_NEXT, name="qwen3_5_text"),
    replace(_QWEN3_NEXT, name="qwen3_5_moe_text"),
    Family("gpt2", _GPT2_HF, _GPT2_VLLM, {"upcast": Kind({"pattern": _UPCAST})}),
    Family("gptj", _GPTJ_HF, _GPTJ_VLLM, {"always": _shared_norm(_GPTJ_HF, _GPTJ_VLLM)}),
    Family("gpt_neox", _NEOX_HF, _NEOX_VLLM, {"parallel": _PARALLEL}, defaults={"use_parallel_residual": True}),
    Family("phi", _PHI_HF, _PHI_VLLM, {"always": _shared_norm(_PHI_HF, _PHI_VLLM)}),
    Family("opt", _OPT_HF, _OPT_VLLM, {"post_ln": Kind(_POST_LN_SITES, _POST_LN_SITES)}),
    Family("bloom", _BLOOM_HF, _BLOOM_VLLM, {"resid_from_ln": Kind(_FROM_NORM_SITES, _FROM_NORM_SITES)}),
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ROWS}

# Architectures that have no residual stream in the sense of these points, by what is in its place.
_BERT = "it normalises after every add (as BERT does), so no sublayer's output is what a residual stream changes by"
_STREAMS = "it carries several residual streams side by side, which no one of these points could mean"
_RECURRENT_MODEL = "its layers are recurrences without attention or an MLP of their own"
WITHOUT_STREAM: dict[str, str] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "git", "rembert",
         "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
         "megatron-bert", "distilbert", "albert", "deberta", "deberta-v2"), _BERT),
    **dict.fromkeys(("gemma3n_text", "deepseek_v4", "hy_v4", "qwen4_exp_text"), _STREAMS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT_MODEL),
}  # fmt: skip
