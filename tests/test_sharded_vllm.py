"""vLLM on two ranks against one: every point read and written, in order and by position; what is left alone; errors."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adapters
from adapters.errors import LoadError, NotDeclaredError, PassedError, RanksDivergedError, ShardingError
from adapters.runtime import Output, Runtime
from harness.models import resolve
from tests.engines import LLAMA, VLLM, booted, prompts, same
from tests.points_probe import SHORT, at, error, everywhere, key, logits, nudge, read_all, run, samples, write

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
# One rank's sums are not those of two, which float32 shows in its last digits.
TOLERANCE = 1e-5


@functools.cache
def split(model: str = LLAMA, dtype: str = "float32", **more: Any) -> Runtime:
    return adapters.load(
        resolve(model), engine="vllm", backend="sharded", tp=2, dtype=dtype, rank_timeout=10, **{**VLLM, **more}
    )


@pytest.fixture(scope="module")
def two() -> Iterator[Runtime]:
    rt = split()
    yield rt
    rt.close()


@pytest.fixture(scope="module")
def one() -> Runtime:
    return booted("vllm")


@pytest.fixture(scope="module")
def read(two: Runtime, one: Runtime) -> tuple[list[Output], list[Output]]:
    """Everything that there is, on both."""
    everything = read_all(one.engine.points)
    return run(two, everything, check_ranks=True), run(one, everything)


def by_point(got: list[Output], wanted: list[Output]) -> dict[str, float]:
    """The largest relative error of each point; the same saves in the same order, with the same shapes."""
    worst: dict[str, float] = {}
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert list(a.saves) == list(b.saves)
        for name in b.saves:
            point = name.partition(".")[0]
            worst[point] = max(worst.get(point, 0.0), error(a.saves[name], b.saves[name]))
    return worst


def test_every_point_reads_as_on_one_rank(two: Runtime, read: tuple[list[Output], list[Output]]) -> None:
    assert two.points() == booted("vllm").points()
    worst = by_point(*read)
    assert set(worst) == {*two.points(), "unembedded", "normed"}
    assert not {p: e for p, e in worst.items() if e > TOLERANCE}
    assert worst["q"] > 0  # it was not the same engine twice


def test_every_point_written_does_what_it_does_on_one_rank(two: Runtime, one: Runtime) -> None:
    plain = run(one, logits)
    for name, layer in samples(one.engine.points):
        if name == "sampled":
            continue
        fn = then_logits(name, layer)
        got, wanted = run(two, fn), run(one, fn)
        for a, b, before in zip(got, wanted, plain, strict=True):
            assert a.token_ids == b.token_ids, name
            assert error(a.saves["logits"], b.saves["logits"]) < 4 * TOLERANCE, name
            assert error(b.saves["logits"][0], before.saves["logits"][0]) > 1e-3, name


def then_logits(name: str, layer: int | None) -> Any:
    def fn(m: Any) -> None:
        value = at(m, name, layer)
        value.copy_(nudge(value, name))
        logits(m)

    return fn


def test_a_second_function_sees_the_write_of_the_first(two: Runtime) -> None:
    for name, layer in samples(two.engine.points):
        two.install(write(name, layer, save="left"), name="edit")
        try:
            out = run(two, lambda m, name=name, layer=layer: m.save("seen", at(m, name, layer)), SHORT)[1]
        finally:
            two.remove("edit")
        assert error(out.saves["seen"], out.saves["left"]) == 0, name


def test_a_write_of_what_is_there_changes_no_bit(two: Runtime) -> None:
    def same_again(name: str, layer: int | None) -> Any:
        def fn(m: Any) -> None:
            value = at(m, name, layer)
            value.copy_(value.clone())
            logits(m)

        return fn

    plain = run(two, logits)
    for name, layer in samples(two.engine.points):
        if name not in ("logits", "sampled"):
            same(run(two, same_again(name, layer)), plain)


def test_a_sampled_token_is_written_on_every_rank(two: Runtime, one: Runtime) -> None:
    def force(m: Any) -> None:
        m.save("logits", m.logits)
        m.sampled[:] = 9 + m.step

    got, wanted = run(two, force, check_ranks=True), run(one, force)
    assert [o.token_ids for o in got] == [(9, 10, 11)] * 3
    assert by_point(got, wanted)["logits"] < TOLERANCE


def test_zeroed_up_makes_the_mlp_exactly_zero(two: Runtime) -> None:
    def fn(m: Any) -> None:
        gate_up = m.at("model.layers.1.mlp.gate_up_proj").output
        m.save("width", gate_up.shape[-1])
        gate_up[:, 256:] = 0
        m.save("act", m.mlp_act[1])
        m.save("out", m.mlp_out[1])

    for out in run(two, fn):
        assert out.saves["width"] == [512] * 3
        assert out.cat("act").shape[-1] == 256
        assert not out.cat("act").any()
        assert not out.cat("out").any()


@pytest.mark.parametrize("head", range(4))
def test_an_ablated_head_is_the_same_five_times(head: int, two: Runtime, one: Runtime) -> None:
    def ablate(m: Any) -> None:
        m.z[1][:, head] = 0
        m.save("out", m.attn_out[1])
        logits(m)

    first, *again = [run(two, ablate) for _ in range(5)]
    for other in again:
        same(other, first)
    assert max(by_point(first, run(one, ablate)).values()) < TOLERANCE


def test_parameters_are_whole(two: Runtime) -> None:
    from safetensors.torch import load_file

    checkpoint = load_file(resolve(LLAMA) / "model.safetensors")

    def fn(m: Any) -> None:
        if m.is_prompt:
            m.save("head", m.weight("lm_head.weight"))
            m.save("embed", m.weight("model.embed_tokens.weight"))
            m.save("norm", m.weight("model.norm.weight"))

    (out,) = run(two, fn, SHORT[:1], check_ranks=True)
    head = out.cat("head")
    assert torch.equal(head, checkpoint["lm_head.weight"])
    assert torch.equal(head[256:], checkpoint["lm_head.weight"][256:])
    assert torch.equal(out.cat("embed"), checkpoint["model.embed_tokens.weight"])
    assert torch.equal(out.cat("norm"), checkpoint["model.norm.weight"])


def test_steering_lands_at_the_asked_size(two: Runtime) -> None:
    vector = torch.randn(128, generator=torch.Generator().manual_seed(3)) * 5

    def steer(m: Any) -> None:
        m.save("before", m.resid_post[1])
        m.resid_post[1] += vector
        m.save("after", m.resid_pre[2])

    for out in run(two, steer):
        moved = out.cat("after") - out.cat("before")
        torch.testing.assert_close(moved, vector.expand_as(moved), rtol=1e-4, atol=1e-4)


def test_eight_at_once_with_edits_in_two(two: Runtime, one: Runtime) -> None:
    def watch(m: Any) -> None:
        m.save("z", m.z[0])
        m.save("act", m.mlp_act[1])
        logits(m)

    def edit(m: Any) -> None:
        m.z[0][:, 1:3] *= -3.0
        m.mlp_pre[1][:, 100:150] = 2.0
        watch_later(m)

    def watch_later(m: Any) -> None:
        m.save("act", m.mlp_act[1])
        logits(m)

    ids = prompts(8)
    fns = [edit if i in (2, 5) else watch for i in range(8)]
    got, plain = run(two, fns, ids, check_ranks=True), run(two, watch, ids)
    for i in set(range(8)) - {2, 5}:
        same([got[i]], [plain[i]])
    assert max(by_point(got, run(one, fns, ids)).values()) < TOLERANCE
    for i in (2, 5):
        assert error(got[i].saves["logits"][0], plain[i].saves["logits"][0]) > 1e-3


def test_an_error_ends_its_own_request_and_the_engine_serves_on(two: Runtime) -> None:
    def bad(m: Any) -> None:
        m.save("q", m.q[0])
        if m.step == 1:
            raise KeyError("mine")

    def good(m: Any) -> None:
        m.save("q", m.q[0])

    plain = run(two, good)
    outs = run(two, [good, bad, good], on_error="return")
    assert isinstance(outs[1].error, KeyError)
    assert outs[1].error.args == ("mine",)
    assert any(f"{Path(__file__).name}" in note for note in outs[1].error.__notes__)
    assert not any("only" in note for note in outs[1].error.__notes__)
    assert len(outs[1].saves["q"]) == 2
    same([outs[0], outs[2]], [plain[0], plain[2]])
    with pytest.raises(KeyError, match="mine"):
        run(two, bad)
    with pytest.raises(PassedError, match=r"q\[0\] had already passed"):
        run(two, lambda m: (m.z[0], m.q[0]))
    same(run(two, good), plain)


def test_a_module_that_nothing_explains_is_refused_and_others_are_whole(two: Runtime, one: Runtime) -> None:
    with pytest.raises(ShardingError, match=r"model.layers.0.mlp.act_fn \(out\) differs between ranks"):
        run(two, lambda m: m.at("model.layers.0.mlp.act_fn").output)

    def fn(m: Any) -> None:
        m.save("attn", m.at("model.layers.0.self_attn.attn").output)
        m.save("norm", m.at("model.layers.0.post_attention_layernorm").output[0])
        m.save("down", m.at("model.layers.0.mlp.down_proj").input)

    assert max(by_point(run(two, fn, check_ranks=True), run(one, fn)).values()) < TOLERANCE


def test_numbers_of_its_own_on_each_rank_are_caught(two: Runtime) -> None:
    def noise(m: Any) -> None:
        m.resid_post[1] += int.from_bytes(os.urandom(2), "big") / 65536

    def apart(m: Any) -> None:
        m.save("pid", os.getpid())

    with pytest.raises(RanksDivergedError, match=r"resid_post\[1\] written \(step 0\): the ranks hold different"):
        run(two, noise, SHORT[:1])
    with pytest.raises(RanksDivergedError, match="what was saved as 'pid'"):
        run(two, apart, SHORT[:1], check_ranks=True)
    assert run(two, apart, SHORT[:1])[0].saves["pid"][0] > 0


def test_torchs_own_random_numbers_are_the_same_on_every_rank(two: Runtime) -> None:
    def noise(m: Any) -> None:
        m.resid_post[1] += torch.randn(128)
        m.save("noisy", m.resid_post[1])

    (out,) = run(two, noise, SHORT[:1], check_ranks=True)
    assert len(out.saves["noisy"]) == 3


def test_a_gather_on_one_rank_alone_is_an_error_and_the_engine_serves_on(two: Runtime) -> None:
    def sometimes(m: Any) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() == 0:
            m.save("q", m.q[1])

    plain = run(two, logits, SHORT[:1])
    (out,) = run(two, sometimes, SHORT[:1], on_error="return")
    assert isinstance(out.error, RanksDivergedError)
    assert "q[1] k[1] v[1]: rank 0 waited 10 s for the others" in str(out.error)
    same(run(two, logits, SHORT[:1]), plain)
    assert run(two, lambda m: m.save("q", m.q[1]), SHORT[:1])[0].cat("q").shape == (7, 4, 32)


def test_installed_work_and_stops_are_alike_on_every_rank(two: Runtime, one: Runtime) -> None:
    def stop(m: Any) -> None:
        m.save("k", m.k[0])
        if m.step == 1:
            m.stop()

    found = []
    for rt in (two, one):
        rt.install(stop, name="stop")
        found.append(run(rt, None, new=5))
        rt.remove("stop")
    assert [(o.token_ids, o.stopped) for o in found[0]] == [(o.token_ids, True) for o in found[1]]
    assert max(by_point(*found).values()) < TOLERANCE
    assert list(run(two)[0].saves) == []


def test_the_plan_is_vllms_own(two: Runtime) -> None:
    plan = two.sharding()
    assert plan.ranks == 2
    printed = repr(plan)
    for line in (
        "model.layers.0-2.self_attn.qkv_proj",
        "QKVParallelLinear: output q|k|v: 64+32+32 of axis -1 on each rank",
        "MergedColumnParallelLinear: output merged columns: 128+128 of axis -1 on each rank",
        "RowParallelLinear: input row: 64 of axis -1 on each rank",
        "ParallelLMHead: weight vocabulary: 256 of axis 0 on each rank",
    ):
        assert line in printed


# ---- compiled


def test_taps_of_a_compiled_model_are_whole(one: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("q", m.q[0])
        m.save("z", m.z[0])
        m.save("post", m.resid_post[0])
        m.z[1][:, 1:3] *= -2.0  # over the edge between the ranks
        m.mlp_pre[1][:, 100:150] = 1.0
        m.save("act", m.mlp_act[1])
        m.resid_post[1] += 0.5
        logits(m)

    taps = ["resid_post.*", "z.*", "q.0", "mlp_pre.1", "mlp_act.1"]
    rt = adapters.load(
        resolve(LLAMA), engine="vllm", backend="sharded", tp=2, taps=taps, dtype="float32", rank_timeout=10, **VLLM
    )
    with rt:
        assert max(by_point(run(rt, fn, check_ranks=True), run(one, fn)).values()) < TOLERANCE
        assert [o.token_ids for o in run(rt)] == [o.token_ids for o in run(one)]
        with pytest.raises(NotDeclaredError, match=r"mlp_act.0., model.layers.0.mlp.down_proj .input., has no tap"):
            run(rt, lambda m: m.mlp_act[0])


# ---- other families


@pytest.fixture
def experts_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The AMX kernels run bfloat16 alone: out of the way, in the workers too, on a processor that has them."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cpu._is_amx_tile_supported = lambda: False\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def test_experts_in_slices(experts_in_float32: None) -> None:
    model = "synthetic:qwen2_moe"
    hf = adapters.load(resolve(model), engine="hf", dtype="float32", attention="eager", threads=1)
    with split(model) as rt:
        assert rt.points() == hf.points()
        everything = read_all(rt.engine.points)
        worst = by_point(run(rt, everything, check_ranks=True), run(hf, everything))
        assert "router" in worst
        assert not {p: e for p, e in worst.items() if e > 2e-5}
        for name, layer in samples(rt.engine.points):
            if name != "sampled":
                fn = then_logits(name, layer)
                for a, b in zip(run(rt, fn), run(hf, fn), strict=True):
                    assert error(a.saves["logits"], b.saves["logits"]) < 4e-5, name
        shared = "model.layers.1.mlp.shared_expert.down_proj"
        (out,) = run(rt, lambda m: m.save("sum", m.at(shared).output), SHORT[:1])
        (alone,) = run(hf, lambda m: m.save("sum", m.at(shared).output), SHORT[:1])
        assert error(out.saves["sum"], alone.saves["sum"]) < 2e-5
        assert "sum: a summand on each rank" in repr(rt.sharding())


def test_a_pretrained_model_in_bfloat16_is_within_the_yardstick() -> None:
    """Gemma 3: four heads over one key-value head, which both ranks hold; norms on q and k; windows."""
    path = resolve("gemma3")
    reference = adapters.load(path, engine="hf", dtype="float32", attention="eager", threads=1)
    yardstick = adapters.load(path, engine="hf", dtype="bfloat16", attention="eager", threads=1)
    ids = [[2, 818, 129778, 17565, 563, 528, 506, 3207, 529]]
    some = [(n, layer) for n, layer in everywhere(reference.engine.points) if layer in (None, 0, 9, 17)]

    def everything(m: Any) -> None:
        for name, layer in some:
            if name != "sampled":
                m.save(key(name, layer), at(m, name, layer))

    with split("gemma3", "bfloat16") as rt:
        assert "q|k|v: 512+256 (same on 2)+256 (same on 2)" in repr(rt.sharding())
        outs = [run(r, everything, ids, new=1)[0] for r in (rt, yardstick, reference)]
        over = {
            name: (error(outs[0].saves[name], wanted), error(outs[1].saves[name], wanted))
            for name, wanted in outs[2].saves.items()
        }
        assert len(over) == len(some) - 1
        assert not {n: (ours, theirs) for n, (ours, theirs) in over.items() if ours > 2.5 * max(theirs, 1e-3)}


def test_a_model_that_does_not_divide_is_refused_with_the_reason() -> None:
    with pytest.raises(LoadError, match="has 9 attention heads, which do not divide by tp=2"):
        split("smollm2")
