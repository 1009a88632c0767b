"""`transformers` on two ranks against one: started by `load`, and joined from a `torchrun`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import adapters
from adapters.errors import LoadError, PassedError, RanksDivergedError, ShardingError
from adapters.runtime import Output, Runtime
from harness.models import resolve
from tests.engines import LLAMA, prompts, same
from tests.points_probe import SHORT, at, error, logits, nudge, read_all, run, samples, write

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
TOLERANCE = 1e-5


def split(model: str = LLAMA, tp: int = 2, **more: object) -> Runtime:
    return adapters.load(resolve(model), backend="sharded", tp=tp, dtype="float32", threads=1, rank_timeout=10, **more)


@pytest.fixture(scope="module")
def two() -> Iterator[Runtime]:
    with split() as rt:
        yield rt


@pytest.fixture(scope="module")
def one() -> Runtime:
    return adapters.load(resolve(LLAMA), dtype="float32", threads=1)


def by_point(got: list[Output], wanted: list[Output]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert list(a.saves) == list(b.saves)
        for name in b.saves:
            point = name.partition(".")[0]
            worst[point] = max(worst.get(point, 0.0), error(a.saves[name], b.saves[name]))
    return worst


def test_every_point_reads_as_on_one_rank(two: Runtime, one: Runtime) -> None:
    assert two.points() == one.points()
    everything = read_all(one.engine.points)
    worst = by_point(run(two, everything, check_ranks=True), run(one, everything))
    assert set(worst) == {*two.points(), "unembedded", "normed"}
    assert not {p: e for p, e in worst.items() if e > TOLERANCE}
    assert worst["q"] > 0  # it was not one rank twice


def test_every_point_written_does_what_it_does_on_one_rank(two: Runtime, one: Runtime) -> None:
    plain = run(one, logits)
    for name, layer in samples(one.engine.points):

        def fn(m: object, name: str = name, layer: int | None = layer) -> None:
            value = at(m, name, layer)
            value.copy_(nudge(value, name))
            if name != "sampled":
                logits(m)

        got, wanted = run(two, fn), run(one, fn)
        for a, b, before in zip(got, wanted, plain, strict=True):
            assert a.token_ids == b.token_ids, name
            if name != "sampled":
                assert error(a.saves["logits"], b.saves["logits"]) < 4 * TOLERANCE, name
                assert error(b.saves["logits"][0], before.saves["logits"][0]) > 1e-3, name


def test_a_second_function_sees_the_write_of_the_first(two: Runtime) -> None:
    for name, layer in samples(two.engine.points):
        two.install(write(name, layer, save="left"), name="edit")
        try:
            out = run(two, lambda m, name=name, layer=layer: m.save("seen", at(m, name, layer)), SHORT)[1]
        finally:
            two.remove("edit")
        assert error(out.saves["seen"], out.saves["left"]) == 0, name


def test_zeroed_up_makes_the_mlp_exactly_zero(two: Runtime) -> None:
    def fn(m: object) -> None:
        up = m.at("model.layers.1.mlp.up_proj").output  # type: ignore[attr-defined]
        assert up.shape[-1] == 256
        up[:] = 0
        m.save("act", m.mlp_act[1])  # type: ignore[attr-defined]
        m.save("out", m.mlp_out[1])  # type: ignore[attr-defined]

    for out in run(two, fn):
        assert out.cat("act").shape[-1] == 256
        assert not out.cat("act").any()
        assert not out.cat("out").any()


def test_parameters_are_whole_and_in_the_checkpoints_order(two: Runtime) -> None:
    from safetensors.torch import load_file

    checkpoint = load_file(resolve(LLAMA) / "model.safetensors")
    projections = ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.gate", "mlp.down")
    paths = ["lm_head", "model.embed_tokens", "model.norm", *(f"model.layers.1.{p}_proj" for p in projections)]

    def fn(m: object) -> None:
        for path in paths:
            m.save(path, m.weight(f"{path}.weight"))  # type: ignore[attr-defined]

    (out,) = run(two, fn, SHORT[:1], new=1, check_ranks=True)
    for path in paths:
        assert torch.equal(out.cat(path), checkpoint[f"{path}.weight"]), path


def test_eight_at_once_with_edits_in_two(two: Runtime, one: Runtime) -> None:
    def watch(m: object) -> None:
        m.save("act", m.mlp_act[1])  # type: ignore[attr-defined]
        logits(m)

    def edit(m: object) -> None:
        m.z[0][:, 1:3] *= -3.0  # type: ignore[attr-defined]
        watch(m)

    ids = prompts(8)
    fns = [edit if i in (2, 5) else watch for i in range(8)]
    got, plain = run(two, fns, ids, check_ranks=True), run(two, watch, ids)
    for i in set(range(8)) - {2, 5}:
        same([got[i]], [plain[i]])
    assert max(by_point(got, run(one, fns, ids)).values()) < TOLERANCE
    for i in (2, 5):
        assert error(got[i].saves["logits"][0], plain[i].saves["logits"][0]) > 1e-3


def test_errors_come_home_and_the_engine_serves_on(two: Runtime) -> None:
    def bad(m: object) -> None:
        m.save("q", m.q[0])  # type: ignore[attr-defined]
        raise KeyError("mine")

    def noise(m: object) -> None:
        m.resid_post[1] += int.from_bytes(os.urandom(2), "big") / 65536  # type: ignore[attr-defined]

    plain = run(two, logits)
    outs = run(two, [logits, bad, logits], on_error="return")
    assert isinstance(outs[1].error, KeyError)
    assert any(Path(__file__).name in note for note in outs[1].error.__notes__)
    same([outs[0], outs[2]], [plain[0], plain[2]])
    with pytest.raises(PassedError, match=r"q\[0\] had already passed"):
        run(two, lambda m: (m.z[0], m.q[0]))
    with pytest.raises(ShardingError, match=r"model.layers.0.mlp.act_fn \(out\) differs between ranks"):
        run(two, lambda m: m.at("model.layers.0.mlp.act_fn").output)
    with pytest.raises(RanksDivergedError, match=r"resid_post\[1\] written \(step 0\)"):
        run(two, noise, SHORT[:1])
    same(run(two, logits), plain)


def test_a_gather_on_one_rank_alone_is_an_error_and_the_engine_serves_on(two: Runtime) -> None:
    def sometimes(m: object) -> None:
        if torch.distributed.get_rank() == 1:
            m.save("q", m.q[1])  # type: ignore[attr-defined]

    (out,) = run(two, sometimes, SHORT[:1], new=1, on_error="return")
    assert isinstance(out.error, RanksDivergedError)
    assert "q[1]: rank 1 waited 10 s for the others" in str(out.error)
    assert run(two, lambda m: m.save("q", m.q[1]), SHORT[:1])[0].cat("q").shape == (7, 4, 32)


def test_the_plan_is_the_models_own(two: Runtime) -> None:
    printed = repr(two.sharding())
    for line in (
        "model.layers.0-2.self_attn.q_proj  colwise: output column: 64 of axis -1 on each rank",
        "model.layers.0-2.mlp.down_proj     rowwise: input row: 128 of axis -1 on each rank",
        "model.layers.0-2.self_attn         attention: attention heads: 2 of axis 0 on each rank",
        "lm_head ",
    ):
        assert line in printed


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(LoadError, match="has 4 attention heads, which do not divide by tp=3"):
        split(tp=3)
    with pytest.raises(LoadError, match=r"2 key-value heads, .* transformers does not hold one on several ranks"):
        split(tp=4)
    with pytest.raises(LoadError, match=r"taps=.* with backend='sharded' needs engine='vllm'"):
        split(taps=["resid_post.*"])


optional = pytest.mark.skipif(os.environ.get("TAPGRID_ALL_FAMILIES") != "1", reason="TAPGRID_ALL_FAMILIES=1 runs it")
MORE = [
    pytest.param(f, marks=optional) for f in ("qwen2", "qwen3", "phi3", "gpt_neox", "olmo2", "mixtral", "qwen3_moe")
]


@pytest.mark.parametrize("family", ["qwen2_moe", *MORE])
def test_other_families_read_as_on_one_rank(family: str) -> None:
    path = f"synthetic:{family}"
    with split(path, attention="eager") as rt:
        alone = adapters.load(resolve(path), dtype="float32", threads=1, attention="eager")
        everything = read_all(alone.engine.points)
        worst = by_point(run(rt, everything, check_ranks=True), run(alone, everything))
        assert not {p: e for p, e in worst.items() if e > 2e-5}


JOINED = """
import pickle, sys, torch
import tapgrid

def fn(m):
    m.q[1][:, 1] *= 2.0
    m.save("q", m.q[1])
    m.save("logits", m.logits)

rt = tapgrid.load(sys.argv[1], backend="sharded", tp=2, dtype="float32", threads=1)
out = rt.run([[5, 7, 11, 13]], fn, max_new_tokens=3, ignore_eos=True, check_ranks=True)[0]
with rt.trace([5, 7, 11, 13]) as m:
    traced = m.z[2].clone()
rank = torch.distributed.get_rank()
pickle.dump((out.token_ids, dict(out.saves), traced), open(f"{sys.argv[2]}/{rank}.pickle", "wb"))
"""


def test_a_torchrun_is_joined_and_every_rank_has_the_outputs(tmp_path: Path, one: Runtime) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOINED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*torchrun, *meeting, str(script), str(resolve(LLAMA)), str(tmp_path)]
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    scope: dict[str, object] = {}
    exec(JOINED.split("rt =")[0], scope)
    (wanted,) = one.run([[5, 7, 11, 13]], scope["fn"], max_new_tokens=3, ignore_eos=True)  # type: ignore[arg-type]
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]
    with one.trace([5, 7, 11, 13]) as m:
        z = m.z[2].clone()
    for tokens, saves, traced in found:
        assert tokens == wanted.token_ids
        assert max(error(saves[n], wanted.saves[n]) for n in ("q", "logits")) < TOLERANCE
        assert error(traced, z) < TOLERANCE
    assert torch.equal(found[0][2], found[1][2])
