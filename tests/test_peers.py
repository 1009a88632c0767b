"""The peers' translations: pieces without an engine, then each column whole on a tiny model."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters.columns import all_columns, make
from adapters.engines.settings import environment
from adapters.peers import (
    hotwire,
    nnsight,
    nnsight_hf,
    nnsight_works,
    transformerlens,
    transformerlens_vllm,
    vanilla,
    vllm_extract,
)
from adapters.work import (
    AblateHead,
    BootRefused,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    MissingDevice,
    MissingLibrary,
    Nothing,
    Probe,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
    points_of,
)
from harness import engine_facts, worker
from harness.fairness import differences
from tests.fake import model_folder
from tests.fake_sessions import store
from tests.peer_conformance import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
VECTOR = np.arange(4, dtype=np.float32)
SHAPE = Shape(8, 4)
PEERS = {n: c for n, c in all_columns().items() if c.target.startswith("adapters.peers.")}
EVERY_WORK: list[Work] = [
    Nothing(),
    Capture(("resid_post.1",)),
    Steer("resid_post.1", VECTOR),
    Lens("resid_post.1"),
    Probe("resid_post.1", VECTOR),
    AblateHead(1, 0),
    ForceToken(7),
    Gradient("resid_post.1"),
]


def names(works: list[Work]) -> list[str]:
    return [type(w).__name__ for w in works]


# --- every column of a peer ---


def test_importing_a_peers_file_imports_no_library() -> None:
    modules = sorted({c.target.partition(":")[0] for c in PEERS.values()})
    heavy = ("torch", "vllm", "transformers", "nnsight", "interp_engine", "transformer_lens", "vllm_lens", "hotwire")
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"print(sorted(set({heavy!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(PEERS))
def test_every_column_keeps_the_protocol(name: str) -> None:
    adapter = make(PEERS[name])
    for method in ("boot", "close", "refuses", "run", "install", "remove", "engine_settings"):
        assert callable(getattr(adapter, method)), method
    assert isinstance(adapter.plain, bool)
    adapter.close()  # before any boot, and again: no engine, no error
    adapter.close()


LIBRARY = {
    "vanilla": "vllm",
    "hf": "transformers",
    "nnsight": "nnsight",
    "interp-engine": "interp_engine",
    "transformerlens": "transformer_lens",
    "vllm-lens": "vllm_lens",
    "vllm-extract": "vllm",
    "hotwire": "hotwire",
}


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_missing_library_gives_the_install_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    library = next(m for prefix, m in LIBRARY.items() if name.startswith(prefix))
    for loaded in [m for m in sys.modules if m.split(".")[0] == library or m == "adapters.peers.nnsight_cpu"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    # The engine and the device below must be there for the peer's own absence to be what is met first.
    monkeypatch.setattr("adapters.peers.hotwire.has_gpu", lambda: True)
    if library not in ("vllm", "transformers"):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.raises(MissingLibrary, match=r"install"):
        make(PEERS[name]).boot(tmp_path, Settings())


# --- plain engines ---


@pytest.mark.parametrize("cls", [vanilla.Vanilla, vanilla.VanillaEager, vanilla.PlainHF])
def test_plain_engines_refuse_all_but_nothing(cls: type[Any]) -> None:
    adapter = cls()
    answers = {type(w).__name__: adapter.refuses(w, SHAPE) for w in EVERY_WORK}
    assert answers.pop("Nothing") is None
    assert {r.code for r in answers.values()} == {"not-plain"}
    with pytest.raises(NotImplementedError, match="nothing attached"):
        adapter.run([Request("a", (1,), 1)], Capture(("resid_post.1",)))
    with pytest.raises(NotImplementedError, match="nothing attached"):
        adapter.install(Nothing())
    assert adapter.plain


def test_sampling_is_greedy_and_ignores_the_end() -> None:
    (made,) = vanilla.sampling([Request("a", (1, 2), 5)])
    assert made == {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": 5}


def test_batches_are_padded_on_the_left() -> None:
    pytest.importorskip("torch")
    batch = vanilla.left_padded([Request("a", (5, 6, 7), 1), Request("b", (8,), 1)], "cpu")
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_version_of_what_is_not_there() -> None:
    assert vanilla.version_of("no-such-distribution") == "unknown"
    assert vanilla.version_of("no-such-distribution", "numpy").startswith("numpy ")


@pytest.mark.parametrize(
    ("work", "points"),
    [
        (Nothing(), ()),
        (ForceToken(1), ()),
        (Capture(("z.1", "logits")), ("z.1", "logits")),
        (Lens("resid_post.3"), ("resid_post.3",)),
        (Gradient("resid_post.3"), ("resid_post.3",)),
        (Steer("resid_post.3", VECTOR, ("resid_post.4",)), ("resid_post.3", "resid_post.4")),
        (AblateHead(3, 0, ("z.3",)), ("z.3",)),
    ],
)
def test_points_of_a_work(work: Work, points: tuple[str, ...]) -> None:
    assert points_of(work) == points


# --- nnsight ---


def nnsight_adapter(cls: type[Any], module: Any, family: str = "llama") -> Any:
    """An adapter as after its boot, on a tree of names where nnsight's model would be."""
    adapter = cls()
    layers = [SimpleNamespace(name=n, self_attn=SimpleNamespace(o_proj=f"o_proj {n}")) for n in range(4)]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, norm="norm"), lm_head="head", logits_processor="lp")
    adapter._model, adapter._family, adapter._model_type = model, module.FAMILIES.get(family), family
    adapter._heads, adapter._head_dim = 2, 2
    return adapter


@pytest.mark.parametrize(("cls", "module"), [(nnsight.NNsightEager, nnsight), (nnsight_hf.NNsightHF, nnsight_hf)])
class TestNNsight:
    def test_points_are_read_in_the_models_order(self, cls: type[Any], module: Any) -> None:
        """nnsight raises on a read of what the model has passed, in whatever order it was asked for."""
        program = nnsight_adapter(cls, module)._program(Capture(("logits", "resid_post.2", "z.2", "resid_post.0")))
        assert program.names == ("resid_post.0", "z.2", "resid_post.2", "logits")
        (sites,) = program.args
        assert [s.rank for s in sites] == sorted(s.rank for s in sites)

    def test_what_is_written_is_read_after_the_write(self, cls: type[Any], module: Any) -> None:
        adapter = nnsight_adapter(cls, module)
        names, before, after = adapter._around(adapter._site("z.2").rank, ("z.2", "resid_post.1", "resid_post.2"))
        assert names == ("resid_post.1", "z.2", "resid_post.2")
        assert [len(before), len(after)] == [1, 2]

    def test_a_head_is_its_columns(self, cls: type[Any], module: Any) -> None:
        program = nnsight_adapter(cls, module)._program(AblateHead(1, 1))
        assert program.args[:2] == ("o_proj 1", slice(2, 4))

    def test_a_family_without_a_row_is_refused_by_name(self, cls: type[Any], module: Any) -> None:
        adapter = nnsight_adapter(cls, module, "no_such_family")
        refusal = adapter.refuses(Capture(("resid_post.1",)), SHAPE)
        assert isinstance(refusal, Refusal)
        assert refusal.code == "model"
        assert "no_such_family" in refusal.sentence
        assert adapter.refuses(Nothing(), SHAPE) is None

    def test_a_point_without_a_row_is_refused_by_name(self, cls: type[Any], module: Any) -> None:
        refusal = nnsight_adapter(cls, module).refuses(Capture(("resid_post.1", "pattern.2")), SHAPE)
        assert isinstance(refusal, Refusal)
        assert "pattern.2" in refusal.sentence


def test_nnsight_on_vllm_has_no_gradient() -> None:
    refusal = nnsight_adapter(nnsight.NNsightEager, nnsight).refuses(Gradient("resid_post.1"), SHAPE)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "not-expressible"
    assert nnsight_adapter(nnsight_hf.NNsightHF, nnsight_hf).refuses(Gradient("resid_post.1"), SHAPE) is None


def test_rows_of_one_shape_travel_as_one_tensor() -> None:
    torch = pytest.importorskip("torch")
    same = nnsight_works.joined([[torch.zeros(3, 4), torch.ones(3, 4)], [torch.zeros(1, 4), torch.ones(1, 4)]])
    assert same.shape == (2, 4, 4)
    assert same[1].unique().tolist() == [1.0]
    mixed = nnsight_works.joined([[torch.zeros(3, 4), torch.ones(1, 9)], [torch.zeros(1, 4), torch.ones(1, 9)]])
    assert [tuple(t.shape) for t in mixed] == [(4, 4), (2, 9)]
    assert list(nnsight_works.joined([[], []])) == []


# --- padding is cut out again ---

REQUESTS = [Request("a", (5, 6, 7), 2), Request("b", (8,), 2)]


def passes() -> tuple[list[Any], list[Any], list[Any]]:
    """A prompt pass of three rows and one of one row: each value is its place, padding is -1."""
    torch = pytest.importorskip("torch")
    first = torch.tensor([[0.0, 1.0, 2.0], [-1.0, -1.0, 10.0]])[..., None]
    second = torch.tensor([[3.0], [11.0]])[..., None]
    logits = [torch.tensor([[[20.0]], [[30.0]]]), torch.tensor([[[21.0]], [[31.0]]])]
    return [first, second], logits, [[1, 2], [3, 4]]


def test_nnsight_hf_cuts_the_padding_out() -> None:
    hidden, logits, ids = passes()
    program = nnsight_hf.Program(nnsight_hf.capture, (), ("resid_post.1", "logits"))
    adapter = nnsight_hf.NNsightHF()
    first, second = adapter._outcomes(REQUESTS, ids, program, list(zip(hidden, logits, strict=True)))
    assert first.values["resid_post.1"].flatten().tolist() == [0, 1, 2, 3]
    assert second.values["resid_post.1"].flatten().tolist() == [10, 11]
    assert second.values["logits"].flatten().tolist() == [30, 31]
    assert (first.token_ids, second.token_ids) == ((1, 2), (3, 4))


def test_transformerlens_cuts_the_padding_out() -> None:
    hidden, logits, ids = passes()
    torch = pytest.importorskip("torch")
    whole = [torch.cat([torch.full_like(hidden[0][:, :2], 99.0), logits[0]], 1), logits[1]]  # every position's logits
    first, second = transformerlens._outcomes(REQUESTS, ids, {"resid_post.1": hidden, "logits": whole})
    assert first.values["resid_post.1"].flatten().tolist() == [0, 1, 2, 3]
    assert second.values["resid_post.1"].flatten().tolist() == [10, 11]
    assert first.values["logits"].flatten().tolist() == [20, 21]


# --- TransformerLens on vLLM, interp-engine ---


def test_transformerlens_on_vllm_generates_nothing() -> None:
    adapter = transformerlens_vllm.TransformerLensVLLM()
    for work in EVERY_WORK:
        refusal = adapter.refuses(work, Shape(8, 2))
        assert isinstance(refusal, Refusal), work
        assert "no generation" in refusal.sentence
    fine = [w for w in EVERY_WORK if adapter.refuses(w, Shape(8, 1)) is None]
    assert names(fine) == ["Nothing", "Capture", "Steer"]


def test_transformerlens_adds_by_its_own_words() -> None:
    points, intervene = transformerlens_vllm._asked(Steer("resid_post.1", VECTOR, ("resid_post.2",)))
    assert points == ("resid_post.2",)
    assert intervene == {"blocks.1.hook_out": {"op": "add", "value": [0.0, 1.0, 2.0, 3.0]}}


def test_interp_engine_refuses_with_its_own_reasons() -> None:
    from adapters.peers.interp_engine import InterpEngineStatic, InterpEngineVLLM

    hooked, static = InterpEngineVLLM(), InterpEngineStatic()
    fine = [w for w in EVERY_WORK if hooked.refuses(w, SHAPE) is None]
    assert names(fine) == ["Nothing", "Capture", "Steer", "Lens", "Probe"]
    logits = hooked.refuses(Capture(("resid_post.1", "logits")), SHAPE)
    assert logits is not None
    assert "logits" in logits.sentence
    assert hooked.refuses(Capture(("z.1",)), SHAPE) is None
    undeclared = static.refuses(Capture(("z.1",)), SHAPE)
    assert undeclared is not None
    assert "declared" in undeclared.sentence
    with pytest.raises(NotImplementedError, match="stays on the engine"):
        hooked.install(Capture(("resid_post.1",)))


def test_interp_engine_on_transformers_translates_every_work() -> None:
    from adapters.peers.interp_engine_hf import InterpEngineHF

    adapter = InterpEngineHF()
    assert [w for w in EVERY_WORK if adapter.refuses(w, SHAPE)] == []
    refusal = adapter.refuses(Capture(("z.1", "logits", "pattern.2")), SHAPE)
    assert isinstance(refusal, Refusal)
    assert refusal == Refusal("not-expressible", "this column translates resid_post, z, logits, not pattern.2")
    with pytest.raises(NotImplementedError, match="stays on the engine"):
        adapter.install(Capture(("resid_post.1",)))


# --- vLLM's own extraction ---


def test_extraction_reads_whole_layers_and_nothing_else() -> None:
    adapter = vllm_extract.VLLMExtract()
    fine = [w for w in EVERY_WORK if adapter.refuses(w, SHAPE) is None]
    assert names(fine) == ["Nothing", "Capture", "Probe"]
    for work in EVERY_WORK:
        if refusal := adapter.refuses(work, SHAPE):
            assert refusal.code == "not-expressible"
            assert refusal.sentence.startswith("vLLM's own extraction writes the residual stream")
    refusal = adapter.refuses(Capture(("resid_post.1", "z.2")), SHAPE)
    assert isinstance(refusal, Refusal)
    assert refusal.sentence.endswith("does not hold z.2")
    with pytest.raises(NotImplementedError, match="changes nothing"):
        adapter.run([Request("a", (1,), 1)], Steer("resid_post.1", VECTOR))
    with pytest.raises(NotImplementedError, match="changes nothing"):
        adapter.install(Steer("resid_post.1", VECTOR))


def test_extraction_is_asked_for_the_output_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for gpu, connector in ((False, "CPUConnector"), (True, "ExampleHiddenStatesConnector")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        made = vllm_extract.extraction(3, "/files")
        chosen = made["speculative_config"]["draft_model_config"]["hf_config"]
        assert chosen == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}  # 0 is the embedding
        assert made["kv_transfer_config"]["kv_connector"] == connector
        assert ("kv_connector_module_path" in made["kv_transfer_config"]) is not gpu
        assert made["kv_transfer_config"]["kv_connector_extra_config"] == {"shared_storage_path": "/files"}


def test_a_model_that_hands_out_no_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda model: config)
    said = ["Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested", "out of memory"]

    def no_engine(**arguments: Any) -> None:
        raise RuntimeError(said.pop(0))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=no_engine))
    adapter = vllm_extract.VLLMExtract()
    with pytest.raises(BootRefused, match="hands out no layer's hidden states") as refused:
        adapter.boot(tmp_path, Settings())
    assert refused.value.code == "model"
    with pytest.raises(RuntimeError, match="out of memory"):  # and no other failure is taken for a refusal
        adapter.boot(tmp_path, Settings())
    adapter.close()


# --- hotwire ---


def test_hotwire_without_a_gpu_refuses_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hotwire, "has_gpu", lambda: False)
    with pytest.raises(MissingDevice, match=r"Triton kernel.* pip install .*hotwire-vllm==0\.1\.2") as refused:
        hotwire.Hotwire().boot(tmp_path, Settings())
    assert refused.value.code == "no-device"


def test_hotwires_cells_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hotwire, "has_gpu", lambda: False)
    lines: list[dict[str, Any]] = []
    spec = worker.Spec(
        fd=-1, column=asdict(PEERS["hotwire"]), model=str(model_folder(tmp_path)), settings=asdict(Settings()),
        rows=[{"name": "generate"}, {"name": "steer"}], runs=1, seed=0, validator="", cache=str(tmp_path),
    )  # fmt: skip
    worker.serve(spec, lambda kind, **values: lines.append({"kind": kind, **values}))
    assert lines[0] == {"kind": "phase", "phase": "boot", "row": None}
    told = [(x["kind"], x["row"], x["code"], x["reason"]) for x in lines[1:]]
    assert told == [("refusal", row, "no-device", hotwire.NO_GPU) for row in ("generate", "steer")]


def test_hotwire_steers_and_no_more() -> None:
    adapter = hotwire.Hotwire()
    fine = [w for w in EVERY_WORK if adapter.refuses(w, SHAPE) is None]
    assert names(fine) == ["Nothing", "Steer"]
    watched, elsewhere = Steer("resid_post.1", VECTOR, ("resid_post.2",)), Steer("z.1", VECTOR)
    assert adapter.refuses(watched, SHAPE) == hotwire.NO_WATCH
    assert adapter.refuses(elsewhere, SHAPE) == hotwire.ONLY_STEERS
    for work in (watched, Capture(("resid_post.1",))):
        with pytest.raises(NotImplementedError, match="hotwire"):
            adapter._extra(work)


def test_hotwire_names_a_vector_once_the_engine_has_read_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    read: list[list[float]] = []
    state = SimpleNamespace(load_store=lambda path: read.append(torch.load(path, weights_only=True).tolist()))
    monkeypatch.setitem(sys.modules, "hotwire", SimpleNamespace(_state=SimpleNamespace(get=lambda: state)))
    adapter = hotwire.Hotwire()
    adapter._vectors = SimpleNamespace(name=str(tmp_path), cleanup=lambda: None)
    first = json.loads(adapter._extra(Steer("resid_post.3", VECTOR))["hotwire"])
    again = json.loads(adapter._extra(Steer("resid_post.5", VECTOR))["hotwire"])
    other = json.loads(adapter._extra(Steer("resid_post.3", VECTOR * 2))["hotwire"])
    assert (first["layer"], again["layer"], first["scale"]) == (3, 5, 1.0)
    assert first["id"] == again["id"] != other["id"]
    assert read == [VECTOR.tolist(), (VECTOR * 2).tolist()]  # each vector once
    assert adapter._extra(Nothing()) == {}
    adapter.close()


# --- whole columns, each in a process of its own ---


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A column may put plugins on the path of its process: what follows here must not find them there."""
    variables, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path


# column: (module that must be there, new tokens, works that it refuses)
WHOLE = {
    "hf": ("transformers", 6, {"capture-1", "steer", "lens", "probe", "ablate-head", "force-token", "gradient"}),
    "vanilla-eager": ("vllm", 6, {"capture-1", "steer", "lens", "probe", "ablate-head", "force-token", "gradient"}),
    "vanilla": ("vllm", 6, {"capture-1", "steer", "lens", "probe", "ablate-head", "force-token", "gradient"}),
    "nnsight-eager": ("nnsight", 6, {"gradient"}),
    "nnsight-hf": ("nnsight", 6, set()),
    "transformerlens-hf": ("transformer_lens", 6, set()),
    "transformerlens-batched": ("transformer_lens", 1, {"lens", "probe", "ablate-head", "force-token", "gradient"}),
    "transformerlens-vllm": ("transformer_lens", 1, {"lens", "probe", "ablate-head", "force-token", "gradient"}),
    "nnsight-taps": ("nnsight", 6, {"gradient"}),
    "vllm-lens": ("vllm", 6, {"ablate-head", "force-token", "gradient"}),
    "interp-engine-vllm": ("interp_engine", 6, {"ablate-head", "force-token", "gradient"}),
    "interp-engine-static": ("interp_engine", 6, {"ablate-head", "force-token", "gradient"}),
    "interp-engine-hf": ("interp_engine", 6, set()),
    "vllm-extract": ("vllm", 6, {"lens", "steer", "ablate-head", "force-token", "gradient"}),
}


def test_no_column_of_a_peer_is_left_out() -> None:
    assert set(PEERS) - set(WHOLE) == {"hotwire"}  # needs a GPU; what it says without one has its tests above


# The columns of the default grid; the others take their half minute each in CI.
ALWAYS = {"hf", "vanilla-eager", "nnsight-eager"}


@pytest.mark.engine
@pytest.mark.parametrize("column", sorted(set(WHOLE) & set(PEERS)))
def test_conformance_on_a_tiny_model(column: str) -> None:
    library, new, refused = WHOLE[column]
    if column not in ALWAYS and not os.environ.get("CI"):
        pytest.skip("runs in CI, or with CI=1")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [sys.executable, "-m", "tests.peer_conformance", column, str(new)]
    env = os.environ | environment(SETTINGS)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["failed"] == []
    assert refused <= set(report["refused"])
    accepted = {c.partition(" ")[0] for c in report["checked"]}
    assert not refused & accepted
    assert {"nothing", "unchanged"} <= accepted
    assert report["settings"]["dtype"] == "float32"
    _given_what_was_asked(column, report)


def _given_what_was_asked(column: str, report: dict[str, Any]) -> None:
    """By the engine's own word, and where it has none by the adapter's; but for what its library forces."""
    line = {"kind": "process", "column": column, **{k: report[k] for k in ("settings", "engine")}}
    head = {"kind": "session", "grid": {"settings": asdict(SETTINGS)}}
    assert [str(d) for d in differences(store([line], head)) if not d.forced] == []
    assert report["engine"]["threads"] == SETTINGS.threads
    if "hf" in column.split("-"):
        assert report["settings"]["attention"] in ("sdpa", "eager")
    else:
        assert set(engine_facts.VLLM) <= set(report["engine"]), "vLLM's configuration was not found"
