"""Every point means one thing: against the model's own outputs, against its identities, and on both engines alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.errors import PointRefusedError, UnknownModuleError
from adapters.runtime import Runtime
from tests.engines import EVERY, HEAD_DIM, LAYERS, SHAPES, VOCAB, booted, capture, hf, prompts, relative, rt, run, worst

__all__ = ["hf", "rt"]  # fixtures

PROMPT = prompts(3, shortest=14)[1]


def test_every_point_has_its_shape(rt: Runtime) -> None:
    out = run(rt, [PROMPT], capture(*EVERY))[0]
    rows = len(PROMPT) + 3
    for name, entries in out.saves.items():
        point = name.partition(".")[0]
        if point == "logits":
            assert out.cat(name).shape == (4, VOCAB)
        elif point == "sampled":
            assert out.cat(name).tolist() == list(out.token_ids)
        else:
            assert [e.shape for e in entries] == [(len(PROMPT), *SHAPES[point])] + [(1, *SHAPES[point])] * 3
            assert out.cat(name).shape == (rows, *SHAPES[point])


@pytest.mark.engine
@pytest.mark.parametrize("point", EVERY, ids=lambda p: ".".join(map(str, p)))
def test_a_point_reads_the_same_on_both_engines(point: tuple[Any, ...]) -> None:
    # One point a run: a read must not depend on which others were made.
    ids = prompts(5)
    got, wanted = (run(booted(engine), ids, capture(point)) for engine in ("vllm", "hf"))
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert worst(a, b) < 2e-5


def test_points_are_what_transformers_says(hf: Runtime) -> None:
    """case 21."""
    model = hf.engine.model  # type: ignore[attr-defined]
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT]), output_hidden_states=True, logits_to_keep=1)
    points = [("embed",), *(("resid_post", layer) for layer in range(LAYERS)), ("final_norm",), ("logits",)]
    out = run(hf, [PROMPT], capture(*points), max_new_tokens=1)[0]
    states = wanted.hidden_states
    assert torch.equal(out.cat("embed"), states[0][0])
    for layer in range(LAYERS - 1):
        assert torch.equal(out.cat(f"resid_post.{layer}"), states[layer + 1][0])
    # The last of `hidden_states` is after the final norm; the last resid_post is before it.
    last = out.cat(f"resid_post.{LAYERS - 1}")
    assert relative(last, states[-1][0]) > 0.1
    assert torch.equal(out.cat("final_norm"), states[-1][0])
    with torch.no_grad():
        assert torch.equal(model.model.norm(last), states[-1][0])
    assert torch.equal(out.cat("logits"), wanted.logits[0, -1:])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_identities_of_a_block(rt: Runtime, layer: int) -> None:
    """case 42."""
    names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    out = run(rt, [PROMPT], capture(*((n, layer) for n in names)))[0]
    pre, attn, mid, mlp, post = (out.cat(f"{n}.{layer}") for n in names)
    assert relative(pre + attn, mid) < 1e-6
    assert relative(mid + mlp, post) < 1e-6


def test_resid_pre_is_the_block_before_its_resid_post(rt: Runtime) -> None:
    out = run(rt, [PROMPT], capture(("embed",), ("resid_pre", 0), ("resid_post", 0), ("resid_pre", 1)))[0]
    assert torch.equal(out.cat("embed"), out.cat("resid_pre.0"))
    assert torch.equal(out.cat("resid_post.0"), out.cat("resid_pre.1"))


def test_a_negative_layer_counts_from_the_end(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("same", m.resid_post[-1] is m.resid_post[LAYERS - 1])

    assert run(rt, [PROMPT], fn)[0].saves["same"] == [True] * 4


def test_unembed_of_the_last_residual_is_the_logits(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("lens", m.unembed(m.resid_post[-1][-1:]))
        m.save("normed", m.norm(m.resid_post[-1]))
        m.save("norm", m.final_norm)
        m.save("logits", m.logits)

    out = run(rt, prompts(4), fn)
    for o in out:
        assert relative(o.cat("lens"), o.cat("logits")) < 1e-5
        assert relative(o.cat("normed"), o.cat("norm")) < 1e-5


def test_unembed_does_not_visit_the_points_on_its_way(rt: Runtime) -> None:
    """One request's lens runs the final norm while another waits for it: the other must get the model's own."""

    def lens(m: Any) -> None:
        m.save("lens", m.unembed(m.resid_post[0] * 0 + 1))

    ids = prompts(2)
    alone = run(rt, [ids[1]], capture(("final_norm",)))[0]
    beside = run(rt, ids, [lens, capture(("final_norm",))])[1]
    assert worst(beside, alone) < 1e-5
    both = run(rt, [ids[1]], [lambda m: (lens(m), capture(("final_norm",))(m))])[0]
    assert relative(both.cat("final_norm"), alone.cat("final_norm")) < 1e-5


def test_modules_by_path(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("in", m.at("model.layers.1.mlp.down_proj").input)
        m.save("out", m.at("model.layers.1.mlp.down_proj").output)
        m.save("mlp_out", m.mlp_out[1])

    weight = booted("hf").engine.model.get_parameter("model.layers.1.mlp.down_proj.weight")  # type: ignore[attr-defined]
    for o in run(rt, prompts(3), fn):
        assert o.cat("in").shape[1:] == (256,)
        assert relative(o.cat("in") @ weight.T, o.cat("out")) < 1e-5
        assert torch.equal(o.cat("out"), o.cat("mlp_out"))


def test_parameters_by_path(rt: Runtime) -> None:
    norm = run(rt, [PROMPT], lambda m: m.save("w", m.weight("model.norm.weight")), max_new_tokens=1)[0].cat("w")
    assert torch.equal(norm, booted("hf").engine.model.model.norm.weight)  # type: ignore[attr-defined]
    with pytest.raises(UnknownModuleError, match=r"no parameter 'model.norm.wieght'; did you mean model.norm.weight"):
        run(rt, [PROMPT], lambda m: m.weight("model.norm.wieght"))


@pytest.mark.engine
def test_a_parameter_that_the_engine_packed_away_is_refused() -> None:
    with pytest.raises(PointRefusedError, match=r"down_proj.weight: the engine has packed this parameter"):
        run(booted("vllm"), [PROMPT], lambda m: m.weight("model.layers.1.mlp.down_proj.weight"))


def test_inputs_passed_by_keyword_count(hf: Runtime) -> None:
    out = run(hf, [PROMPT], lambda m: m.save("a", m.attn_in[1]))[0]
    path = run(hf, [PROMPT], lambda m: m.save("a", m.at("model.layers.1.self_attn").input))[0]
    assert torch.equal(out.cat("a"), path.cat("a"))


@pytest.mark.engine
def test_half_a_residual_is_never_handed_out_as_a_layers_input() -> None:
    """case 3: vLLM's layer takes (positions, hidden, residual): by path both come, and their sum is the point."""

    def fn(m: Any) -> None:
        hidden, residual = m.at("model.layers.2").input
        m.save("sum", hidden + residual)
        m.save("point", m.resid_pre[2])
        m.save("kind", str(hidden.dtype))
        hidden, residual = m.at("model.layers.2").output
        m.save("after", hidden + residual)
        m.save("post", m.resid_post[2])

    out = run(booted("vllm"), [PROMPT], fn)[0]
    assert torch.equal(out.cat("sum"), out.cat("point"))
    assert torch.equal(out.cat("after"), out.cat("post"))
    assert set(out.saves["kind"]) == {"torch.float32"}


def test_head_ablation_is_zeroing_the_columns_of_the_output_projection(hf: Runtime) -> None:
    """case 24."""
    model, head = hf.engine.model, 2  # type: ignore[attr-defined]

    def ablate(m: Any) -> None:
        m.z[1][:, head] = 0
        m.save("logits", m.logits)

    out = run(hf, [PROMPT], ablate, max_new_tokens=1)[0]
    weight = model.model.layers[1].self_attn.o_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
        wanted = model(torch.tensor([PROMPT]), logits_to_keep=1).logits[0, -1:]
        weight.copy_(kept)
    assert torch.equal(out.cat("logits"), wanted)


def test_a_key_value_head_feeds_its_own_group_of_query_heads(rt: Runtime) -> None:
    """case 40: Four query heads over two key-value heads: kv head 1 feeds query heads 2 and 3 only."""

    def patch(point: str) -> Any:
        def fn(m: Any) -> None:
            getattr(m, point)[1][:, 1] += 0.5
            m.save("z", m.z[1])

        return fn

    plain = run(rt, [PROMPT], lambda m: m.save("z", m.z[1]), max_new_tokens=1)[0].cat("z")
    for point in ("k", "v"):
        z = run(rt, [PROMPT], patch(point), max_new_tokens=1)[0].cat("z")
        assert torch.equal(z[:, :2], plain[:, :2])
        assert relative(z[:, 2:], plain[:, 2:]) > 1e-2
