"""Requests that unembed at the same place share one product, and none of them can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.interleave import Interleaver
from adapters.runtime import Runtime
from tests.engines import relative, tapped

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]

pytestmark = pytest.mark.timeout(600)  # a compiled engine may take minutes to boot


compiled = tapped(["resid_post.*", "z.1"])


@pytest.fixture
def products(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product with the head that interventions asked for."""
    host: Any = getattr(rt.engine, "host", None) or rt.engine
    rows: list[int] = []
    honest = host.unembed
    monkeypatch.setattr(host, "unembed", lambda x: rows.append(len(x)) or honest(x))
    return rows


def lens(m: Any) -> None:
    m.save("lens", m.unembed(m.resid_post[1][-1:]))


def run(rt: Runtime, prompts: Any, fn: Any, **options: Any) -> Any:
    return rt.run(prompts, fn, **{"max_new_tokens": 3, "ignore_eos": True} | options)


def test_one_product_a_pass_gives_everybody_their_own(rt: Runtime, products: list[int]) -> None:
    together = run(rt, PROMPTS, lens)
    assert products == [3, 3, 3]
    products.clear()
    alone = [run(rt, [p], lens)[0] for p in PROMPTS]
    assert products == [1] * 9
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
        assert [tuple(e.shape) for e in a.saves["lens"]] == [(1, 512)] * 3
        assert relative(a.cat("lens"), b.cat("lens")) < 1e-4


def test_several_rows_several_times_and_at_several_places(rt: Runtime, products: list[int]) -> None:
    def twice(m: Any) -> None:
        h = m.resid_post[0]
        m.save("first", m.unembed(h))
        m.save("second", m.unembed(h * 2))
        m.save("third", m.unembed(m.resid_post[2]))

    together = run(rt, PROMPTS, twice, max_new_tokens=2)
    assert products == [13] * 3 + [3] * 3
    for out, prompt in zip(together, PROMPTS, strict=True):
        alone = run(rt, [prompt], twice, max_new_tokens=2)[0]
        for name in ("first", "second", "third"):
            assert out.cat(name).shape == (len(prompt) + 1, 512)
            assert relative(out.cat(name), alone.cat(name)) < 1e-4


def test_the_logits_of_many_rows_are_never_held_for_all_requests_at_once(rt: Runtime, products: list[int]) -> None:
    prompts = [list(range(3, 3 + n)) for n in (4, 9, 20, 8)]
    outs = run(rt, prompts, lambda m: m.save("x", m.unembed(m.resid_post[1])), max_new_tokens=1)
    assert sorted(products) == [9, 12, 20]
    assert [out.cat("x").shape[0] for out in outs] == [4, 9, 20, 8]


def test_what_is_written_after_a_product_lands_in_its_own_request(rt: Runtime) -> None:
    """With neighbours that write before theirs, after theirs, and not at all."""

    def before(m: Any) -> None:
        m.resid_post[1] += 0.5
        m.save("lens", m.unembed(m.resid_post[1]))
        m.save("last", m.resid_post[2])

    def after(m: Any) -> None:
        guess = m.unembed(m.resid_post[1])
        m.resid_post[1] += guess[:, :128] * 0.1
        m.save("last", m.resid_post[2])

    def reads(m: Any) -> None:
        m.save("lens", m.unembed(m.resid_post[1]))
        m.save("last", m.resid_post[2])

    fns = [before, after, reads]
    for out, prompt, fn in zip(run(rt, PROMPTS, fns), PROMPTS, fns, strict=True):
        alone = run(rt, [prompt], fn)[0]
        assert out.token_ids == alone.token_ids
        for name in alone.saves:
            assert relative(out.cat(name), alone.cat(name)) < 1e-4


def test_an_error_is_its_own_requests(rt: Runtime, products: list[int]) -> None:
    def narrow(m: Any) -> None:
        m.unembed(m.resid_post[1][:, :5])

    def fails(m: Any) -> None:
        m.save("lens", m.unembed(m.resid_post[1]))
        raise ZeroDivisionError

    def catches(m: Any) -> None:
        try:
            m.unembed(m.resid_post[1][:, :5])
        except RuntimeError:
            m.save("lens", m.unembed(m.resid_post[1]))

    outs = run(rt, PROMPTS, [narrow, fails, catches], on_error="return")
    assert isinstance(outs[0].error, RuntimeError)
    assert isinstance(outs[1].error, ZeroDivisionError)
    assert outs[2].error is None
    assert relative(outs[2].cat("lens"), run(rt, PROMPTS[2:], catches)[0].cat("lens")) < 1e-4
    assert run(rt, PROMPTS, lens)[0].error is None


def test_other_dtypes_shapes_and_modes_go_by_themselves(rt: Runtime, products: list[int]) -> None:
    def single(m: Any) -> None:
        m.save("lens", m.unembed(m.resid_post[1][-1])[None])

    def graded(m: Any) -> None:
        with torch.enable_grad():
            m.save("lens", m.unembed(m.resid_post[1][-1:]).detach())

    outs = run(rt, PROMPTS, [single, graded, lens], max_new_tokens=1)
    assert len(products) == 3
    for out, prompt in zip(outs, PROMPTS, strict=True):
        assert relative(out.cat("lens"), run(rt, [prompt], lens, max_new_tokens=1)[0].cat("lens")) < 1e-4


def test_interventions_of_one_request_keep_their_order(rt: Runtime, products: list[int]) -> None:
    """An installed one and the request's own at the same place: the second reads what the first wrote."""

    def first(m: Any) -> None:
        guess = m.unembed(m.resid_post[1])
        m.resid_post[1] += guess[:, :128]

    def second(m: Any) -> None:
        m.save("seen", m.resid_post[1])

    rt.install(first, name="first")
    try:
        together = run(rt, PROMPTS, second, max_new_tokens=1)
        assert products == [len(p) for p in PROMPTS]
        alone = [run(rt, [p], second, max_new_tokens=1)[0] for p in PROMPTS]
    finally:
        rt.remove("first")
    for a, b in zip(together, alone, strict=True):
        assert relative(a.cat("seen"), b.cat("seen")) < 1e-4


def test_what_is_handed_out_is_each_requests_own_memory(rt: Runtime) -> None:
    kept: dict[str, torch.Tensor] = {}

    def keeps(m: Any) -> None:
        logits = m.unembed(m.resid_post[1][-1:])
        assert not logits.is_inference()
        assert logits.untyped_storage().nbytes() == logits.nbytes
        kept[m.request] = logits.zero_()

    run(rt, PROMPTS, keeps, max_new_tokens=1)
    assert len(kept) == 3


def test_nothing_is_gathered_where_a_pass_has_one_intervention_or_no_taps(rt: Runtime) -> None:
    host: Any = getattr(rt.engine, "host", None) or rt.engine
    assert isinstance(host.il, Interleaver)
    seen: list[bool] = []

    def looks(m: Any) -> None:
        m.resid_post[1]
        seen.append(host.il.gathers)

    run(rt, PROMPTS[:1], looks, max_new_tokens=1)
    run(rt, PROMPTS[:2], looks, max_new_tokens=1)
    assert seen == [False, True, True]
    assert not host.il.gathers
