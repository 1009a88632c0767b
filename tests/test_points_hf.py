"""Every point of every family on `transformers`: the identities that give it its meaning, and that writes take effect.

One family: `pytest tests/test_points_hf.py -k gpt_neox`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import adapters
from adapters.points import PER_LAYER, Points
from adapters.runtime import Output, Runtime
from harness.models import resolve
from harness.twins import TWINS
from tests.points_probe import PROMPTS, SHORT, at, error, everywhere, key, logits, nudge, read_all, run, samples, write

EXACT = 2e-6
EMPTY = "mlp_pre", "mlp_act"


@functools.cache
def load(twin: str) -> Runtime:
    # The eager kernel, so that the engine's own probabilities are known; the seam is the same for every kernel.
    return adapters.load(resolve(f"synthetic:{twin}"), engine="hf", dtype="float32", attention="eager", threads=1)


@functools.cache
def everything(twin: str) -> list[Output]:
    rt = load(twin)
    return run(rt, read_all(rt.engine.points))


@pytest.fixture(params=sorted(TWINS))
def twin(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rt(twin: str) -> Runtime:
    return load(twin)


@pytest.fixture
def points(rt: Runtime) -> Points:
    return rt.engine.points


@pytest.fixture
def saved(twin: str) -> list[dict[str, list[torch.Tensor]]]:
    return [{n: list(v) for n, v in out.saves.items()} for out in everything(twin)]


def plus(*parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sum(some) for some in zip(*parts, strict=True)]  # type: ignore[misc]


def module(rt: Runtime, path: str) -> Any:
    return rt.engine.model.get_submodule(path)


def after(rt: Runtime, name: str, layer: int, raw: torch.Tensor) -> torch.Tensor:
    """What the family does to a sublayer's product before adding it: a norm, a factor."""
    loc = rt.engine.points.at(name, layer)
    if loc.key[0].endswith("norm"):
        raw = module(rt, loc.key[0])(raw)
    return raw * loc.scale


# ---- what the points mean


def test_the_stream_adds_up(points: Points, saved: Any) -> None:
    """case 42."""
    for got in saved:
        for i in range(points.dims.layers):
            pre, attn, mid, mlp, post = (
                got.get(f"{n}.{i}") for n in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
            )
            if i + 1 < points.dims.layers:
                assert all(torch.equal(a, b) for a, b in zip(post, got[f"resid_pre.{i + 1}"], strict=True))
            if mid and attn:
                assert error(plus(pre, attn), mid) < EXACT
            if mid and mlp:
                assert error(plus(mid, mlp), post) < EXACT
            if attn and mlp and not mid:
                assert error(plus(pre, attn, mlp), post) < EXACT


def test_sublayers_end_in_their_projections(rt: Runtime, points: Points, saved: Any) -> None:
    for got in saved:
        for i in range(points.dims.layers):
            if i in points.layers("z") and i in points.layers("attn_out"):
                o = module(rt, points.at("z", i).key[0])
                made = [after(rt, "attn_out", i, o(z.flatten(-2))) for z in got[f"z.{i}"]]
                assert error(made, got[f"attn_out.{i}"]) < EXACT
            if i in points.layers("mlp_act") and i in points.layers("mlp_out"):
                down = module(rt, points.at("mlp_act", i).key[0])
                made = [after(rt, "mlp_out", i, down(x)) for x in got[f"mlp_act.{i}"]]
                assert error(made, got[f"mlp_out.{i}"]) < EXACT


def test_shapes(points: Points, saved: Any) -> None:
    d = points.dims
    widths: dict[str, tuple[int, ...]] = dict.fromkeys(PER_LAYER, (d.d_model,)) | {
        "q": (d.heads, d.head_dim),
        "k": (d.kv_heads, d.head_dim),
        "v": (d.kv_heads, d.head_dim),
        "z": (d.heads, d.v_head_dim or d.head_dim),
        "mlp_pre": (d.d_mlp,),
        "mlp_act": (d.d_mlp,),
        "router": (4,),
        "embed": (d.d_model,),
        "final_norm": (d.d_model,),
    }
    for got, out in zip(saved, everything_tokens(saved), strict=True):
        for name, layer in everywhere(points):
            entries = got[key(name, layer)]
            assert len(entries) == 3
            if name in widths and name != "pattern":
                assert [e.shape for e in entries] == [(n, *widths[name]) for n in out]


def everything_tokens(saved: Any) -> list[list[int]]:
    return [[e.shape[0] for e in got["q.1"]] for got in saved]


def test_patterns_are_what_mixes_the_values(points: Points, saved: Any, rt: Runtime) -> None:
    for got in saved:
        for i in points.layers("pattern"):
            seen = 0
            for step, p in enumerate(got[f"pattern.{i}"]):
                heads, tokens, keys = p.shape
                seen += tokens
                assert (heads, keys) == (points.dims.heads, seen)
                assert error(p.sum(-1), torch.ones(heads, tokens)) < EXACT
                assert not p.triu(keys - tokens + 1).any()
                if i in points.layers("v") and "linear" not in points.family.kinds:
                    v = torch.cat(got[f"v.{i}"])[:keys].repeat_interleave(heads // points.dims.kv_heads, 1)
                    assert error(torch.einsum("htk,khd->thd", p, v), got[f"z.{i}"][step]) < EXACT


def test_windows_hide_what_is_behind_them(points: Points, saved: Any, rt: Runtime) -> None:
    config = rt.engine.model.config
    kinds = getattr(config, "layer_types", None) or []
    for i in (i for i, kind in enumerate(kinds) if kind == "sliding_attention"):
        first, *_, last = saved[0][f"pattern.{i}"]
        behind = torch.arange(first.shape[1])[:, None] - torch.arange(first.shape[2]) >= config.sliding_window
        assert behind.any()
        assert not first[:, behind].any()
        assert not last[:, :, : last.shape[-1] - config.sliding_window].any()
        assert (last[:, :, -config.sliding_window :] > 0).all()


def test_the_end_of_the_model(points: Points, saved: Any) -> None:
    """case 21."""
    if "final_norm" not in points.sites:
        pytest.skip("no final norm")
    for got in saved:
        assert error(got["normed"], [x[-1:] for x in got["final_norm"]]) < EXACT
        assert error(got["unembedded"], got["logits"]) < EXACT
        assert [int(x.argmax()) for x in got["logits"]] == [int(x) for x in got["sampled"]]


def test_the_beginning_of_the_model(rt: Runtime, points: Points, saved: Any) -> None:
    factor = getattr(rt.engine.model.config, "embedding_multiplier", 1.0)
    for got in saved:
        embed, stream = torch.cat(got["embed"]) * factor, torch.cat(got["resid_pre.0"])
        if points.family.name in ("gpt2", "opt"):  # learned positions are added
            assert error(embed, stream) > 0.1
        elif points.family.name == "bloom":  # a norm of its own
            assert error(module(rt, "transformer.word_embeddings_layernorm")(embed), stream) < EXACT
        else:
            assert error(embed, stream) == 0


def test_nobody_elses_rows(rt: Runtime, points: Points, saved: Any) -> None:
    """case 35."""
    alone = run(rt, read_all(points), prompts=SHORT[:1])[0]
    for name, entries in alone.saves.items():
        assert error(saved[1][name], entries) < 2e-5, name


# ---- writes


def test_a_write_reads_back_and_reaches_the_logits(rt: Runtime, points: Points) -> None:
    plain = [out.saves["logits"] for out in run(rt, logits, SHORT)]
    for name, layer in samples(points):
        outs = run(rt, both(write(name, layer, save="left"), name, layer), SHORT)
        for out, before in zip(outs, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(out.saves["seen"], out.saves["left"], strict=True)) or (
                points.at(name, layer).scale != 1.0 and error(out.saves["seen"], out.saves["left"]) < 1e-6
            ), name
            if name == "sampled":
                assert out.token_ids == tuple(int(x) for x in out.saves["left"])
            elif name != "logits":
                assert error(out.saves["logits"][0], before[0]) > 1e-5, name


def both(edit: Any, name: str, layer: int | None) -> Any:
    """The edit, read again at its own place only after the edit's function is through with it, then the logits."""

    def fn(m: Any) -> None:
        edit(m)
        m.save("seen", at(m, name, layer))
        if name not in ("logits", "sampled"):
            logits(m)

    return fn


def test_a_second_function_sees_the_write_of_the_first(rt: Runtime, points: Points) -> None:
    for name, layer in samples(points):
        rt.install(write(name, layer, save="left"), name="edit")
        try:
            out = run(rt, lambda m, name=name, layer=layer: m.save("seen", at(m, name, layer)), SHORT)[1]
        finally:
            rt.remove("edit")
        scaled = points.at(name, layer).scale != 1.0
        assert error(out.saves["seen"], out.saves["left"]) <= (1e-6 if scaled else 0), name


def test_a_write_of_what_is_there_changes_no_bit(rt: Runtime, points: Points) -> None:
    plain = run(rt, logits, SHORT)
    for name, layer in samples(points):
        same = run(rt, in_turn(write(name, layer, how=lambda x, _: x.clone()), name), SHORT)
        for a, b in zip(same, plain, strict=True):
            assert a.token_ids == b.token_ids
            assert all(torch.equal(x, y) for x, y in zip(a.saves["logits"], b.saves["logits"], strict=True)), name


def in_turn(edit: Any, name: str) -> Any:
    def fn(m: Any) -> None:
        if name == "sampled":
            logits(m)
        edit(m)
        if name != "sampled":
            logits(m)

    return fn


def test_a_head_zeroed_is_its_columns_zeroed(rt: Runtime, points: Points) -> None:
    """case 24."""
    layer, head = points.layers("z")[-1], 2
    loc = points.at("z", layer)
    o, width = module(rt, loc.key[0]), loc.head_dim

    def zero(m: Any) -> None:
        m.z[layer][:, head] = 0
        logits(m)

    zeroed = run(rt, zero, SHORT)
    columns = (slice(None), slice(head * width, (head + 1) * width))
    # GPT-2's Conv1D holds its weight the other way round.
    columns = columns[::-1] if type(o).__name__ == "Conv1D" else columns
    before = o.weight.data[columns].clone()
    o.weight.data[columns] = 0
    try:
        wanted = run(rt, logits, SHORT)
    finally:
        o.weight.data[columns] = before
    for a, b in zip(zeroed, wanted, strict=True):
        assert error(a.saves["logits"], b.saves["logits"]) < EXACT
    plain = run(rt, logits, SHORT)
    assert error(zeroed[0].saves["logits"][0], plain[0].saves["logits"][0]) > 1e-4


def test_a_key_value_head_reaches_its_own_queries_only(rt: Runtime, points: Points) -> None:
    """case 40."""
    if not points.layers("v"):
        pytest.skip("latent attention")
    layer, d = points.layers("v")[-1], points.dims
    group = d.heads // d.kv_heads

    def fn(m: Any) -> None:
        if m.step == 0 and m.state.get("edit", edit):
            m.v[layer][:, 1] += 1
        m.save("z", m.z[layer])

    changed = {}
    for edit in (False, True):
        changed[edit] = run(rt, fn, SHORT, new=1)[0].saves["z"][0]
    moved = [(changed[True][:, h] != changed[False][:, h]).any().item() for h in range(d.heads)]
    assert moved == [h // group == 1 for h in range(d.heads)]


def test_queries_and_keys_are_cut_by_their_heads(rt: Runtime, points: Points) -> None:
    """A query of zeros looks everywhere alike, a key head of zeros is looked at alike by its own queries."""
    layer, d = points.layers("q")[-1], points.dims
    if layer not in points.layers("pattern"):
        pytest.skip(str(points.why_not("pattern", layer)))
    for name, heads in (("q", [1]), ("k", list(range(d.heads // d.kv_heads, 2 * (d.heads // d.kv_heads))))):
        if not points.layers(name):
            continue

        def fn(m: Any, name: str = name) -> None:
            at(m, name, layer)[:, 1] = 0
            m.save("pattern", m.pattern[layer])

        pattern = run(rt, fn, SHORT, new=1)[0].saves["pattern"][0]
        seen = (pattern > 0).float()
        flat = [
            bool(torch.allclose(p, s / s.sum(-1, keepdim=True), atol=1e-6)) for p, s in zip(pattern, seen, strict=True)
        ]
        if not has_query_bias_norm(rt):
            assert flat == [h in heads for h in range(d.heads)], name


def has_query_bias_norm(rt: Runtime) -> bool:
    return rt.engine.points.family.name == "stablelm" and bool(getattr(rt.engine.model.config, "qk_layernorm", False))


def test_an_input_that_others_read_is_edited_for_its_module_alone(rt: Runtime, points: Points) -> None:
    layer = points.dims.layers // 2
    if not {layer} <= set(points.layers("attn_out")) & set(points.layers("mlp_out")):
        pytest.skip("no sublayer outputs to take the stream apart by")

    def fn(m: Any) -> None:
        pre = m.resid_pre[layer].clone()
        m.attn_in[layer].copy_(nudge(m.attn_in[layer], "attn_in"))
        attn = m.attn_out[layer].clone()
        m.mlp_in[layer].copy_(nudge(m.mlp_in[layer], "mlp_in", 8))
        mlp = m.mlp_out[layer].clone()
        m.save("parts", pre + attn + mlp)
        m.save("post", m.resid_post[layer])

    for out in run(rt, fn, SHORT):
        assert error(out.saves["parts"], out.saves["post"]) < EXACT


def test_a_shared_norm_is_not_shared_by_edits(rt: Runtime, points: Points, saved: Any) -> None:
    if points.at("mlp_in", 1).site.form != "replaced" or "resid_mid" in points.sites:
        pytest.skip("inputs of their own")

    def fn(m: Any) -> None:
        m.attn_in[1].copy_(nudge(m.attn_in[1], "attn_in"))
        if points.layers("resid_mid"):
            m.resid_mid[1]
        else:
            m.save("mlp_in", m.mlp_in[1])

    if points.layers("resid_mid"):
        pytest.skip("the MLP reads what attention left")
    out = run(rt, fn, SHORT, new=1)[0]
    assert error(out.saves["mlp_in"][0], saved[1]["mlp_in.1"][0]) < EXACT


def test_a_pattern_can_be_written(rt: Runtime, points: Points) -> None:
    if not points.layers("pattern"):
        pytest.skip(str(points.why_not("pattern", 0)))
    layer = points.layers("pattern")[-1]

    def fn(m: Any) -> None:
        p = m.pattern[layer]
        own = torch.zeros_like(p)
        own[..., p.shape[-1] - p.shape[1] :] = torch.eye(p.shape[1])
        m.pattern[layer][1] = own[1]
        m.save("z", m.z[layer])

    plain = run(rt, lambda m: m.save("z", m.z[layer]), SHORT)
    for got, before, where in zip(run(rt, fn, SHORT), plain, everything(str(twin_of(rt)))[1:], strict=True):
        z, old = torch.cat(got.saves["z"][:1]), torch.cat(before.saves["z"][:1])
        assert torch.equal(z[:, 0], old[:, 0])
        assert torch.equal(z[:, 2:], old[:, 2:])
        if layer in points.layers("v") and "linear" not in points.family.kinds:
            v = where.saves[f"v.{layer}"][0]
            assert error(z[:, 1], v[:, 1 // (points.dims.heads // points.dims.kv_heads)]) < EXACT
        else:
            assert error(z[:, 1], old[:, 1]) > 1e-3


def twin_of(rt: Runtime) -> str:
    return next(t for t in TWINS if load(t) is rt)


def expert(rt: Runtime, layer: int, e: int, x: torch.Tensor) -> torch.Tensor:
    """One expert by its own weights."""
    block = rt.engine.model.model.layers[layer].mlp
    gate, up = (x @ block.experts.gate_up_proj[e].T).chunk(2, -1)
    made: torch.Tensor = (block.experts.act_fn(gate) * up) @ block.experts.down_proj[e].T
    return made * getattr(rt.engine.model.config, "routed_scaling_factor", 1.0)


def test_router_logits_choose(rt: Runtime, points: Points) -> None:
    """Tokens sent to one expert, with all of the weight, come back with what that expert makes of them."""
    if not points.layers("router"):
        pytest.skip("no router")
    layer = points.layers("router")[-1]

    def only(e: int) -> Any:
        def fn(m: Any) -> None:
            m.save("in", m.mlp_in[layer])
            m.router[layer][:] = float("-inf")
            m.router[layer][:, e] = 30.0
            m.save("out", m.mlp_out[layer])

        return fn

    sent = [run(rt, only(e), SHORT, new=1) for e in (0, 3)]
    for a, b in zip(*sent, strict=True):
        x = a.saves["in"][0]
        wanted = expert(rt, layer, 0, x) - expert(rt, layer, 3, x)
        assert error(a.saves["out"][0] - b.saves["out"][0], wanted) < 1e-5


def test_nothing_is_left_behind(rt: Runtime, points: Points) -> None:
    from adapters.patterns import _TAPPED

    assert rt.engine.model.config._attn_implementation == "eager"
    assert not _TAPPED
    assert len(rt.engine.hooks) == 0


# ---- kernels that keep no probabilities


@pytest.mark.parametrize("twin", ["llama", "gemma3", "gpt2", "gpt_neox", "mixtral", "deepseek_v2"])
def test_patterns_of_a_kernel_that_keeps_none(twin: str) -> None:
    fused = adapters.load(resolve(f"synthetic:{twin}"), engine="hf", dtype="float32", attention="sdpa", threads=1)
    layer = fused.engine.points.layers("pattern")[0]
    # Asked for first in the middle of a forward, when the mask has been made for the other kernel already.
    late = run(fused, lambda m: (m.resid_pre[layer], m.save("p", m.pattern[layer])))
    for got, wanted in zip(late, everything(twin), strict=True):
        assert error(got.saves["p"], wanted.saves[f"pattern.{layer}"]) < EXACT
    plain = run(fused, logits)
    read = run(fused, lambda m: (m.pattern[layer], logits(m)))
    for a, b in zip(read, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.saves["logits"], b.saves["logits"], strict=True))
    assert fused.engine.model.config._attn_implementation == "sdpa"


# ---- gradients


@pytest.mark.parametrize("twin", ["gpt2", "gptj", "olmo2", "granite", "mixtral", "deepseek_v2", "gemma2", "qwen3_next"])
def test_the_gradient_of_every_point_is_its_slope(twin: str) -> None:
    """A step along a direction changes the loss by the gradient along it, whatever form the point has."""
    rt = load(twin)
    weights = torch.randn(512, generator=torch.Generator().manual_seed(3))

    def loss(m: Any) -> torch.Tensor:
        return (m.logits[-1].double() * weights).sum()

    for name, layer in samples(rt.engine.points):
        if name in ("logits", "sampled"):
            continue
        with rt.trace(PROMPTS[1], grad=True) as m:
            held = at(m, name, layer)
            loss(m).backward()
        direction = torch.randn(held.shape, generator=torch.Generator().manual_seed(5)) * held.detach().std()
        if name == "pattern":
            direction = direction * (held.detach() > 0)
        step = 0.01

        def moved(m: Any, by: float, name: str = name, layer: int | None = layer, along: Any = direction) -> None:
            value = at(m, name, layer)
            value += by * along
            m.save("loss", loss(m))

        up, down = (
            run(rt, lambda m, by=by: moved(m, by), [PROMPTS[1]], new=1)[0].saves["loss"][0] for by in (step, -step)
        )
        slope = float(up - down) / (2 * step)
        assert held.grad is not None, name
        wanted = float((held.grad * direction).sum())
        assert abs(slope - wanted) < 0.03 * max(abs(wanted), 0.05 * float(held.grad.norm() * direction.norm())), (
            name,
            slope,
            wanted,
        )


def test_a_first_token_looks_at_itself_alone() -> None:
    """The one activation that may be constant: it is not mistaken for a broken capture."""
    out = run(load("llama"), lambda m: m.save("p", m.pattern[1]), [[5]], new=1)[0]
    assert out.saves["p"][0].tolist() == [[[1.0]]] * 4


def test_the_text_model_inside_a_multimodal_one() -> None:
    transformers = pytest.importorskip("transformers")
    from adapters.engines.hf import HFEngine

    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.Gemma3Config(
        text_config=TWINS["gemma3"].kwargs(), vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    rt = Runtime(HFEngine(model, None))
    assert rt.engine.points.at("z", 1).key == ("model.language_model.layers.1.self_attn.o_proj", "in")
    for out in run(rt, read_all(rt.engine.points), SHORT):
        assert error(out.saves["unembedded"], out.saves["logits"]) < EXACT
        assert error(plus(out.saves["resid_pre.1"], out.saves["attn_out.1"]), out.saves["resid_mid.1"]) < EXACT
        assert error(out.saves["pattern.2"][0].sum(-1), torch.ones(out.saves["pattern.2"][0].shape[:2])) < EXACT
