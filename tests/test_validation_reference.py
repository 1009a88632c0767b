"""The reference: right by independent arithmetic, computed elsewhere, kept under everything that decides it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.validation_adapter import LocalServer, make_model
from validation.query import Query, Write, folder_hash, key
from validation.reference import ROOT, ReferenceFailed, References, Server, prune

torch = pytest.importorskip("torch")
IDS = (5, 9, 200, 31, 77, 12, 140)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def refs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(folder, tmp_path_factory.mktemp("cache"), server=LocalServer())


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval().requires_grad_(False)


def ask(refs: References, **query: Any) -> dict[str, Any]:
    return refs.get([Query(**({"token_ids": IDS, "dtype": "float32"} | query))])[0]


class TestPoints:
    def test_resid_post_is_transformers_hidden_states_before_the_final_norm(self, refs: References, model: Any) -> None:
        hidden = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
        found = ask(refs, points=tuple(f"resid_post.{n}" for n in range(6)))
        for n in range(5):
            assert np.allclose(found[f"resid_post.{n}"], hidden[n + 1][0].numpy(), rtol=1e-4, atol=1e-4)
        last = torch.tensor(found["resid_post.5"])
        assert not torch.allclose(last, hidden[6][0], atol=0.1)  # hidden_states[-1] is after the norm
        assert torch.allclose(model.model.norm(last), hidden[6][0], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
    def test_the_residual_adds_up_in_every_family(self, kind: str, tmp_path: Path) -> None:
        refs = References(make_model(kind, tmp_path / "m"), tmp_path / "c", server=LocalServer())
        names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        for layer in (0, 3, 5):
            pre, attn, mid, mlp, post = ask(refs, points=tuple(f"{n}.{layer}" for n in names)).values()
            assert np.allclose(pre + attn, mid, atol=1e-4)
            assert np.allclose(mid + mlp, post, atol=1e-4)
            assert np.abs(attn).mean() > 0.05 < np.abs(mlp).mean()

    @pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
    def test_points_that_are_the_same_place(self, kind: str, tmp_path: Path) -> None:
        refs = References(make_model(kind, tmp_path / "m"), tmp_path / "c", server=LocalServer())
        found = ask(
            refs,
            points=("resid_post.1", "resid_pre.2", "attn_in.2", "mlp_in.2", "embed", "final_norm", "z.2", "logits"),
        )
        assert np.array_equal(found["resid_post.1"], found["resid_pre.2"])
        assert found["z.2"].shape == (7, 4, 16)
        assert found["logits"].shape == (7, 256)
        assert (
            found["attn_in.2"].shape
            == found["mlp_in.2"].shape
            == found["embed"].shape
            == found["final_norm"].shape
            == (7, 64)
        )

    def test_z_times_the_output_projection_is_attn_out(self, refs: References, model: Any) -> None:
        found = ask(refs, points=("z.4", "attn_out.4"))
        weight = model.model.layers[4].self_attn.o_proj.weight.numpy()
        assert np.allclose(found["z.4"].reshape(7, -1) @ weight.T, found["attn_out.4"], rtol=1e-4, atol=1e-4)

    def test_logits_are_kept_from_where_sampling_starts(self, refs: References, model: Any) -> None:
        logits = model(torch.tensor([IDS])).logits[0].numpy()
        assert np.allclose(ask(refs, points=("logits",), start=4)["logits"], logits[4:], rtol=1e-4, atol=1e-4)

    def test_the_engines_dtype_is_computed_in_that_dtype(self, refs: References) -> None:
        exact, own = (ask(refs, dtype=d, points=("resid_post.5",))["resid_post.5"] for d in ("float32", "bfloat16"))
        assert own.dtype == np.float32  # numpy has no bfloat16; every value is one all the same
        assert np.array_equal(torch.tensor(own).bfloat16().float().numpy(), own)
        assert 1e-3 < np.linalg.norm(own - exact) / np.linalg.norm(exact) < 0.1

    def test_another_attention_is_another_rounding_of_the_same(self, refs: References) -> None:
        a, b = (
            ask(refs, dtype="bfloat16", attention=x, points=("resid_post.5",))["resid_post.5"]
            for x in ("eager", "sdpa")
        )
        assert not np.array_equal(a, b)
        assert np.linalg.norm(a - b) / np.linalg.norm(a) < 0.05

    @pytest.mark.parametrize(
        ("point", "says"),
        [
            ("resid_post.6", "the model has layers 0 to 5"),
            ("residual.1", "in a layer it has resid_pre"),
            ("sampled", "it has embed, final_norm, logits"),
        ],
    )
    def test_points_it_does_not_have_are_refused_with_those_it_has(
        self, refs: References, point: str, says: str
    ) -> None:
        with pytest.raises(ReferenceFailed, match=says):
            ask(refs, points=(point,))

    def test_a_family_without_a_layout_is_refused_by_name(self, folder: Path, tmp_path: Path) -> None:
        from transformers import OPTConfig, OPTForCausalLM

        OPTForCausalLM(OPTConfig(vocab_size=64, hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=1,
                                 num_attention_heads=2)).save_pretrained(tmp_path / "opt")  # fmt: skip
        with pytest.raises(ReferenceFailed, match="no layout for model type 'opt'; it has gemma, "):
            ask(
                References(tmp_path / "opt", tmp_path / "c", server=LocalServer()),
                token_ids=(1, 2),
                points=("resid_post.0",),
            )


class TestWrites:
    VECTOR = tuple(float(x) for x in np.random.default_rng(0).normal(size=64))

    def test_steering_adds_the_vector_to_every_token_there_and_nothing_before(self, refs: References) -> None:
        points = ("resid_post.1", "resid_post.2", "resid_post.3")
        off, on = ask(refs, points=points), ask(refs, points=points, write=Write("steer", "resid_post.2", self.VECTOR))
        assert np.array_equal(on["resid_post.1"], off["resid_post.1"])
        assert np.allclose(on["resid_post.2"] - off["resid_post.2"], np.tile(self.VECTOR, (7, 1)), atol=1e-5)
        assert np.abs(on["resid_post.3"] - off["resid_post.3"]).min() > 0

    @pytest.mark.parametrize("point", ["resid_pre.3", "attn_out.2", "mlp_out.2"])
    def test_other_points_can_be_steered(self, refs: References, point: str) -> None:
        off, on = ask(refs, points=(point,)), ask(refs, points=(point,), write=Write("steer", point, self.VECTOR))
        assert np.allclose(on[point] - off[point], np.tile(self.VECTOR, (7, 1)), atol=1e-5)

    def test_ablating_a_head_is_zeroing_its_columns_of_the_output_projection(
        self, refs: References, model: Any
    ) -> None:
        import copy

        changed = copy.deepcopy(model)
        changed.model.layers[2].self_attn.o_proj.weight.data[:, 16:32] = 0
        found = ask(refs, points=("logits", "z.2"), write=Write("ablate-head", layer=2, head=1))
        assert np.allclose(found["logits"], changed(torch.tensor([IDS])).logits[0].numpy(), rtol=1e-4, atol=1e-4)
        assert (found["z.2"][:, 1] == 0).all()
        assert (found["z.2"][:, 0] != 0).all()

    def test_a_head_that_is_not_there(self, refs: References) -> None:
        with pytest.raises(ReferenceFailed, match="head 4: the model has heads 0 to 3"):
            ask(refs, write=Write("ablate-head", layer=2, head=4))

    def test_a_write_leaves_the_next_answer_alone(self, folder: Path, tmp_path: Path) -> None:
        refs = References(folder, tmp_path, server=LocalServer())
        plain = Query(IDS, "float32", points=("logits",))
        written = Query(IDS, "float32", points=("logits",), write=Write("steer", "resid_post.2", self.VECTOR))
        first = refs.get([plain])[0]["logits"]
        other = Query(IDS, "float32", points=("logits", "resid_post.0"))  # the same logits, not from the cache
        _, after = refs.get([written, other])
        assert np.array_equal(first, after["logits"])


class TestOtherQuestions:
    def test_tokens_by_how_far_below_the_top(self, refs: References, model: Any) -> None:
        z = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
        targets = (int(z[4].argmax()), 3, 8)
        found = ask(refs, start=4, targets=targets)
        assert found["tokens.gap"][0] == 0
        assert found["tokens.gap"][1:] == pytest.approx(
            [float(z[5].max() - z[5][3]), float(z[6].max() - z[6][8])], abs=1e-5
        )
        assert found["tokens.sample"].shape[0] == 3
        assert np.allclose(found["tokens.sample"], z[4:].numpy()[:, :: max(1, 256 // 256)], atol=1e-5)

    def test_the_lens_is_the_models_own_norm_and_head(self, refs: References, model: Any) -> None:
        found = ask(refs, start=5, lens="resid_post.5", points=("logits",))
        assert np.allclose(found["lens"], found["logits"], atol=1e-5)  # at the last layer the lens is the model
        assert not np.allclose(ask(refs, start=5, lens="resid_post.2")["lens"], found["logits"], atol=0.1)

    def test_the_probe_projects(self, refs: References) -> None:
        d = TestWrites.VECTOR
        found = ask(refs, probe="resid_post.2", direction=d, points=("resid_post.2",))
        assert np.allclose(found["probe"], found["resid_post.2"] @ np.array(d), rtol=1e-4, atol=1e-4)
        assert np.allclose(
            found["probe.size"], np.linalg.norm(found["resid_post.2"], axis=1) * np.linalg.norm(d), rtol=1e-5
        )

    def test_the_gradient_predicts_what_a_small_step_does(self, refs: References) -> None:
        step = np.random.default_rng(1).normal(size=64)
        gradient = ask(refs, gradient="resid_post.2")["gradient.resid_post.2"]
        assert gradient.shape == (7, 64)
        assert not gradient[-1].any()  # the last token predicts nothing that is counted

        def loss(size: float) -> float:
            write = Write("steer", "resid_post.2", tuple(size * step))
            z = ask(refs, points=("logits",), write=write)["logits"].astype(np.float64)
            z = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1, keepdims=True)
            return float(sum(z[k, IDS[k + 1]] for k in range(6)))

        predicted = float((gradient[:-1] @ step).sum())
        assert (loss(1e-3) - loss(-1e-3)) / 2e-3 == pytest.approx(predicted, rel=2e-2)


class TestCache:
    def test_an_answer_is_computed_once(self, folder: Path, tmp_path: Path) -> None:
        refs = References(folder, tmp_path, server=LocalServer())
        q = Query(IDS, "float32", points=("resid_post.0",))
        first = refs.get([q, Query(IDS, "bfloat16", points=("resid_post.0",))])
        again = References(folder, tmp_path, server=Refusing()).get([q])
        assert np.array_equal(first[0]["resid_post.0"], again[0]["resid_post.0"])
        assert refs.computed == 2

    def test_twins_in_one_request_are_computed_once(self, folder: Path, tmp_path: Path) -> None:
        refs = References(folder, tmp_path, server=LocalServer())
        refs.get([Query(IDS, "float32"), Query(IDS, "float32")])
        assert refs.computed == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"token_ids": (*IDS[:-1], 0)},
            {"dtype": "bfloat16"},
            {"attention": "sdpa"},
            {"points": ("z.1",)},
            {"start": 1},
            {"targets": (1,)},
            {"write": Write("steer", "resid_post.1", (1.0,))},
            {"lens": "resid_post.1"},
            {"probe": "resid_post.1"},
            {"direction": (1.0,)},
            {"gradient": "resid_post.1"},
        ],
    )
    def test_everything_asked_is_in_the_key(self, change: dict[str, Any]) -> None:
        base = {"token_ids": IDS, "dtype": "float32"}
        assert key("m", Query(**base), "cpu") != key("m", Query(**(base | change)), "cpu")

    def test_so_are_the_model_the_device_and_a_writes_every_number(self) -> None:
        def q(x: float) -> Query:
            return Query(IDS, "float32", write=Write("steer", "resid_post.1", (x, 2.0)))

        keys = {
            key("m", q(1.0), "cpu"),
            key("n", q(1.0), "cpu"),
            key("m", q(1.0), "cuda"),
            key("m", q(1.0000001), "cpu"),
        }
        assert len(keys) == 4

    def test_a_query_comes_back_from_json(self) -> None:
        q = Query(
            IDS,
            "bfloat16",
            "sdpa",
            ("z.1",),
            3,
            (4, 5),
            Write("ablate-head", layer=2, head=1),
            "resid_post.1",
            "z.0",
            (0.1, 1e-30),
        )
        assert Query.from_json(json.loads(json.dumps(q.to_json()))) == q

    def test_another_weight_is_another_model(self, folder: Path, tmp_path: Path) -> None:
        twin = tmp_path / "twin"
        shutil.copytree(folder, twin)
        assert folder_hash(twin) == folder_hash(folder)
        weights = next(twin.glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        assert folder_hash(twin) != folder_hash(folder)

    def test_a_folder_that_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "notes.json").write_text("{}")
        with pytest.raises(
            FileNotFoundError, match=r"not a model folder in transformers format: no config.json with weights"
        ):
            folder_hash(tmp_path)

    def test_pruning_drops_what_was_used_longest_ago(self, tmp_path: Path) -> None:
        for k in range(5):
            (tmp_path / f"{k}.npz").write_bytes(bytes(100))
            os.utime(tmp_path / f"{k}.npz", (1000 + k, 1000 + k))
        os.utime(tmp_path / "0.npz", (9000, 9000))  # used just now
        prune(tmp_path, 250)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["0.npz", "4.npz"]

    def test_no_partial_file_is_ever_read_or_left(self, folder: Path, tmp_path: Path) -> None:
        refs = References(folder, tmp_path, server=LocalServer())
        with pytest.raises(ReferenceFailed):
            refs.get([Query(IDS, "float32"), Query(IDS, "float32", points=("z.99",))])
        assert len(list(tmp_path.glob("*.npz"))) == 1  # the one that was answered, whole
        assert len(list(tmp_path.iterdir())) == 1


class Refusing(Server):
    def ask(self, request: Path) -> None:
        raise AssertionError("the answer should have been in the cache")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class TestProcess:
    """The real thing: a process of its own, which forks for each request."""

    def test_it_answers_what_this_process_would(
        self, server: Server, refs: References, folder: Path, tmp_path: Path
    ) -> None:
        apart = References(folder, tmp_path, server=server)
        q = [Query(IDS, d, points=("resid_post.3", "logits"), start=3) for d in ("float32", "bfloat16")]
        for here, there in zip(refs.get(q), apart.get(q), strict=True):
            assert here.keys() == there.keys()
            for name in here:
                assert np.array_equal(here[name], there[name])

    def test_it_holds_no_model_between_requests(self, server: Server, folder: Path, tmp_path: Path) -> None:
        References(folder, tmp_path, server=server).get([Query(IDS, "float32", points=("embed",))])
        assert server._process is not None
        process = psutil.Process(server._process.pid)
        assert process.children() == []
        time.sleep(0.5)  # it may still be at the end of that request
        before = process.cpu_times()
        time.sleep(0.5)
        after = process.cpu_times()
        # It waits, it does not spin, which would be half a second.
        assert after.user + after.system - before.user - before.system <= 0.1

    def test_a_bad_request_is_an_error_and_not_the_end(self, server: Server, folder: Path, tmp_path: Path) -> None:
        refs = References(folder, tmp_path, server=server)
        with pytest.raises(ReferenceFailed, match=r"reference for .*layers 0 to 5"):
            refs.get([Query(IDS, "float32", points=("z.9",))])
        assert refs.get([Query(IDS, "float32", points=("z.1",))])[0]["z.1"].shape == (7, 4, 16)

    def test_a_child_that_is_killed_is_reported_and_another_is_forked(
        self, server: Server, folder: Path, tmp_path: Path
    ) -> None:
        assert server._process is not None
        parent = psutil.Process(server._process.pid)
        stop = threading.Event()

        def kill_first_child() -> None:
            while not stop.is_set():
                for child in parent.children():
                    child.kill()
                    return
                time.sleep(0.001)

        killer = threading.Thread(target=kill_first_child)
        killer.start()
        refs = References(folder, tmp_path, server=server)
        try:
            with pytest.raises(ReferenceFailed, match="out of memory"):
                refs.get([Query(tuple(range(200)) * 4, "float32", points=("embed",))])
        finally:
            stop.set()
            killer.join()
        assert refs.get([Query(IDS, "float32", points=("embed",))])[0]["embed"].shape == (7, 64)

    def test_a_dead_server_is_reported_and_the_next_request_starts_another(self, folder: Path, tmp_path: Path) -> None:
        dead = Server()
        dead._process = subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        refs = References(folder, tmp_path, server=dead)
        dead._process.poll = lambda: None  # type: ignore[method-assign]  # it dies after it was looked at
        with pytest.raises(ReferenceFailed, match="died"):
            refs.get([Query(IDS, "float32")])
        assert dead._process is None

    def test_it_ends_with_its_input(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "validation.reference", "--serve"], stdin=subprocess.DEVNULL, env=env, timeout=120
        )
        assert done.returncode == 0

    def test_one_request_file_by_hand(self, folder: Path, tmp_path: Path) -> None:
        q = Query(IDS, "float32", points=("embed",))
        request = {
            "model": str(folder),
            "threads": 1,
            "device": "cpu",
            "queries": [q.to_json()],
            "paths": [str(tmp_path / "a.npz")],
        }
        (tmp_path / "request.json").write_text(json.dumps(request))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "validation.reference", str(tmp_path / "request.json")], env=env, check=True
        )
        assert np.load(tmp_path / "a.npz")["embed"].shape == (7, 64)

    @pytest.mark.parametrize("arguments", [[], ["--what"], ["a", "b"]])
    def test_usage(self, arguments: list[str]) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "validation.reference", *arguments], env=env, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "REQUEST.json" in done.stderr
