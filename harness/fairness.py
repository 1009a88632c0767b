"""Is every column of a store given the same? Their stored facts, compared with what the grid asks for and with one
another; what differs is told with the peer's reason, and what has no known reason is told as that.

    for difference in differences(read("results/smollm2/first.jsonl")):
        print(difference)

Nothing is imported but the store: this runs on old files as on new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.environments import base_of
from harness.store import Line, Store
from harness.workloads import PLAIN_COLUMNS

# What every column of a store must share with the others on its engine. A dtype is a dtype on every engine.
SHARED = ("dtype", "threads", "omp_threads", "in_process")
VLLM = (
    "max_model_len",
    "prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "chunked_prefill",
    "async_scheduling",
    "scheduling_policy",
    "tensor_parallel",
    "seed",
)
TRANSFORMERS = ("attention", "max_concurrent")
# The names that columns' own settings have for facts; read where the engine's own word is missing (older stores).
SETTINGS = {"enable_prefix_caching": "prefix_caching", "tensor_parallel_size": "tensor_parallel"} | {
    name: name for name in ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed", *TRANSFORMERS)
}

_UNCOMPILED = "vLLM's breakable graphs, which it needs, turn the compiler off; without a GPU there is no graph either"
# (library, fact) -> why it cannot be as the others are.
FORCED: Mapping[tuple[str, str], str] = {
    ("nnsight", "chunked_prefill"): "its own default, so that a block sees its prompt whole",
    ("nnsight", "compilation"): _UNCOMPILED,
    ("interp-engine", "compilation"): _UNCOMPILED,
    ("interp-engine", "in_process"): "its engine is vLLM's asynchronous one, whose core is a process of its own",
    ("interp-engine", "max_concurrent"): "its generation on transformers has no batch",
    ("tapgrid", "huge_pages"): "its worker asks Linux for them, which vLLM's does not",
    ("transformer-lens", "attention"): "its bridge loads models with eager attention, whose steps it can hook",
}


@dataclass(frozen=True)
class Difference:
    """A fact in which a column is not as the others. `forced` is the reason; empty: nobody knows one."""

    column: str
    fact: str
    value: str
    usual: str
    forced: str = ""

    def __str__(self) -> str:
        """For people.

        >>> print(Difference("a", "chunked_prefill", "False", "True", "its own default"))
        a: chunked prefill False where others have True (its own default)
        """
        why = self.forced or "for no reason that is known here"
        return f"{self.column}: {self.fact.replace('_', ' ')} {self.value} where others have {self.usual} ({why})"


def differences(store: Store, session: Line | None = None) -> list[Difference]:
    """Every fact in which a column differs from what the grid asks for, or, where it asks for nothing, from most
    columns on its engine.

    Settings that a column is about (compiled or eager, its taps) are no part of it. `session` is what was asked, where
    the store holds several.
    """
    columns = {str(p["column"]): p for p in store.processes}
    known = {c: _facts(line) for c, line in columns.items()}
    engines = {c: _engine(line) for c, line in columns.items()}
    wanted = _wanted(store.session if session is None else session)
    found = []
    for facts, groups in ((SHARED, [list(known)]), (VLLM, _of(engines, "vllm")), (TRANSFORMERS, _of(engines, "hf"))):
        for group in groups:
            for fact in facts:
                found += _compare(fact, {c: known[c].get(fact) for c in group}, columns, wanted.get(fact))
    for group in _of(engines, "vllm"):
        # Compiled or not, of those that did not ask for an eager engine.
        asked = {c: known[c].get("compilation") for c in group if known[c].get("eager") is False}
        pages = {c: known[c].get("huge_pages") for c in group}
        for fact, values in (("compilation", asked), ("huge_pages", pages)):
            plain = next((v for c, v in values.items() if base_of(c) in PLAIN_COLUMNS), None)
            found += _compare(fact, values, columns, plain)
    return sorted([*found, *_prompts(store)], key=lambda d: list(columns).index(d.column))


def _wanted(session: Line) -> dict[str, Any]:
    """What the grid asks of every column, by fact; nothing where the store does not say (older ones, imported ones)."""
    asked = (session.get("grid") or {}).get("settings")
    if not asked:
        return {}
    alike = {n: asked[n] for n in ("dtype", "max_model_len", "threads", "tensor_parallel", "seed") if n in asked}
    batch = {n: asked["max_concurrent"] for n in ("max_num_seqs", "max_concurrent") if "max_concurrent" in asked}
    return alike | batch | {"prefix_caching": False, "in_process": asked.get("tensor_parallel", 1) == 1}


def _of(engines: Mapping[str, str], engine: str) -> list[list[str]]:
    """Columns on one engine, those of each environment among themselves."""
    mine = [c for c, e in engines.items() if e == engine]
    return [[c for c in mine if c.partition("@")[2] == at] for at in dict.fromkeys(c.partition("@")[2] for c in mine)]


def _compare(fact: str, values: Mapping[str, Any], columns: Mapping[str, Line], wanted: Any) -> list[Difference]:
    said = {c: str(v) for c, v in values.items() if v is not None}
    usual = _most(said) if wanted is None else str(wanted)
    odd = {c: v for c, v in said.items() if v != usual}
    return [Difference(c, fact, v, usual or "", FORCED.get((_library(columns[c]), fact), "")) for c, v in odd.items()]


def _most(said: Mapping[str, str]) -> str | None:
    """What most columns say; between equals, what a plain one does."""
    plain_first = sorted(said, key=lambda c: base_of(c) not in PLAIN_COLUMNS)
    values = [said[c] for c in plain_first]
    return max(values, key=values.count, default=None)


def _prompts(store: Store) -> list[Difference]:
    """Runs of one row and number whose prompts were not token for token those of the other columns."""
    found: dict[tuple[str, Any], dict[str, set[str]]] = {}
    for run in store.runs:
        if run.get("prompts"):
            columns = found.setdefault((str(run["row"]), run["run"]), {})
            columns.setdefault(str(run["column"]), set()).add(str(run["prompts"]))
    wrong: dict[str, Difference] = {}
    for (row, _), columns in found.items():
        said = {c: "/".join(sorted(v)) for c, v in columns.items()}
        usual = _most(said) or ""
        for c, v in said.items():
            if v != usual:
                wrong.setdefault(c, Difference(c, f"prompts_of_{row}", v, usual))
    return list(wrong.values())


def _facts(line: Line) -> dict[str, Any]:
    own = line.get("settings") or {}
    stated = {fact: own[name] for name, fact in SETTINGS.items() if name in own}
    env = (line.get("env") or {}).get("OMP_NUM_THREADS")
    measured = line.get("engine") or {}
    return stated | ({"omp_threads": env} if env else {}) | dict(measured)


def _engine(line: Line) -> str:
    measured, own = line.get("engine") or {}, line.get("settings") or {}
    on_vllm = "max_num_batched_tokens" in measured or "max_num_batched_tokens" in own
    return "vllm" if on_vllm else "hf"


def _library(line: Line) -> str:
    return str((line.get("settings") or {}).get("library") or "tapgrid")


def sentences(found: Sequence[Difference]) -> list[str]:
    """The differences for people, one line for what several columns have in common.

    >>> same = [Difference(c, "in_process", "False", "True", "its own") for c in ("a", "b")]
    >>> sentences(same)
    ['a, b: in process False where others have True (its own)']
    """
    alike: dict[Difference, list[str]] = {}
    for d in found:
        alike.setdefault(replace(d, column=""), []).append(d.column)
    return [str(replace(d, column=", ".join(columns))) for d, columns in alike.items()]
