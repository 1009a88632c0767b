"""The table of points by itself: names, layers, refusals and their reasons, from a config alone and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import PointRefusedError, UnknownPointError
from adapters.families import WITHOUT_STREAM
from adapters.points import AFTER, BEFORE, CANONICAL, FAMILIES, PER_LAYER, Points, Site, family_of, points_of
from harness.twins import TWINS

ENGINES = ("hf", "vllm")


def points(twin: str, engine: Any = "hf", **changed: Any) -> Points:
    return points_of({"model_type": TWINS[twin].model_type, **TWINS[twin].kwargs(), **changed}, engine)


def test_the_table_imports_no_torch() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import sys, adapters.points; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "False", found.stderr


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("twin", sorted(TWINS))
def test_every_point_is_there_or_refused_with_reason_and_nearest(twin: str, engine: Any) -> None:
    found = points(twin, engine)
    for name in CANONICAL:
        for layer in range(found.dims.layers) if name in PER_LAYER else (None,):
            why = found.why_not(name, layer)
            if why is None:
                assert str(found.at(name, layer)) == (name if layer is None else f"{name}[{layer}]")
            else:
                assert why.startswith(name)
                assert f"({engine})" in why
                assert "nearest" in why, why


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("twin", sorted(TWINS))
def test_locations_are_in_the_models_order_and_share_keys_only_where_they_are_one_place(twin: str, engine: Any) -> None:
    found = points(twin, engine)
    places = [found.at(n, layer) for layer in range(found.dims.layers) for n in PER_LAYER if layer in found.layers(n)]
    assert [p.rank for p in places] == sorted({p.rank for p in places})
    for place in places:
        assert "{" not in place.key[0]
        assert f".{place.layer}" in place.key[0]


def test_sites_of_every_family_are_sites_or_sentences() -> None:
    for family in FAMILIES.values():
        for table in (family.hf, family.vllm, *(t for k in family.kinds.values() for t in (k.hf, k.vllm))):
            for name, entry in table.items():
                assert name in CANONICAL, (family.name, name)
                assert isinstance(entry, Site) or len(entry) > 40, (family.name, name)


def test_spelling() -> None:
    llama = points("llama")
    assert (
        llama.at("resid_post", -1)
        is llama.at("resid_post", 2)
        is llama.parse("resid_post.2")
        is llama.parse("resid_post.-1")
    )
    assert llama.parse("logits") is llama.at("logits")
    with pytest.raises(UnknownPointError, match="did you mean resid_post"):
        llama.at("resid_pots", 1)
    with pytest.raises(UnknownPointError, match=r"one per layer: write m\.resid_post\[layer\]"):
        llama.at("resid_post")
    with pytest.raises(UnknownPointError, match=r"not one per layer: write m\.logits"):
        llama.at("logits", 1)
    with pytest.raises(UnknownPointError, match="layer number"):
        llama.parse("z.first")
    with pytest.raises(IndexError, match="layers 0 to 2"):
        llama.at("z", 3)


def test_names_are_in_order_and_only_what_there_is() -> None:
    assert points("llama").names() == tuple(n for n in CANONICAL if n != "router")
    assert "resid_mid" not in points("gpt_neox").names()
    assert "resid_mid" in points("gpt_neox_sequential").names()
    assert set(points("mixtral").names()) == set(CANONICAL) - {"mlp_pre", "mlp_act"}


def test_a_hybrid_answers_by_layer() -> None:
    found = points("qwen3_next", "vllm")
    assert found.layers("pattern") == (1, 3)
    assert found.layers("attn_out") == (0, 1, 2, 3)
    assert found.layers("router") == (1, 2, 3)
    why = found.why_not("pattern", 2)
    assert why is not None
    assert "gated delta net" in why
    assert "Layers that have it: 1, 3" in why
    assert found.why_not("pattern") is None
    assert found.at("attn_out", 0).key[0].endswith("linear_attn")
    assert found.at("attn_out", 1).key[0].endswith("self_attn")
    # A config of the hub's may say it by an interval.
    by_interval = points("qwen3_next", "hf", layer_types=None, full_attention_interval=4)
    assert by_interval.layers("z") == (3,)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mamba_hybrid_answers_by_layer(engine: Any) -> None:
    found = points("granitemoehybrid", engine)
    assert found.layers("z") == found.layers("pattern") == (1, 3)
    assert found.layers("attn_out") == found.layers("mlp_act") == (0, 1, 2, 3)
    assert "Mamba recurrence" in str(found.why_not("q", 0))
    assert [found.at("attn_out", i).key[0].rpartition(".")[2] for i in (0, 1)] == ["mamba", "self_attn"]
    assert found.at("attn_out", 0).scale == found.at("mlp_out", 3).scale == 0.6
    # The width of its MLP is not `intermediate_size`, which is an expert's.
    assert (found.at("mlp_pre", 0).lo, found.at("mlp_pre", 0).hi) == (0, 256)
    # The hub's older configs have another word for it.
    assert points("granitemoehybrid", engine, layer_types=["mamba", "attention"] * 2).layers("z") == (1, 3)


@pytest.mark.parametrize("name", ["mlp_in", "mlp_pre", "mlp_act", "mlp_out", "router"])
def test_experts_beside_a_shared_mlp_are_refused(name: str) -> None:
    for engine in ENGINES:
        found = points("granitemoehybrid", engine, num_local_experts=4, num_experts_per_tok=2)
        assert found.layers(name) == ()
        assert "side by side" in str(found.why_not(name, 0))
        assert found.layers("resid_mid") == found.layers("attn_out") == (0, 1, 2, 3)


def test_dense_layers_among_experts() -> None:
    found = points("deepseek_v2")
    assert found.layers("mlp_pre") == (0,)
    assert found.layers("router") == (1, 2)
    assert "neurons of its own" in str(found.why_not("mlp_act", 1))
    every_second = points("qwen2_moe", decoder_sparse_step=2)
    assert every_second.layers("router") == (1,)


def test_sizes_of_heads() -> None:
    assert (points("deepseek_v2").at("q", 0).head_dim, points("deepseek_v2", v_head_dim=16).at("z", 0).head_dim) == (
        64,
        16,
    )
    gated = points("qwen3_next", "vllm")
    assert [(gated.at(n, 1).lo, gated.at(n, 1).hi) for n in "qkv"] == [(0, 256), (256, 320), (320, 384)]
    llama = points("llama", "vllm")
    assert [(llama.at(n, 1).lo, llama.at(n, 1).hi) for n in "qkv"] == [(0, 128), (128, 192), (192, 256)]
    assert points("granite").at("attn_out", 0).scale == 0.6
    assert points("llama").at("attn_out", 0).scale == 1.0


@pytest.mark.parametrize(
    ("twin", "point", "reason", "nearest"),
    [
        ("bloom", "attn_out", "residual already added", "resid_mid"),
        ("bloom", "mlp_out", "residual already added", "resid_post"),
        ("opt_post_ln", "resid_mid", "do_layer_norm_before", "resid_post"),
        ("opt_post_ln", "attn_out", "do_layer_norm_before", "resid_pre"),
        ("gpt_neox", "resid_mid", "in parallel", "resid_post"),
        ("cohere", "resid_mid", "in parallel", "resid_pre"),
        ("llama", "router", "dense", "mlp_in"),
        ("mixtral", "mlp_act", "neurons of its own", "router"),
        ("deepseek_v2", "k", "compressed", "kv_a_layernorm"),
        ("gptj", "pattern", "inside its attention module", "z"),
    ],
)
def test_why_not(twin: str, point: str, reason: str, nearest: str) -> None:
    with pytest.raises(PointRefusedError) as refused:
        points(twin).at(point, 0)
    assert reason in str(refused.value)
    assert nearest in str(refused.value)


def test_a_residual_connection_from_the_norm() -> None:
    assert "norm's output" in str(
        points("bloom", apply_residual_connection_post_layernorm=True).why_not("resid_mid", 0)
    )
    assert points("bloom").why_not("resid_mid", 0) is None


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlnet", "mamba", "gemma3n_text", "something_new"])
def test_other_architectures_are_refused_by_what_they_are(model_type: str) -> None:
    found = points_of({"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9}, "hf")
    assert found.names() == ("logits", "sampled")
    for name in (*BEFORE, *PER_LAYER, AFTER[0]):
        why = found.why_not(name, 0 if name in PER_LAYER else None)
        assert why is not None
        assert model_type in why
        assert "m.at(path)" in why
    assert ("no points are declared" in str(found.why_not("z", 0))) == (model_type not in WITHOUT_STREAM)


def test_from_a_folder_a_file_and_a_multimodal_config(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **TWINS["gemma3"].kwargs()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", config):
        assert points_of(source, "vllm").dims.layers == 4
        assert points_of(source, "vllm").family.name == "gemma3_text"


def test_a_family_is_found_by_its_name() -> None:
    for name in FAMILIES:
        assert family_of(name).name == name
    assert {t.model_type for t in TWINS.values()} <= set(FAMILIES)


def test_taps_take_what_lies_in_memory() -> None:
    torch = pytest.importorskip("torch")
    assert torch is not None
    from adapters.taps import declared

    hybrid = points("qwen3_next", "vllm")
    assert [str(loc) for loc in declared(["q.*"], hybrid)] == ["q[1]", "q[3]"]
    with pytest.raises(PointRefusedError, match="backend='eager' has this point"):
        declared(["pattern.1"], hybrid)
    with pytest.raises(PointRefusedError, match="backend='eager'"):
        declared(["attn_in.*"], points("gptj", "vllm"))
    with pytest.raises(PointRefusedError, match="dense"):
        declared(["router.*"], points("llama", "vllm"))


def test_a_config_that_an_engine_runs_as_another_is_refused_there() -> None:
    assert points("stablelm_parallel", "vllm").names() == ("logits", "sampled")
    assert "as a sequential one" in str(points("stablelm_parallel", "vllm").why_not("z", 0))
    assert "attn_in" in points("stablelm_parallel", "hf").names()
    assert "resid_mid" in points("stablelm", "vllm").names()
