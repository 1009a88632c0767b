"""The validator on small models: an honest engine passes every check, a dishonest one fails its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.work import (
    AblateHead,
    Adapter,
    Capture,
    ForceToken,
    Nothing,
    Outcome,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
)
from tests.validation_adapter import HooksAdapter, LocalServer, make_model, some_requests, works
from validation import values, writes
from validation.finding import Finding
from validation.inprocess import VALUE_TOKENS, Validator, chosen

torch = pytest.importorskip("torch")
WORKS = works()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def validator_for(folder: Path, dtype: str, cache: Path) -> Validator:
    validator = Validator(folder, Settings(dtype=dtype), cache)
    validator.refs.server = LocalServer()
    return validator


@pytest.fixture(scope="module")
def validator(folder: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Validator:
    return validator_for(folder, dtype, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def adapter(folder: Path, dtype: str) -> Iterator[HooksAdapter]:
    adapter = HooksAdapter()
    adapter.boot(folder, Settings(dtype=dtype))
    yield adapter
    adapter.close()


def words(findings: Sequence[Finding]) -> set[str]:
    return {f.verdict for f in findings}


class Spoiling:
    """An adapter whose outcomes go through `spoil`."""

    def __init__(self, adapter: Any, spoil: Callable[[list[Outcome]], list[Outcome]]) -> None:
        self.adapter, self.spoil = adapter, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        return self.spoil(self.adapter.run(requests, work))


def with_values(outcome: Outcome, **changed: Any) -> Outcome:
    return replace(outcome, values={**outcome.values, **changed})


def changed(outcome: Outcome, point: str, change: Callable[[Any], Any]) -> Outcome:
    return with_values(outcome, **{point: change(outcome.values[point])})


class TestReads:
    def test_an_honest_engine_passes_at_every_layer_and_the_logits(
        self, validator: Validator, adapter: HooksAdapter
    ) -> None:
        found = validator.check_reads(adapter, some_requests())
        assert [(f.what, f.point, f.layer) for f in found] == [
            *(("read", "resid_post", n) for n in range(6)), ("read", "logits", None), ("value", "tokens", None),
        ]  # fmt: skip
        assert words(found) == {"PASS"}, found
        assert [f.nearest_layer for f in found[:6]] == list(range(6))
        assert all(f.ratio is not None and 0 < f.ratio <= 2.5 for f in found[:7])

    def test_logits_are_left_out_where_the_adapter_refuses_them_and_it_is_said(
        self, validator: Validator, folder: Path, dtype: str
    ) -> None:
        adapter = HooksAdapter(without=["logits"])
        adapter.boot(folder, Settings(dtype=dtype))
        found = validator.check_reads(adapter, some_requests())
        assert [f.point for f in found] == ["resid_post"] * 6 + ["tokens"]
        assert found[-1].reason.endswith("logits not read: no logits here")

    def test_a_library_of_one_token_and_one_prompt_a_call_is_asked_for_that(
        self, folder: Path, validator: Validator, dtype: str
    ) -> None:
        class OneAtATime(HooksAdapter):
            def refuses(self, work: Work, shape: Shape) -> Refusal | None:
                if shape.new_tokens > 1 or shape.requests > 1:
                    return Refusal("not-expressible", "one token, one prompt")
                return super().refuses(work, shape)

        adapter = OneAtATime()
        adapter.boot(folder, Settings(dtype=dtype))
        found = validator.check_reads(adapter, some_requests())
        assert {f.verdict for f in found} == {"PASS"}
        assert found[-1].reason.endswith("fewer tokens were asked for: one token, one prompt")
        assert words(found) == {"PASS"}

    def test_a_plain_engine_is_checked_by_its_tokens(self, validator: Validator, folder: Path, dtype: str) -> None:
        adapter = HooksAdapter(without=["resid_post"])
        adapter.boot(folder, Settings(dtype=dtype))
        (found,) = validator.check_reads(adapter, some_requests())
        assert (found.what, found.point, found.verdict) == ("value", "tokens", "PASS")
        assert "only tokens were checked: no resid_post.0 here" in found.reason

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda a, b, c: [a, b], "2 outcomes for 3 requests"),
            (
                lambda a, b, c: [a, replace(b, token_ids=b.token_ids[1:]), c],
                "request r1: 5 new tokens, 6 were asked for",
            ),
            (
                lambda a, b, c: [replace(a, token_ids=(999, *a.token_ids[1:])), b, c],
                "token id 999 is not in the vocabulary",
            ),
            (
                lambda a, b, c: [a, replace(b, values={}), c],
                "request r1 came back without resid_post.0; it has no values",
            ),
            (
                lambda a, b, c: [a, changed(b, "resid_post.3", lambda v: v[1:]), c],
                r"request r1: shape \(23, 64\), expected",
            ),
            (lambda a, b, c: [changed(a, "resid_post.3", lambda v: v * float("nan")), b, c], "NaN or infinity"),
            (lambda a, b, c: [changed(a, "logits", lambda v: v * 0), b, c], "request r0: every token is zero"),
        ],
    )
    def test_what_is_missing_or_misshapen_fails_with_its_request(
        self, validator: Validator, adapter: HooksAdapter, spoil: Any, says: str
    ) -> None:
        import re

        found = validator.check_reads(Spoiling(adapter, lambda os: spoil(*os)), some_requests())
        assert words(found) == {"FAIL"}
        assert re.search(says, found[0].reason), found[0].reason

    def test_rows_given_to_the_wrong_request_of_equal_length(self, validator: Validator, adapter: HooksAdapter) -> None:
        def swap(os: list[Outcome]) -> list[Outcome]:
            return [replace(os[0], values=os[1].values), replace(os[1], values=os[0].values)]

        found = validator.check_reads(Spoiling(adapter, swap), some_requests((20, 20)))
        assert "FAIL" in {f.verdict for f in found if f.point == "resid_post"}

    def test_the_same_rows_given_to_two_requests(self, validator: Validator, adapter: HooksAdapter) -> None:
        found = validator.check_reads(
            Spoiling(adapter, lambda os: [os[0], replace(os[1], values=os[0].values)]), some_requests((20, 20))
        )
        assert "requests r0 and r1 have different prompts and the very same values" in found[0].reason

    def test_a_constant_on_the_logits_is_no_error_and_is_said(
        self, validator: Validator, adapter: HooksAdapter
    ) -> None:
        def lift(os: list[Outcome]) -> list[Outcome]:
            return [with_values(o, logits=o.values["logits"].float() + 12.5) for o in os]

        logits = next(f for f in validator.check_reads(Spoiling(adapter, lift), some_requests()) if f.point == "logits")
        assert logits.verdict == "PASS"
        assert "constant offset of 12.5" in logits.reason

    def test_prompts_that_share_their_first_token_tell_the_validator_of_bos(
        self, folder: Path, adapter: HooksAdapter, tmp_path: Path
    ) -> None:
        validator = validator_for(folder, "bfloat16", tmp_path)
        requests = [replace(r, token_ids=(2, *r.token_ids)) for r in some_requests()]
        validator.check_reads(adapter, requests)
        assert validator.truth.first == 2
        assert all(p.ids[0] == 2 for group in validator.truth._groups() for p in group)


class TestRows:
    @pytest.mark.parametrize("row", list(WORKS))
    def test_an_honest_run_passes(self, validator: Validator, adapter: HooksAdapter, row: str) -> None:
        requests = some_requests((40,), new=1 if row == "gradient" else 12, seed=4)
        found = validator.check_row(row, WORKS[row], requests, adapter.run(requests, WORKS[row]))
        assert words(found) == {"PASS"}, found
        assert {(f.what, f.row) for f in found} == {("value", row)}

    @pytest.mark.parametrize("row", [r for r in WORKS if r not in ("generate", "gradient")])
    def test_work_that_was_not_done_fails(self, validator: Validator, adapter: HooksAdapter, row: str) -> None:
        requests = some_requests((40,), new=12, seed=4)
        found = validator.check_row(row, WORKS[row], requests, adapter.run(requests, Nothing()))
        assert "FAIL" in words(found)

    @pytest.mark.parametrize(
        ("row", "key", "spoil"),
        [
            ("capture-1", "resid_post.2", lambda v: v * 1.05),
            ("capture-1", "resid_post.2", lambda v: v[[0, *range(len(v) - 1)]]),
            ("lens", "lens", lambda v: v[[0, *range(len(v) - 1)]]),
            ("lens", "lens", lambda v: (v + 1) % 256),
            ("lens", "lens", lambda v: v * 0 + 300),
            ("lens", "lens", lambda v: v[:-1]),
            ("probe", "probe", lambda v: v * 1.1),
            ("probe", "probe", lambda v: v[[0, *range(len(v) - 1)]]),
            ("probe", "probe", lambda v: -v),
            ("probe", "probe", lambda v: v[:-1]),
        ],
    )
    def test_wrong_values_fail(
        self, validator: Validator, adapter: HooksAdapter, row: str, key: str, spoil: Any
    ) -> None:
        requests = some_requests((40,), new=12, seed=4)
        (outcome,) = adapter.run(requests, WORKS[row])
        spoilt = with_values(outcome, **{key: spoil(outcome.values[key])})
        found = validator.check_row(row, WORKS[row], requests, [spoilt])
        assert "FAIL" in words(found)
        assert all(f.verdict == "PASS" for f in found if f.point == "tokens")  # the tokens were right

    def test_a_wrong_gradient_fails(self, validator: Validator, adapter: HooksAdapter) -> None:
        requests, work = some_requests((30,), new=1), WORKS["gradient"]
        (outcome,) = adapter.run(requests, work)
        point = "resid_post.2"
        for spoilt in (outcome.values[point] * 1.2, outcome.values[point].roll(1, 0), outcome.values[point][:-1]):
            (found,) = validator.check_row("gradient", work, requests, [with_values(outcome, **{point: spoilt})])
            assert found.verdict == "FAIL"
        (found,) = validator.check_row("gradient", work, requests, [Outcome(())])
        assert "no value, expected shape (30, 64)" in found.reason

    def test_tokens_that_the_model_would_not_choose_fail(self, validator: Validator, adapter: HooksAdapter) -> None:
        requests = some_requests((40,), new=12, seed=4)
        (outcome,) = adapter.run(requests, Nothing())
        other = (outcome.token_ids[0] + 1) % 256
        (found,) = validator.check_row("generate", Nothing(), requests, [Outcome((other, *outcome.token_ids[1:]))])
        assert found.verdict == "FAIL"
        assert "the least likely of 12" in found.reason

    def test_one_unforced_token_fails_and_is_named(self, validator: Validator) -> None:
        (request,) = some_requests((9,), new=3)
        (found,) = validator.check_row("force-token", ForceToken(7), [request], [Outcome((7, 8, 7))])
        assert found.reason == "request r0: new token 1 is 8, forced was 7"

    def test_of_many_requests_all_are_looked_at_and_some_are_compared(
        self, validator: Validator, adapter: HooksAdapter
    ) -> None:
        requests, work = some_requests([16] * 64, new=1, seed=9), WORKS["capture-1"]
        outcomes = adapter.run(requests, work)
        found = validator.check_row("sweep", work, requests, outcomes)
        assert words(found) == {"PASS"}
        assert "values of 18 of 64 requests compared" in found[0].reason
        picked = chosen(requests)
        unseen = next(k for k in range(64) if k not in picked)
        for wrong, says in (
            (outcomes[unseen].values["resid_post.2"] * float("nan"), "NaN"),
            (outcomes[picked[0]].values["resid_post.2"], "the very same values"),
        ):
            spoilt = [
                *outcomes[:unseen],
                with_values(outcomes[unseen], **{"resid_post.2": wrong}),
                *outcomes[unseen + 1 :],
            ]
            assert says in validator.check_row("sweep", work, requests, spoilt)[0].reason


class TestChosen:
    def test_few_requests_are_all_chosen(self) -> None:
        assert chosen(some_requests((33, 19, 26))) == [0, 1, 2]

    def test_long_ones_are_never_less_than_two(self) -> None:
        assert len(chosen(some_requests([500] * 8))) == 2

    def test_another_run_checks_others(self) -> None:
        def ids(run: int) -> list[int]:
            return chosen([Request(f"sweep/{run}/{k}", tuple(range(64)), 32) for k in range(32)])

        assert len({tuple(ids(run)) for run in range(8)}) > 3
        assert all(len(ids(run)) == VALUE_TOKENS // 95 for run in range(8))


class TestWrites:
    @pytest.mark.parametrize("row", ["steer", "ablate-head", "force-token"])
    def test_an_honest_write_lands(self, validator: Validator, adapter: HooksAdapter, row: str) -> None:
        work = WORKS[row]
        assert isinstance(work, Steer | AblateHead | ForceToken)
        found = validator.check_write(adapter, work, some_requests())
        assert words(found) == {"PASS"}, found
        assert {f.what for f in found} == {"write"}
        after = [("resid_post", n) for n in (2, 3, 5)]
        if row == "steer":  # the values, then the changes
            assert [(f.point, f.layer) for f in found] == [("tokens", None), *after, *after]
        if row == "ablate-head":
            assert [(f.point, f.layer) for f in found[1:]] == [("z", 2), *[("z", 2), *after] * 2]
            assert "head 1 reads back as exactly zero" in found[1].reason

    @pytest.mark.parametrize(
        ("row", "instead"),
        [
            ("steer", lambda w: Capture(w.watch)),
            ("steer", lambda w: replace(w, vector=w.vector * np.float32(0.5))),
            ("steer", lambda w: replace(w, vector=-w.vector)),
            ("steer", lambda w: replace(w, point="resid_post.1")),
            ("ablate-head", lambda w: Capture(w.watch)),
            ("ablate-head", lambda w: replace(w, head=0)),
        ],
    )
    def test_another_write_than_the_one_asked_for_fails(
        self, validator: Validator, adapter: HooksAdapter, row: str, instead: Any
    ) -> None:
        class Other(Spoiling):
            def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
                return self.adapter.run(requests, instead(work) if isinstance(work, Steer | AblateHead) else work)  # type: ignore[no-any-return]

        work = WORKS[row]
        assert isinstance(work, Steer | AblateHead)
        found = validator.check_write(Other(adapter, list), work, some_requests())
        changes = [f for f in found if "the change against" in f.reason]
        assert len(changes) >= 3
        assert words(changes) == {"FAIL"}, changes

    @pytest.mark.parametrize("row", ["steer", "ablate-head"])
    def test_a_write_that_reaches_the_prompt_and_not_what_is_generated_fails(
        self, validator: Validator, adapter: HooksAdapter, row: str
    ) -> None:
        class PromptOnly(Spoiling):
            def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
                outcomes = self.adapter.run(requests, work)
                if not isinstance(work, Steer | AblateHead):
                    return outcomes  # type: ignore[no-any-return]
                pairs = list(zip(requests, outcomes, strict=True))
                whole = [Request(r.id, (*r.token_ids, *o.token_ids[:-1]), 1) for r, o in pairs]
                mixed = []
                for (r, o), q in zip(pairs, self.adapter.run(whole, Capture(work.watch)), strict=True):
                    n = len(r.token_ids)
                    values = {p: torch.cat([o.values[p][:n], q.values[p][n:]]) for p in work.watch}
                    mixed.append(replace(o, values=values))
                return mixed

        work = WORKS[row]
        assert isinstance(work, Steer | AblateHead)
        found = validator.check_write(PromptOnly(adapter, list), work, some_requests())
        assert "FAIL" in {f.verdict for f in found if f.point != "tokens"}

    def test_without_watching_the_tokens_are_held_against_the_written_reference(
        self, folder: Path, validator: Validator, dtype: str
    ) -> None:
        adapter = HooksAdapter(without=["resid_post"])
        adapter.boot(folder, Settings(dtype=dtype))
        work = WORKS["steer"]
        assert isinstance(work, Steer)
        (found,) = validator.check_write(adapter, work, some_requests())
        assert (found.point, found.verdict) == ("tokens", "PASS")
        assert "under the written reference" in found.reason

    def test_a_watched_value_that_does_not_come_back_fails(self, validator: Validator, adapter: HooksAdapter) -> None:
        work = WORKS["steer"]
        assert isinstance(work, Steer)
        found = validator.check_write(
            Spoiling(adapter, lambda os: [replace(o, values={}) for o in os]), work, some_requests()
        )
        assert [f.reason.partition(";")[0] for f in found[1:]] == [
            f"request r0 came back without resid_post.{n}" for n in (2, 3, 5)
        ]

    def test_where_to_look(self) -> None:
        assert writes.watch_for(Steer("resid_post.5", np.ones(4, np.float32)), 6) == ("resid_post.5",)
        assert writes.watch_for(AblateHead(0, 0), 2) == ("z.0", "resid_post.0", "resid_post.1")


def test_neighbours_of_points() -> None:
    assert values.with_neighbours(("z.2", "logits"), 3) == ("z.2", "logits", "z.1")


@pytest.mark.parametrize("kind", ["gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], indirect=True)
def test_other_families(kind: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(kind, tmp_path / "m")
    validator, adapter = validator_for(model, dtype, tmp_path / "c"), HooksAdapter()
    adapter.boot(model, Settings(dtype=dtype))
    found = validator.check_reads(adapter, some_requests())
    for work in (WORKS["steer"], WORKS["ablate-head"]):
        assert isinstance(work, Steer | AblateHead)
        found += validator.check_write(adapter, work, some_requests())
    assert words(found) == {"PASS"}, [f for f in found if f.verdict != "PASS"]


def test_the_validator_ends_its_process(folder: Path, tmp_path: Path) -> None:
    adapter: Adapter = HooksAdapter()  # type: ignore[assignment]
    adapter.boot(folder, Settings(dtype="float32"))
    with Validator(folder, Settings(dtype="float32"), tmp_path) as validator:
        assert words(validator.check_reads(adapter, some_requests((9, 12), new=2))) == {"PASS"}
        process = validator.refs.server._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() == 0
