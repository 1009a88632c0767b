"""Every point of every family on vLLM against `transformers`: reads and writes, in prompts and while generating.

Run by test_points_vllm.py in a process of its own, for the families in TAPGRID_FAMILIES, one boot each.
TAPGRID_POINTS_TABLE=path collects the largest relative error of each point.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import adapters
from adapters.points import Points
from adapters.runtime import Output, Runtime
from harness.models import resolve
from tests.points_probe import SHORT, at, error, everywhere, logits, nudge, read_all, run, samples, write

CHOSEN = os.environ.get("TAPGRID_FAMILIES", "llama").split(",")
# vLLM's BLOOM computes GELU exactly, transformers' by its tanh approximation.
TOLERANCE = {"bloom": 1e-3}
SMALL = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512, "skip_tokenizer_init": True}
# vLLM's latent attention needs a GPU; without it the same family runs in another class, with another rotary kernel.
LATENT = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


@dataclass(frozen=True)
class Both:
    """One family on both engines, and what everything reads as there."""

    name: str
    hf: Runtime
    vllm: Runtime
    read: dict[str, list[Output]]

    @property
    def points(self) -> Points:
        found: Points = self.vllm.engine.points
        return found

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.name, 2e-5)


@pytest.fixture(scope="module", params=CHOSEN)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    twin = str(request.param)
    with pytest.MonkeyPatch.context() as patch:
        # Experts in float32 need the AMX kernels out of the way, on a processor that has them.
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        if twin.startswith("deepseek"):
            patch.setenv("VLLM_MLA_DISABLE", "1")
        path, more = resolve(f"synthetic:{twin}"), LATENT if twin.startswith("deepseek") else {}
        hf = adapters.load(path, engine="hf", dtype="float32", attention="eager", threads=1)
        vllm = adapters.load(path, engine="vllm", dtype="float32", **SMALL, **more)
        # vLLM's class around the code of transformers changes that code for the whole process.
        hf.engine.model.base_model.do_not_compile = True
        try:
            read = {e: run(rt, read_all(rt.engine.points)) for e, rt in (("hf", hf), ("vllm", vllm))}
            yield Both(twin, hf, vllm, read)
        finally:
            vllm.close()


def test_both_engines_have_the_same_points(both: Both) -> None:
    found = {rt: [p for p in everywhere(rt.engine.points) if p[0] != "pattern"] for rt in (both.hf, both.vllm)}
    assert found[both.hf] == found[both.vllm]
    kernels = {"bloom": ([], []), "gptj": ([], [0, 1, 2]), "granitemoehybrid": ([1, 3], [1, 3])}
    patterns = [list(rt.engine.points.layers("pattern")) for rt in (both.hf, both.vllm)]
    assert patterns == list(kernels.get(both.name, ([*range(both.points.dims.layers)],) * 2))


def test_every_read_is_the_same(both: Both) -> None:
    worst: dict[str, float] = {}
    for got, wanted in zip(both.read["vllm"], both.read["hf"], strict=True):
        assert got.token_ids == wanted.token_ids
        for name in sorted(got.saves.keys() & wanted.saves.keys()):
            assert len(got.saves[name]) == 3
            point = name.partition(".")[0]
            worst[point] = max(worst.get(point, 0.0), error(got.saves[name], wanted.saves[name]))
    record(both.name, "read", worst)
    assert not {p: e for p, e in worst.items() if e > both.tolerance}


def test_the_stream_adds_up(both: Both) -> None:
    for out in both.read["vllm"]:
        got = {n: torch.cat(list(v)) for n, v in out.saves.items() if not n.startswith(("pattern", "sampled"))}
        for i in range(both.points.dims.layers):
            pre, attn, mid, mlp, post = (
                got.get(f"{n}.{i}") for n in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
            )
            if i + 1 < both.points.dims.layers:
                assert error(post, got[f"resid_pre.{i + 1}"]) == 0
            if attn is not None and mid is not None:
                assert error(pre + attn, mid) < 2e-6
            if mlp is not None and mid is not None:
                assert error(mid + mlp, post) < 2e-6
            if attn is not None and mlp is not None:
                assert error(pre + attn + mlp, post) < 2e-6


def test_unembed_is_the_models_own_end(both: Both) -> None:
    if "final_norm" not in both.points.sites:
        pytest.skip("no final norm")
    for out in both.read["vllm"]:
        assert error(out.saves["normed"], [x[-1:] for x in out.saves["final_norm"]]) < 2e-6
        assert error(out.saves["unembedded"], out.saves["logits"]) < 2e-6


def test_every_write_does_the_same(both: Both) -> None:
    plain = run(both.vllm, logits)
    worst: dict[str, float] = {}
    for name, layer in samples(both.points):
        if name != "sampled" and both.hf.engine.points.why_not(name, layer) is None:
            fn = then_logits(write(name, layer), name)
            ours, theirs = run(both.vllm, fn), run(both.hf, fn)
            for got, wanted, before in zip(ours, theirs, plain, strict=True):
                worst[name] = max(worst.get(name, 0.0), error(got.saves["logits"], wanted.saves["logits"]))
                assert error(got.saves["logits"][0], before.saves["logits"][0]) > 1e-5, name
    record(both.name, "write", worst)
    assert not {p: e for p, e in worst.items() if e > 2 * both.tolerance}


def then_logits(edit: Any, name: str) -> Any:
    def fn(m: Any) -> None:
        edit(m)
        if name == "logits":
            m.logits[:, 17] += 30.0
        logits(m)

    return fn


def test_a_second_function_sees_the_write_of_the_first(both: Both) -> None:
    for name, layer in samples(both.points):
        both.vllm.install(write(name, layer, save="left"), name="edit")
        try:
            out = run(both.vllm, lambda m, name=name, layer=layer: m.save("seen", at(m, name, layer)), SHORT)[1]
        finally:
            both.vllm.remove("edit")
        scaled = both.points.at(name, layer).scale != 1.0
        assert error(out.saves["seen"], out.saves["left"]) <= (1e-6 if scaled else 0), name


def test_a_write_of_what_is_there_changes_no_bit(both: Both) -> None:
    plain = run(both.vllm, logits, SHORT)
    for name, layer in samples(both.points):
        if name in ("logits", "sampled"):
            continue
        same = run(both.vllm, then_logits(write(name, layer, how=lambda x, _: x.clone()), name), SHORT)
        for a, b in zip(same, plain, strict=True):
            assert a.token_ids == b.token_ids
            assert all(torch.equal(x, y) for x, y in zip(a.saves["logits"], b.saves["logits"], strict=True)), name


def test_one_requests_write_leaves_its_neighbours_to_the_bit(both: Both) -> None:
    plain = run(both.vllm, logits)
    for name, layer in samples(both.points):
        if name in ("logits", "sampled"):
            continue
        mixed = run(both.vllm, [logits, then_logits(write(name, layer), name), logits])
        for i in (0, 2):
            assert mixed[i].token_ids == plain[i].token_ids
            assert all(
                torch.equal(x, y) for x, y in zip(mixed[i].saves["logits"], plain[i].saves["logits"], strict=True)
            ), name


def test_patterns_sum_to_one_and_know_the_window(both: Both) -> None:
    config = both.hf.engine.model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * both.points.dims.layers
    for out in both.read["vllm"]:
        for i in both.points.layers("pattern"):
            for p in out.saves[f"pattern.{i}"]:
                assert error(p.sum(-1), torch.ones(p.shape[:2])) < 2e-6
                tokens, keys = p.shape[1:]
                ago = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
                hidden = ago < 0 if kinds[i] == "full_attention" else (ago < 0) | (ago >= config.sliding_window)
                assert not p[:, hidden].any()
                assert (p[:, ~hidden] > 0).all()


def test_an_input_that_others_read_is_edited_for_its_module_alone(both: Both) -> None:
    layer = both.points.dims.layers // 2
    if not {layer} <= set(both.points.layers("attn_out")) & set(both.points.layers("mlp_out")):
        pytest.skip("no sublayer outputs to take the stream apart by")

    def fn(m: Any) -> None:
        pre = m.resid_pre[layer].clone()
        m.attn_in[layer].copy_(nudge(m.attn_in[layer], "attn_in"))
        attn = m.attn_out[layer].clone()
        m.mlp_in[layer].copy_(nudge(m.mlp_in[layer], "mlp_in", 8))
        m.save("parts", pre + attn + m.mlp_out[layer])
        m.save("post", m.resid_post[layer])

    for out in run(both.vllm, fn):
        assert error(out.saves["parts"], out.saves["post"]) < 2e-6


def test_plain_requests_afterwards_are_as_before(both: Both) -> None:
    before = [o.token_ids for o in both.read["vllm"]]
    assert [o.token_ids for o in run(both.vllm)] == before
    host = both.vllm.engine.host
    assert len(host.hooks) == 0
    layers = [*host.model.modules(), *getattr(host.model, "attention_instances", {}).values()]
    shadows = [vars(m)["forward"] for m in layers if "forward" in vars(m)]
    assert not [f for f in shadows if f.__module__.startswith("adapters")]


def record(family: str, what: str, worst: dict[str, float]) -> None:
    path = os.environ.get("TAPGRID_POINTS_TABLE")
    if path:
        with Path(path).open("a") as f:
            f.write(json.dumps({"family": family, "what": what, "worst": worst}) + "\n")
