"""Writes: in place and by assignment, where they land, whom they leave alone, and that taking them off leaves none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.errors import WriteError
from adapters.runtime import Runtime
from tests.engines import (
    D_MODEL,
    EVERY,
    LLAMA,
    VOCAB,
    booted,
    capture,
    in_turn,
    prompts,
    relative,
    rt,
    run,
    same,
    worst,
)

__all__ = ["rt"]  # fixtures

IDS = prompts(8)
WRITABLE = [p for p in EVERY if p[0] not in ("logits", "sampled")]


def at(m: Any, point: tuple[Any, ...]) -> Any:
    value = getattr(m, point[0])
    return value[point[1]] if len(point) > 1 else value


def put(m: Any, point: tuple[Any, ...], value: torch.Tensor) -> None:
    if len(point) > 1:
        getattr(m, point[0])[point[1]] = value
    else:
        setattr(m, point[0], value)


def double(point: tuple[Any, ...], *, in_place: bool, watch: tuple[Any, ...] = ("logits",)) -> Any:
    """Twice what is there and a little more, and then what it has become."""

    def fn(m: Any) -> None:
        before = at(m, point)
        m.save("before", before)
        if in_place:
            before.mul_(2).add_(0.25)
        else:
            put(m, point, before * 2 + 0.25)
        m.save("after", at(m, point))
        capture(watch)(m)

    return fn


@pytest.mark.parametrize("point", WRITABLE, ids=lambda p: ".".join(map(str, p)))
def test_in_place_and_by_assignment_are_one_write(rt: Runtime, point: tuple[Any, ...]) -> None:
    """A write is read back as exactly what was written, on both sides of it the saves differ by it, and it lands."""
    place, assign = (run(rt, IDS[:2], double(point, in_place=p)) for p in (True, False))
    same(place, assign)
    plain = run(rt, IDS[:2], capture(("logits",)))
    for out, untouched in zip(place, plain, strict=True):
        assert torch.equal(out.cat("after"), 2 * out.cat("before") + 0.25)
        assert relative(out.saves["logits"][0], untouched.saves["logits"][0]) > 1e-4


@pytest.mark.engine
@pytest.mark.parametrize("point", WRITABLE, ids=lambda p: ".".join(map(str, p)))
def test_a_write_does_the_same_on_both_engines(point: tuple[Any, ...]) -> None:
    got, wanted = (run(booted(e), IDS[:3], double(point, in_place=True)) for e in ("vllm", "hf"))
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert worst(a, b) < 1e-4


def test_the_logits_and_the_token(rt: Runtime) -> None:
    def ban(m: Any) -> None:
        best = int(m.logits.argmax())
        m.save("best", best)
        m.logits[:, best] = -torch.inf
        m.save("second", int(m.logits.argmax()))
        m.save("drawn", m.sampled)

    def force(m: Any) -> None:
        m.sampled = torch.tensor([7 + m.step])
        m.save("token", m.sampled)

    banned, forced, plain = run(rt, IDS[:3], [ban, force, None])
    assert banned.saves["second"] == banned.cat("drawn").tolist() == list(banned.token_ids)
    assert banned.saves["best"][0] != banned.token_ids[0]
    assert forced.token_ids == (7, 8, 9, 10)
    assert forced.cat("token").dtype == torch.int64
    assert plain.token_ids == run(rt, [IDS[2]])[0].token_ids


def test_a_forced_token_is_what_the_next_pass_computes_with(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("embed", m.embed)
        m.sampled[:] = 77

    out = run(rt, [IDS[0]], fn)[0]
    row = booted("hf").engine.model.get_input_embeddings().weight[77]  # type: ignore[attr-defined]
    assert all(torch.equal(e[0], row) for e in out.saves["embed"][1:])


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6])
def test_a_token_outside_of_the_vocabulary_is_refused_before_the_model_sees_it(rt: Runtime, token: int) -> None:
    def fn(m: Any) -> None:
        m.sampled[:] = token

    with pytest.raises(WriteError, match=f"token id {token} is outside the vocabulary of {VOCAB}") as caught:
        run(rt, IDS[:2], [fn, None])
    assert caught.value.outputs[1].token_ids == run(rt, [IDS[1]])[0].token_ids  # type: ignore[attr-defined]


# ---- who else is touched


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", id="bf16")])
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.engine)])
def test_a_write_of_what_is_there_changes_no_bit(engine: str, dtype: str) -> None:
    """Also where the residual is a pair, whose rounded sum is not what the fused norm computes with."""
    runtime = booted(engine, dtype=dtype)

    def rewrite(m: Any) -> None:
        for point in WRITABLE:
            put(m, point, at(m, point).clone())
            at(m, point).mul_(1)
        m.logits = m.logits.clone()
        m.save("logits", m.logits)
        m.sampled = m.sampled.clone()

    same(run(runtime, IDS, rewrite, max_new_tokens=6), run(runtime, IDS, capture(("logits",)), max_new_tokens=6))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", id="bf16")])
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.engine)])
@pytest.mark.parametrize("point", [("resid_post", 1), ("resid_mid", 1), ("q", 0), ("mlp_act", 2), ("embed",)], ids=str)
def test_bystanders_do_not_move_by_a_bit(engine: str, dtype: str, point: tuple[Any, ...]) -> None:
    runtime = booted(engine, dtype=dtype)
    watch = capture(("resid_post", 2), ("logits",))
    # Scaled by a power of two only where nothing else is, so that the batch stays what it was.
    fns = [in_turn(lambda m: at(m, point).add_(3.0), watch) if i in (2, 5) else watch for i in range(8)]
    plain, steered = run(runtime, IDS, watch, max_new_tokens=1), run(runtime, IDS, fns, max_new_tokens=1)
    same([o for i, o in enumerate(steered) if i not in (2, 5)], [o for i, o in enumerate(plain) if i not in (2, 5)])
    assert all(not torch.equal(steered[i].cat("logits"), plain[i].cat("logits")) for i in (2, 5))


def test_rows_of_a_request_that_were_not_written_do_not_move(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.resid_post[1][1:2] += 1.0
        m.save("next", m.resid_pre[2])

    edited = run(rt, [IDS[0]], fn, max_new_tokens=1)[0].cat("next")
    plain = run(rt, [IDS[0]], lambda m: m.save("next", m.resid_pre[2]), max_new_tokens=1)[0].cat("next")
    moved = (edited != plain).any(1).tolist()
    assert moved == [i == 1 for i in range(len(moved))]


def test_heads_are_written_one_by_one(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.z[1][:, 2] = 0
        m.save("z", m.z[1])
        m.save("out", m.attn_out[1])

    def all_of_it(m: Any) -> None:
        z = m.z[1].clone()
        z[:, 2] = 0
        m.z[1] = z
        m.save("z", m.z[1])
        m.save("out", m.attn_out[1])

    same(run(rt, IDS, fn), run(rt, IDS, all_of_it))
    z = run(rt, IDS[:1], fn)[0].cat("z")
    assert not z[:, 2].any()
    assert z[:, [0, 1, 3]].abs().min() > 0


def test_patching_another_runs_activation_in(rt: Runtime) -> None:
    """One layer's residual of another run at a position, in a batch; all of a layer's is the other run's logits."""
    donor = run(rt, [IDS[3]], capture(("resid_post", 0), ("resid_post", 2), ("logits",)), max_new_tokens=1)[0]

    def at_position(m: Any) -> None:
        m.resid_post[0][2] = donor.cat("resid_post.0")[2]
        m.save("row", m.resid_post[0])
        m.save("logits", m.logits)

    def last_row(m: Any) -> None:
        m.resid_post[2][-1] = donor.cat("resid_post.2")[-1]
        m.save("logits", m.logits)

    outs = run(rt, IDS, [at_position if i % 2 else last_row for i in range(8)], max_new_tokens=1)
    for i, out in enumerate(outs):
        if i == 3:
            assert relative(out.cat("logits"), donor.cat("logits")) < 2e-5
        elif i % 2:
            assert torch.equal(out.cat("row")[2], donor.cat("resid_post.0")[2])
            assert relative(out.cat("logits"), donor.cat("logits")) > 1e-3
        else:
            assert relative(out.cat("logits"), donor.cat("logits")) < 2e-5


# ---- modules


def test_a_modules_output_and_input_by_path(rt: Runtime) -> None:
    """An edited input is the module's own: what else reads that tensor does not see it."""

    def outwards(m: Any) -> None:
        m.at("model.layers.1.mlp.down_proj").output *= 2
        m.save("mlp_out", m.mlp_out[1])

    def inwards(m: Any) -> None:
        m.at("model.layers.1.mlp.down_proj").input = m.at("model.layers.1.mlp.down_proj").input * 2
        m.save("mlp_out", m.mlp_out[1])

    plain = run(rt, IDS[:3], capture(("mlp_out", 1)), max_new_tokens=1)
    for fn in (outwards, inwards):
        for a, b in zip(run(rt, IDS[:3], fn, max_new_tokens=1), plain, strict=True):
            assert relative(a.cat("mlp_out"), 2 * b.cat("mlp_out.1")) < 1e-6


def test_a_tuple_of_outputs_is_edited_in_place() -> None:
    runtime = booted("hf")

    def fn(m: Any) -> None:
        cos, sin = m.at("model.rotary_emb").output
        m.save("shapes", [tuple(cos.shape), tuple(sin.shape)])
        sin.zero_()
        cos.fill_(1.0)
        m.save("logits", m.logits)

    with pytest.raises(WriteError, match=r"hands out a tuple of 2 tensors"):
        run(runtime, [IDS[0]], lambda m: setattr(m.at("model.rotary_emb"), "output", torch.zeros(1)))
    out, plain = run(runtime, [IDS[0]], fn)[0], run(runtime, [IDS[0]], capture(("logits",)))[0]
    assert relative(out.saves["logits"][0], plain.saves["logits"][0]) > 1e-3


# ---- many at once


def test_composed_interventions_see_each_others_writes_in_declared_order(rt: Runtime) -> None:
    def times(factor: float, name: str) -> Any:
        def fn(m: Any) -> None:
            m.save(name, m.resid_post[1])
            m.resid_post[1] *= factor

        return fn

    def plus(m: Any) -> None:
        m.save("last", m.resid_post[1])
        m.resid_post[1] += 1

    rt.install(times(2.0, "first"), name="double")
    rt.install(times(3.0, "second"), name="triple")
    try:
        out = run(rt, IDS[:2], plus, max_new_tokens=1)
        swapped = run(rt, IDS[:2], plus, edits=["triple", "double"], max_new_tokens=1)
        one = run(rt, IDS[:2], plus, edits="triple", max_new_tokens=1)
        none = run(rt, IDS[:2], plus, edits=[], max_new_tokens=1)
    finally:
        rt.remove("double")
        rt.remove("triple")
    for o, s, t, n in zip(out, swapped, one, none, strict=True):
        base = n.cat("last")
        assert list(n.saves) == ["last"]
        assert torch.equal(o.cat("first"), base)
        assert torch.equal(o.cat("second"), base * 2)
        assert torch.equal(o.cat("last"), base * 2 * 3)
        assert torch.equal(s.cat("second"), base)
        assert torch.equal(s.cat("first"), base * 3)
        assert torch.equal(t.cat("last"), base * 3)
        assert "first" not in t.saves


def test_a_later_function_may_read_before_an_earlier_one(rt: Runtime) -> None:
    """Each of a request's functions waits on its own; only at one place does the order count."""

    def late(m: Any) -> None:
        m.resid_post[2] += 1
        m.save("late", m.logits)

    def early(m: Any) -> None:
        m.save("early", m.embed)
        m.save("seen", m.resid_post[2])

    out = run(rt, [IDS[0]], early, max_new_tokens=1)[0]
    rt.install(late, name="late")
    try:
        both = run(rt, [IDS[0]], early, max_new_tokens=1)[0]
    finally:
        rt.remove("late")
    assert torch.equal(both.cat("early"), out.cat("early"))
    assert relative(both.cat("seen"), out.cat("seen") + 1) < 1e-6


def test_installing_and_removing_leaves_the_engine_as_it_was(rt: Runtime) -> None:
    watch = capture(("resid_post", 2), ("logits",))
    before, plain = run(rt, IDS, watch), run(rt, IDS)

    def steer(m: Any) -> None:
        m.resid_post[0] += 5.0

    rt.install(steer, name="steer")
    steered = run(rt, IDS)
    with pytest.raises(ValueError, match="named 'steer' is already installed"):
        rt.install(steer, name="steer")
    untouched = run(rt, IDS, edits=[])
    rt.remove("steer")
    with pytest.raises(KeyError, match="no intervention named 'steer' is installed; installed: none"):
        rt.remove("steer")
    assert [o.token_ids for o in steered] != [o.token_ids for o in plain]
    same(run(rt, IDS), plain)
    same(untouched, plain)
    same(run(rt, IDS, watch), before)
    with pytest.raises(KeyError, match=r"edits=\['steer'\]: not installed"):
        run(rt, IDS, edits=["steer"])


# ---- over a generation


def test_an_edit_at_an_absolute_position_happens_once(rt: Runtime) -> None:
    """case 20: Position 2 is in the prompt, position n + 1 is the second new token: one edit each, cached or not."""
    n = len(IDS[0])

    def fn(m: Any) -> None:
        for position in (2, n + 1):
            mask = m.positions == position
            if mask.any():
                m.save("edits", position)
                m.resid_post[0][mask] += 1.0
        m.save("post", m.resid_post[0])

    out = run(rt, [IDS[0]], fn, max_new_tokens=5)[0]
    assert out.saves["edits"] == [2, n + 1]
    assert [len(e) for e in out.saves["post"]] == [n, 1, 1, 1, 1]


def test_a_steering_vector_is_applied_layers_times_passes(rt: Runtime) -> None:
    """case 38."""

    def fn(m: Any) -> None:
        for layer in range(3):
            m.resid_post[layer] += 0.1
            m.state["applied"] = m.state.get("applied", 0) + 1
        m.save("applied", m.state["applied"])

    for out in run(rt, IDS[:3], fn, max_new_tokens=5):
        assert out.saves["applied"] == [3, 6, 9, 12, 15]


def test_state_is_the_requests_own_and_lives_as_long(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.state.setdefault("tokens", []).append(int(m.sampled))
        m.save("so far", list(m.state["tokens"]))

    for _ in range(2):
        for out in run(rt, IDS, fn, max_new_tokens=3):
            assert out.saves["so far"][-1] == list(out.token_ids)


def test_stopping_from_inside_gives_the_same_tokens_on_both_engines(rt: Runtime) -> None:
    plain = run(rt, IDS, max_new_tokens=8)

    def stop_at(step: int) -> Any:
        def fn(m: Any) -> None:
            m.save("step", m.step)
            if m.step == step:
                m.stop()
            m.save("after", m.resid_post[2])

        return fn

    outs = run(rt, IDS, [stop_at(i) for i in range(8)], max_new_tokens=8)
    for i, (out, whole) in enumerate(zip(outs, plain, strict=True)):
        assert out.stopped
        assert out.token_ids == whole.token_ids[: i + 1]
        assert out.saves["step"] == list(range(i + 1))
        assert len(out.saves["after"]) == i + 1


def test_only_while_generating(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        if not m.is_prompt:
            m.resid_post[1] += 4.0
        m.save("logits", m.logits)

    out, plain = run(rt, [IDS[1]], fn)[0], run(rt, [IDS[1]], capture(("logits",)))[0]
    assert torch.equal(out.saves["logits"][0], plain.saves["logits"][0])
    assert relative(out.saves["logits"][1], plain.saves["logits"][1]) > 1e-3


def test_a_write_reaches_exactly_what_is_below_it() -> None:
    """The twin has three layers: an edit after the last block moves the logits and nothing before."""
    runtime = booted("hf", LLAMA)

    def fn(m: Any) -> None:
        capture(("embed",), ("resid_post", 0), ("resid_post", 1))(m)
        m.resid_post[2] = torch.zeros(m.tokens, D_MODEL)
        m.save("logits", m.logits)

    out = run(runtime, [IDS[0]], fn, max_new_tokens=1)[0]
    plain = run(runtime, [IDS[0]], capture(("embed",), ("resid_post", 0), ("resid_post", 1)), max_new_tokens=1)[0]
    assert all(torch.equal(out.cat(n), plain.cat(n)) for n in plain.saves)
    assert not out.cat("logits").any()
