"""Rows: token-exact prompts, the work of each, and its number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adapters.work import AblateHead, Capture, ForceToken, Gradient, Lens, Nothing, Outcome, Probe, Refusal, Steer
from harness.models import ModelInfo
from harness.workloads import (
    KINDS,
    WARM_UP,
    Row,
    count_problem,
    ordinary_ids,
    requests_for,
    row_from,
    value,
    work_for,
)

INFO = ModelInfo(layers=6, d_model=16, heads=4, kv_heads=2, head_dim=4, vocab=400, bos=None, family="llama")
WITH_BOS = ModelInfo(layers=6, d_model=16, heads=4, kv_heads=2, head_dim=4, vocab=400, bos=2, family="gemma3")
IDS = range(8, 400)


def row(name: str, **knobs: int) -> Row:
    return row_from(name, Row(name, **knobs))  # type: ignore[arg-type]


def test_the_rows_are_in_canonical_order() -> None:
    wanted = (
        "generate generate-x8 generate-x32 capture-1 capture-all capture-1-x8 capture-1-x32 capture-all-x8 "
        "steer steer-x8 lens lens-x8 probe probe-x8 ablate-head ablate-head-x8 force-token force-token-x8 "
        "forward sweep sweep-installed gradient"
    )
    assert list(KINDS) == wanted.split()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("info", [INFO, WITH_BOS], ids=["no bos", "bos"])
def test_prompts_are_token_exact_distinct_and_begin_apart(name: str, info: ModelInfo) -> None:
    r = row(name, prompt_tokens=12)
    requests = requests_for(r, info, IDS, run=0)
    start = 0 if info.bos is None else 1
    assert len(requests) == r.requests == KINDS[name].requests
    assert {len(q.token_ids) for q in requests} == {12}
    assert {q.new_tokens for q in requests} == {r.new_tokens}
    assert all(q.token_ids[:start] == (2,) * start for q in requests)
    assert len({q.token_ids[start] for q in requests}) == len(requests)
    assert all(t in IDS for q in requests for t in q.token_ids[start:])
    assert len({q.id for q in requests}) == len(requests)


def test_prompts_repeat_between_processes_and_never_within_one() -> None:
    rows = [row(n, prompt_tokens=20) for n in ("generate", "generate-x8", "capture-1", "sweep", "sweep-installed")]
    seen = [q.token_ids for r in rows for run in (WARM_UP, 0, 1, 2) for q in requests_for(r, INFO, IDS, run=run)]
    again = [q.token_ids for r in rows for run in (WARM_UP, 0, 1, 2) for q in requests_for(r, INFO, IDS, run=run)]
    assert seen == again
    assert len(set(seen)) == len(seen)
    assert requests_for(rows[0], INFO, IDS, run=0, seed=1)[0].token_ids != seen[1]


def test_more_requests_than_first_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="64 requests need as many first tokens, the vocabulary has 32"):
        requests_for(row("sweep"), INFO, range(32), run=0)


def test_ordinary_ids_leave_special_and_absent_ids_out(tmp_path: Path) -> None:
    vocab = {"<s>": 0, "a": 1, "b": 2, "c": 3, "beyond": 900}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 0, "content": "<s>", "special": True}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert ordinary_ids(tmp_path, INFO) == (1, 2, 3)
    pieces = tmp_path / "unigram"
    pieces.mkdir()
    (pieces / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": [["<s>", 0.0], ["a", -1.0]]}, "added_tokens": []})
    )
    assert ordinary_ids(pieces, INFO) == (0, 1)
    assert ordinary_ids(tmp_path / "none", INFO) == tuple(range(8, 400))


def test_the_work_of_every_row() -> None:
    def work(name: str, **knobs: int) -> object:
        return work_for(row(name, **knobs), INFO, IDS, plain=False)

    assert work("generate") == work("generate-x8") == Nothing()
    assert work("capture-1") == work("capture-1-x8") == work("forward") == work("sweep") == Capture(("resid_post.3",))
    assert work("capture-1", layer=0) == Capture(("resid_post.0",))
    assert work("capture-all") == Capture(tuple(f"resid_post.{i}" for i in range(6)))
    assert work("lens") == Lens("resid_post.3")
    assert work("ablate-head", head=2) == AblateHead(3, 2)
    assert work("force-token", token=7) == ForceToken(7)
    forced = work("force-token")
    assert isinstance(forced, ForceToken)
    assert forced.id in IDS
    assert work("gradient") == Gradient("resid_post.3")
    steer, probe = work("steer"), work("probe")
    assert isinstance(steer, Steer)
    assert isinstance(probe, Probe)
    assert steer.vector.shape == probe.direction.shape == (16,)
    assert steer.vector.dtype == np.float32
    assert 2 < float(np.std(steer.vector)) < 6
    assert float(np.linalg.norm(probe.direction)) == pytest.approx(1)
    assert not np.allclose(steer.vector, probe.direction * np.linalg.norm(steer.vector))


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_column_runs_its_denominators_and_refuses_the_rest(name: str) -> None:
    work = work_for(row(name), INFO, IDS, plain=True)
    if name in ("generate", "generate-x8", "generate-x32", "forward", "sweep"):
        assert work == Nothing()
    else:
        assert isinstance(work, Refusal)
        assert work.code == "not-plain"
        assert name in work.sentence


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("capture-1", {"layer": 6}, "layer = 6, but the model has layers 0 to 5"),
        ("ablate-head", {"head": 4}, "head = 4, but the model has heads 0 to 3"),
        ("force-token", {"token": 400}, "token = 400, but the vocabulary has 400 ids"),
    ],
)
def test_a_knob_that_the_model_lacks_is_an_error(name: str, knobs: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        work_for(row(name, **knobs), INFO, IDS, plain=False)


def test_counts() -> None:
    r = row("generate-x8", new_tokens=3)
    good = [Outcome((1, 2, 3))] * 8
    assert count_problem(r, good) is None
    assert count_problem(r, good[:7]) == "7 outcomes for 8 requests"
    assert count_problem(r, [*good[:7], Outcome((1, 2))]) == "request 7 came back with 2 new tokens, 3 were asked for"
    assert count_problem(row("gradient"), [Outcome(())]) is None


@pytest.mark.parametrize(
    ("name", "tokens", "seconds", "wanted"),
    [
        ("generate", 32, 2.0, 16.0),
        ("generate", 0, 2.0, None),
        ("generate", 32, 0.0, None),
        ("generate", 32, -1.0, None),
        ("sweep", 64, 2.0, 2.0),
        ("gradient", 0, 2.0, 2.0),
    ],
)
def test_a_value_is_a_number_or_none(name: str, tokens: int, seconds: float, wanted: float | None) -> None:
    assert value(row(name), tokens, seconds) == wanted


def test_the_plain_row_of_each_row() -> None:
    plain = {n: k.plain for n, k in KINDS.items()}
    assert plain["capture-all"] == plain["force-token"] == "generate"
    assert {p for n, p in plain.items() if n.endswith("-x8")} == {"generate-x8"}
    assert {n: k.requests for n, k in KINDS.items() if n.endswith("-x8")} == {n: 8 for n in KINDS if n.endswith("-x8")}
    assert plain["capture-1-x32"] == "generate-x32"
    assert plain["sweep-installed"] == plain["sweep"] == "sweep"
    assert plain["gradient"] is None
    assert {n for n, k in KINDS.items() if k.unit == "s"} == {"forward", "sweep", "sweep-installed", "gradient"}
