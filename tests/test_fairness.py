"""Every column of a store is given the same, by what the store says; what a peer forces is told with its reason."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.columns import all_columns, make
from adapters.engines.settings import environment, vllm_arguments
from adapters.work import Request, Settings
from harness import engine_facts, fairness, grid, workloads
from harness.fairness import Difference, differences, sentences
from harness.models import ModelInfo
from harness.store import Line, Store
from harness.workloads import Row, prompts_digest, requests_for
from tests.fake_sessions import session

ROOT = Path(__file__).resolve().parent.parent
ASKED = dataclasses.asdict(Settings())
ALIKE = {
    "dtype": "bfloat16", "threads": 1, "in_process": True, "omp_threads": "1", "max_model_len": 1024,
    "prefix_caching": False, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "chunked_prefill": True,
    "async_scheduling": False, "scheduling_policy": "fcfs", "tensor_parallel": 1, "seed": 0,
}  # fmt: skip
COLUMNS = ("vanilla", "vanilla-eager", "nnsight-eager", "interp-engine-vllm")


def made(
    settings: Mapping[str, Any] = ASKED,
    engine: Mapping[str, Mapping[str, Any]] | None = None,
    library: Mapping[str, str] | None = None,
    columns: tuple[str, ...] = COLUMNS,
) -> Store:
    """A store of columns that are alike but for what `engine` says of some."""
    found = session(lambda *_: 3.0, columns=columns, rounds=1, grid={"settings": dict(settings)})
    processes = tuple(
        p
        | {"engine": ALIKE | dict((engine or {}).get(p["column"], {})), "env": {"OMP_NUM_THREADS": "1"}}
        | {"settings": {"library": (library or {}).get(p["column"], "vllm"), "max_num_batched_tokens": 1024}}
        for p in found.processes
    )
    return dataclasses.replace(found, processes=processes)


# --- comparing ---


def test_columns_that_are_alike_have_no_difference() -> None:
    assert differences(made()) == []


@pytest.mark.parametrize(
    ("fact", "value", "usual"),
    [
        ("dtype", "float32", "bfloat16"), ("threads", 2, "1"), ("in_process", False, "True"),
        ("omp_threads", "2", "1"), ("max_model_len", 2048, "1024"), ("prefix_caching", True, "False"),
        ("max_num_seqs", 1, "8"), ("max_num_batched_tokens", 512, "1024"), ("chunked_prefill", False, "True"),
        ("async_scheduling", True, "False"), ("scheduling_policy", "priority", "fcfs"), ("tensor_parallel", 2, "1"),
        ("seed", 1, "0"),
    ],
)  # fmt: skip
def test_each_fact_that_one_column_has_otherwise_is_told(fact: str, value: Any, usual: str) -> None:
    (found,) = differences(made(engine={"nnsight-eager": {fact: value}}))
    assert (found.column, found.fact, found.value, found.usual) == ("nnsight-eager", fact, str(value), usual)


def test_what_all_columns_have_and_the_grid_did_not_ask_for_is_told_of_all() -> None:
    """A majority cannot make a wrong setting right."""
    found = differences(made(engine={c: {"prefix_caching": True} for c in COLUMNS}))
    assert sorted((d.column, d.value, d.usual) for d in found) == [(c, "True", "False") for c in sorted(COLUMNS)]


def test_between_equals_the_plain_column_is_the_usual_one() -> None:
    (found,) = differences(
        made(engine={"nnsight-eager": {"chunked_prefill": False}}, columns=("nnsight-eager", "vanilla"))
    )
    assert (found.column, found.usual) == ("nnsight-eager", "True")


def test_a_reason_belongs_to_its_library_and_fact() -> None:
    odd = {c: {"in_process": False} for c in ("nnsight-eager", "interp-engine-vllm")}
    library = {"nnsight-eager": "nnsight", "interp-engine-vllm": "interp-engine"}
    found = {d.column: d.forced for d in differences(made(engine=odd, library=library))}
    assert found["nnsight-eager"] == ""
    assert "process of its own" in found["interp-engine-vllm"]


def test_columns_of_another_environment_are_compared_with_their_own_vanilla() -> None:
    columns = ("vanilla", "vanilla@vllm-0.32", "tapgrid-eager@vllm-0.32")
    newer = {c: {"async_scheduling": True} for c in columns[1:]}
    assert differences(made(engine=newer, columns=columns)) == []
    newer["tapgrid-eager@vllm-0.32"] = {"async_scheduling": False}
    (found,) = differences(made(engine=newer, columns=columns))
    assert (found.column, found.usual) == ("tapgrid-eager@vllm-0.32", "True")


def test_transformers_columns_are_compared_by_attention_and_not_by_vllms_scheduler() -> None:
    found = made(columns=("vanilla", "hf", "nnsight-hf"))
    processes = tuple(
        p
        if p["column"] == "vanilla"
        else p
        | {"engine": {"dtype": "bfloat16", "threads": 1, "in_process": True}}
        | {"settings": {"library": "x", "attention": "sdpa" if p["column"] == "hf" else "eager", "max_concurrent": 8}}
        for p in found.processes
    )
    (one,) = differences(dataclasses.replace(found, processes=processes))
    assert (one.column, one.fact, one.value, one.usual) == ("nnsight-hf", "attention", "eager", "sdpa")


def test_an_engine_that_asked_to_be_compiled_and_is_not_is_told_with_what_forces_it() -> None:
    columns = ("vanilla", "vanilla-eager", "tapgrid-taps", "nnsight-taps", "interp-engine-static", "vllm-extract")
    compiled = {"eager": False, "compilation": "DYNAMO_TRACE_ONCE"}
    engine = {c: dict(compiled) for c in columns} | {"vanilla-eager": {"eager": True, "compilation": "NONE"}}
    library = {"nnsight-taps": "nnsight", "interp-engine-static": "interp-engine"}
    assert differences(made(engine=engine, library=library, columns=columns)) == []
    for c in library:
        engine[c]["compilation"] = "NONE"
    (line,) = sentences(differences(made(engine=engine, library=library, columns=columns)))
    assert line.startswith(
        "interp-engine-static, nnsight-taps: compilation NONE where others have DYNAMO_TRACE_ONCE (vLLM's breakable"
    )
    engine["vllm-extract"]["compilation"] = "NONE"
    found = sentences(differences(made(engine=engine, library=library, columns=columns)))
    assert [line for line in found if line.startswith("vllm-extract") and "no reason that is known" in line]


def test_older_stores_are_read_by_their_settings_and_variables() -> None:
    found = session(lambda *_: 3.0, columns=("vanilla", "other"), rounds=1, grid={"settings": ASKED})
    processes = tuple(
        p | {"settings": {"enable_prefix_caching": p["column"] == "other"}, "env": {"OMP_NUM_THREADS": "1"}}
        for p in found.processes
    )
    old = dataclasses.replace(found, processes=processes)
    assert [(d.column, d.fact) for d in differences(old)] == []  # on no engine that caches, by what it says
    processes = tuple(p | {"settings": p["settings"] | {"max_num_batched_tokens": 1024}} for p in processes)
    old = dataclasses.replace(found, processes=processes)
    assert [(d.column, d.fact, d.value) for d in differences(old)] == [("other", "prefix_caching", "True")]


def test_people_read_one_line_for_what_columns_have_in_common() -> None:
    found = [
        Difference("a", "chunked_prefill", "False", "True", "its own default"),
        Difference("b", "chunked_prefill", "False", "True", "its own default"),
        Difference("b", "seed", "1", "0"),
    ]
    assert sentences(found) == [
        "a, b: chunked prefill False where others have True (its own default)",
        "b: seed 1 where others have 0 (for no reason that is known here)",
    ]


# --- prompts ---


def with_prompts(found: Store, of: Mapping[tuple[str, int], str]) -> Store:
    return dataclasses.replace(
        found, runs=tuple(r | {"prompts": of.get((r["column"], r["run"]), f"p{r['run']}")} for r in found.runs)
    )


def test_the_same_prompts_by_token_id_in_every_column() -> None:
    assert differences(with_prompts(made(), {})) == []
    (found,) = differences(with_prompts(made(), {("nnsight-eager", 1): "other"}))
    assert (found.column, found.fact, found.value, found.usual) == (
        "nnsight-eager", "prompts_of_generate", "other", "p1",
    )  # fmt: skip


def test_a_digest_is_of_token_ids_and_counts() -> None:
    one = Request("a", (1, 2, 3), 4)
    same = Request("another name", (1, 2, 3), 4)
    others = [Request("a", (1, 2), 4), Request("a", (12, 3), 4), Request("a", (1, 2, 3), 5)]
    assert prompts_digest([one]) == prompts_digest([same])
    assert len({prompts_digest([r]) for r in [one, *others]} | {prompts_digest([one, one])}) == 5


def test_prompts_of_a_run_do_not_depend_on_the_column_and_do_on_the_run() -> None:
    info = ModelInfo(layers=4, d_model=8, heads=2, kv_heads=1, head_dim=4, vocab=100, bos=1, family="llama")
    row = Row("generate", prompt_tokens=9)
    digests = [prompts_digest(requests_for(row, info, range(8, 100), run=n, seed=0)) for n in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


# --- what is stored ---


def test_facts_of_a_process_without_an_engine() -> None:
    code = "import json; from harness import engine_facts as e; print(json.dumps(e.facts()))"
    env = environment(Settings(threads=1)) | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"in_process": True, "omp_threads": "1"}


def test_how_much_memory_is_on_huge_pages(tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text("00400000-7fff00000000 ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nAnonHugePages:    464896 kB\n")
    assert engine_facts.huge_bytes(rollup) == 464896 * 1024
    rollup.write_text("Rss: 9 kB\n")
    assert engine_facts.huge_bytes(rollup) is None
    assert engine_facts.huge_bytes(tmp_path / "none") is None


def test_who_is_on_huge_pages_alone_is_told_with_its_reason() -> None:
    columns = ("vanilla", "tapgrid-eager", "tapgrid-taps", "nnsight-eager")
    pages = {c: {"huge_pages": c.startswith("tapgrid")} for c in columns}
    library = {c: "tapgrid" for c in columns if c.startswith("tapgrid")}
    found = made(engine=pages, library=library, columns=columns)
    said = [(d.column, d.fact, d.value, d.usual) for d in differences(found)]
    assert said == [("tapgrid-eager", "huge_pages", "True", "False"), ("tapgrid-taps", "huge_pages", "True", "False")]
    assert all("asks Linux" in d.forced for d in differences(found))


def test_an_engine_in_a_process_of_its_own_is_seen_and_a_helper_is_not() -> None:
    sleep = "import time; time.sleep(60)"
    helper = subprocess.Popen([sys.executable, "-c", sleep, "resource_tracker", "spawn_main"])
    try:
        assert engine_facts.facts()["in_process"] is True
        told = "huge_pages" in engine_facts.facts(SimpleNamespace(engine=LLMEngine()))
        assert told is (engine_facts.huge_bytes() is not None)
        core = subprocess.Popen([sys.executable, "-c", sleep, "spawn_main"])
        try:
            assert engine_facts.facts()["in_process"] is False
            adapter = SimpleNamespace(engine=LLMEngine())
            assert "huge_pages" not in engine_facts.facts(adapter), "it would be this process's, which runs no engine"
        finally:
            core.kill()
            core.wait()
    finally:
        helper.kill()
        helper.wait()


class CompilationMode(IntEnum):
    """As vLLM's own."""

    NONE = 0


def config(**changes: Any) -> Any:
    """Shaped as vLLM's own."""
    values = {
        "model_config": {"dtype": "torch.bfloat16", "max_model_len": 256, "seed": 0, "enforce_eager": True},
        "cache_config": {"enable_prefix_caching": False},
        "scheduler_config": {
            "max_num_seqs": 4, "max_num_batched_tokens": 256, "enable_chunked_prefill": True,
            "async_scheduling": False, "policy": "fcfs",
        },
        "parallel_config": {"tensor_parallel_size": 1},
        "compilation_config": {"mode": CompilationMode.NONE, "cudagraph_mode": CompilationMode.NONE},
    }  # fmt: skip
    for path, value in changes.items():
        part, _, name = path.partition("__")
        values[part][name] = value
    return SimpleNamespace(**{part: SimpleNamespace(**v) for part, v in values.items()})


def test_facts_of_vllms_own_configuration() -> None:
    assert engine_facts.from_configs([config(), config()]) == {
        "dtype": "bfloat16", "max_model_len": 256, "seed": 0, "prefix_caching": False, "max_num_seqs": 4,
        "max_num_batched_tokens": 256, "chunked_prefill": True, "async_scheduling": False,
        "scheduling_policy": "fcfs", "tensor_parallel": 1, "eager": True,
        "compilation": "NONE", "cudagraph_mode": "NONE",
    }  # fmt: skip
    assert engine_facts.from_configs([]) == {}


def test_configurations_that_disagree_are_both_told() -> None:
    found = engine_facts.from_configs([config(), config(scheduler_config__max_num_seqs=8)])
    assert found["max_num_seqs"] == [4, 8]


class LLMEngine:
    """As vLLM calls it."""

    def __init__(self, prefix_caching: bool = True) -> None:
        self.vllm_config = config(cache_config__enable_prefix_caching=prefix_caching)


class TheirEngine(LLMEngine):
    """As a library may call its own."""


def test_a_configuration_is_found_wherever_a_library_keeps_it_and_out_of_the_collectors_sight() -> None:
    engine = TheirEngine()
    looked_at = config(scheduler_config__enable_chunked_prefill=False)  # of a model that does not run
    adapter = SimpleNamespace(
        _model=SimpleNamespace(driver={"engines": [SimpleNamespace(_hidden=engine)]}, meta=looked_at)
    )
    gc.freeze()  # as vLLM does
    try:
        found = engine_facts.facts(adapter)
        assert (found["prefix_caching"], found["chunked_prefill"]) == (True, True)
    finally:
        gc.unfreeze()
    assert "prefix_caching" not in engine_facts.facts(SimpleNamespace())
    assert "prefix_caching" not in engine_facts.facts()


def test_the_search_ends_and_does_not_leave_the_adapter() -> None:
    ring: dict[str, Any] = {"modules": sys.modules[__name__], "kind": LLMEngine}
    ring["itself"] = ring
    assert engine_facts.held(ring, "LLMEngine") == []  # a class is no engine, and a module is elsewhere
    far: list[Any] = [LLMEngine()]
    for _ in range(50):
        far = [far]
    assert len(engine_facts.held(far, "LLMEngine")) == 1
    assert engine_facts.held(far, "LLMEngine", most=20) == []


# --- what columns boot with ---


def test_every_vllm_column_starts_from_one_set_of_arguments() -> None:
    """Nothing in a peer's file sets an argument that decides fairness."""
    fair = {"dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "seed"}
    assert fair <= set(vllm_arguments(Path("m"), Settings(), eager=True))
    for column in all_columns().values():
        module = column.target.partition(":")[0]
        text = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
        set_there = {name for name in fair for line in text.splitlines() if f'"{name}": ' in line or f"{name}=" in line}
        allowed = {"dtype", "max_model_len"} if "interp_engine" in module else {"dtype"}
        assert set_there <= allowed, (column.name, set_there)


def test_every_reason_is_of_a_library_that_some_column_names() -> None:
    libraries = set()
    for column in all_columns().values():
        module = column.target.partition(":")[0]
        text = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
        libraries |= {lib for lib, _ in fairness.FORCED if f'"library": "{lib}"' in text}
        libraries |= {"tapgrid"} if module.startswith("adapters.ours") else set()  # which names none
        assert make(column).plain in (True, False)
    assert libraries == {lib for lib, _ in fairness.FORCED}
    facts = {*fairness.SHARED, *fairness.VLLM, *fairness.TRANSFORMERS, "compilation", "huge_pages"}
    assert {fact for _, fact in fairness.FORCED} <= facts
    assert set(engine_facts.VLLM) - {"eager", "cudagraph_mode"} <= facts  # the report shows what those two make


def test_every_committed_grid_asks_for_what_is_compared() -> None:
    for name in grid.names():
        line: Line = {"grid": grid.to_dict(grid.load(name))}
        assert fairness._wanted(line)["prefix_caching"] is False
        assert fairness._wanted(line)["max_num_seqs"] == grid.load(name).settings.max_concurrent


def test_a_row_is_asked_for_alike_whatever_the_column() -> None:
    info = ModelInfo(layers=4, d_model=8, heads=2, kv_heads=1, head_dim=4, vocab=100, bos=None, family="llama")
    for row in workloads.KINDS:
        made_row = workloads.row_from(row, Row(row, prompt_tokens=5))
        assert len(requests_for(made_row, info, range(8, 100), run=0)) == made_row.requests
