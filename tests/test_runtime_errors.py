"""Errors: a class each, a message that says where and what, in the caller, and nobody else is harmed."""

from __future__ import annotations

import contextlib
import gc
import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adapters.engines.wire import Carried
from adapters.errors import (
    InterventionError,
    LoadError,
    NeverRanError,
    NonFiniteError,
    NotInRowsError,
    PassedError,
    PointRefusedError,
    StaleWriteError,
    UnknownModuleError,
    UnknownPointError,
    WriteError,
)
from adapters.runtime import Runtime
from tests.engines import D_MODEL, VOCAB, assert_clean, booted, capture, hf, prompts, rt, run, same

__all__ = ["hf", "rt"]  # fixtures

IDS = prompts(4)
HERE = re.escape(__file__)


def line_of(fn: Callable[..., Any], text: str) -> int:
    """The line of a function's source that holds `text`."""
    first = fn.__code__.co_firstlineno
    return next(n for n in range(first, first + 40) if text in linecache.getline(__file__, n))


def refused(rt: Runtime, fn: Any, kind: type[BaseException], message: str) -> BaseException:
    """`fn` on one of three requests raises `kind` in the caller with `message`; the others come back untouched."""
    plain = run(rt, IDS[1:3], capture(("resid_post", 2)))
    with pytest.raises(kind, match=message) as caught:
        run(rt, IDS[:3], [fn, capture(("resid_post", 2)), capture(("resid_post", 2))])
    outs = caught.value.outputs  # type: ignore[attr-defined]
    assert outs[0].error is caught.value
    # A smaller batch computes the same to rounding, and the same tokens.
    assert [o.token_ids for o in outs[1:]] == [o.token_ids for o in plain]
    assert [o.error for o in outs[1:]] == [None, None]
    return caught.value


# ---- where a read goes wrong


def test_passed_never_ran_and_unknown_are_three_errors(rt: Runtime) -> None:
    """case 47."""

    def passed(m: Any) -> None:
        m.logits  # noqa: B018
        m.resid_post[1]  # passed

    def unknown(m: Any) -> None:
        m.resid_pots[1]  # unknown

    def never(m: Any) -> None:
        m.at("lm_head").input  # never  # noqa: B018

    where = f"{HERE}:{line_of(passed, '# passed')}"
    refused(
        rt,
        passed,
        PassedError,
        rf"resid_post\[1\] had already passed when it was read: the model was at logits \(at {where}",
    )
    where = f"{HERE}:{line_of(unknown, '# unknown')}"
    refused(rt, unknown, UnknownPointError, rf"no point 'resid_pots'; did you mean resid_post.*\(at {where}")
    if rt is not booted("hf"):  # vLLM never calls its head as a module
        where = f"{HERE}:{line_of(never, '# never')}"
        refused(rt, never, NeverRanError, rf"lm_head \(input\) did not run after it was asked for.*\(at {where}")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (lambda m: m.resid_post[2], lambda m: m.resid_post[0]),
        (lambda m: m.k[1], lambda m: m.q[1]),
        (lambda m: m.resid_post[1], lambda m: m.at("model.layers.0.mlp").output),
        (lambda m: m.resid_post[1], lambda m: m.at("model.layers.1.mlp").output),
        (lambda m: m.at("model.layers.1.mlp").output, lambda m: m.resid_post[0]),
        (lambda m: m.at("model.layers.1").output, lambda m: m.at("model.layers.1").input),
        (lambda m: m.at("model.layers.1.mlp").output, lambda m: m.at("model.layers.1").input),
        (lambda m: m.sampled, lambda m: m.logits),
        (lambda m: m.final_norm, lambda m: m.embed),
    ],
)
def test_what_has_passed_is_known_however_it_is_named(rt: Runtime, first: Any, then: Any) -> None:
    refused(rt, lambda m: (first(m), then(m)), PassedError, "had already passed when it was read")


def test_a_module_that_does_not_exist_suggests(rt: Runtime) -> None:
    error = refused(
        rt,
        lambda m: m.at("model.layers.1.mlp.down_porj").output,
        UnknownModuleError,
        "no module 'model.layers.1.mlp.down_porj'",
    )
    assert "did you mean model.layers.1.mlp.down_proj" in str(error)
    refused(rt, lambda m: m.at("model.layers.99.mlp").input, UnknownModuleError, "no module 'model.layers.99.mlp'")


def test_points_that_are_not_there(rt: Runtime) -> None:
    refused(
        rt,
        lambda m: m.router[0],
        PointRefusedError,
        r"router\[0\].*dense layer has no router; the nearest point is mlp_in",
    )
    refused(rt, lambda m: m.resid_post[3], IndexError, r"resid_post\[3\]: the model has layers 0 to 2")
    refused(
        rt, lambda m: m.resid_post[0:2], UnknownPointError, r"m.resid_post\[layer\] takes one layer number, not slice"
    )
    refused(rt, lambda m: m.resid_post["1"], UnknownPointError, r"takes one layer number, not '1'")
    refused(rt, lambda m: m.resid_post.mean(), UnknownPointError, r"one per layer: write m.resid_post\[layer\].mean")
    refused(rt, lambda m: m.at("model.norm").outputs, UnknownPointError, r"m.at\('model.norm'\) has .input and .output")
    assert rt.why_not("router", 0) is not None
    assert rt.why_not("resid_post", 0) is None


def test_rows_that_cannot_be_told_apart(hf: Runtime) -> None:
    """One request cannot have its part of a tensor that is not laid out in tokens."""
    message = r"at\('model.rotary_emb'\).output: cannot tell the requests apart in a tensor of shape \(1, \d+, 32\)"
    with pytest.raises(NotInRowsError, match=message):
        run(hf, [IDS[0][:3], IDS[1][:3]], lambda m: m.at("model.rotary_emb").output)


# ---- what a write refuses


BAD_WRITES = {
    "shape": (lambda n: torch.zeros(n, D_MODEL + 1), r"the shape there is \(\d+, 128\), the write has \(\d+, 129\)"),
    "broadcast": (lambda n: torch.zeros(D_MODEL), r"the shape there is \(\d+, 128\), the write has \(128,\)"),
    "dtype": (
        lambda n: torch.zeros(n, D_MODEL).double(),
        "the dtype there is torch.float32, the write",
    ),
    "device": (lambda n: torch.zeros(n, D_MODEL, device="meta"), "the device there is cpu, the write has meta"),
    "number": (lambda n: 0.0, "a write needs a tensor, not float"),
}


@pytest.mark.parametrize(("value", "message"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_a_write_that_does_not_fit_changes_nothing(rt: Runtime, value: Any, message: str) -> None:
    def fn(m: Any) -> None:
        m.resid_post[1] = value(m.tokens)  # does not fit

    where = f"{HERE}:{line_of(fn, '# does not fit')}"
    refused(rt, fn, WriteError, rf"resid_post\[1\]: {message}.*\(at {where}\)")

    def caught(m: Any) -> None:
        with pytest.raises(WriteError):
            m.resid_post[1] = value(m.tokens)
        m.save("after", m.resid_post[1])
        m.save("logits", m.logits)

    got = run(rt, [IDS[0]], caught)[0]
    plain = run(rt, [IDS[0]], lambda m: (m.save("after", m.resid_post[1]), m.save("logits", m.logits)))[0]
    same([got], [plain])


def test_a_write_to_all_layers_at_once_is_refused(rt: Runtime) -> None:
    refused(
        rt,
        lambda m: setattr(m, "resid_post", torch.zeros(1)),
        WriteError,
        r"one per layer: write m.resid_post\[layer\] =",
    )


@pytest.mark.parametrize("point", ["resid_post", "attn_out", "q", "z"])
def test_an_edit_that_comes_too_late_is_an_error(rt: Runtime, point: str) -> None:
    """At every kind of point: one that the model holds as it is, a sum of two, a slice of a fused projection."""

    def fn(m: Any) -> None:
        h = getattr(m, point)[1]
        m.resid_post[2]
        h += 1

    refused(rt, fn, StaleWriteError, rf"{point}\[1\] was edited in place after the model had gone past it")


def test_a_read_value_may_be_edited_once_its_pass_is_over(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        if "sum" in m.state:
            m.state["sum"] += m.resid_post[1][-1:]
        else:
            m.state["sum"] = m.resid_post[1][-1:]
        m.save("row", m.resid_post[1][-1:])
        m.save("sum", m.state["sum"])

    out = run(rt, [IDS[0]], fn)[0]
    assert torch.allclose(out.saves["sum"][-1], torch.stack(out.saves["row"]).sum(0), rtol=1e-5)


def test_not_finite_is_an_error_when_asked(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.resid_post[0][0, 3] = torch.inf
        m.save("ran", m.resid_post[1])

    assert run(rt, [IDS[0]], fn)[0].saves["ran"]
    with pytest.raises(NonFiniteError, match=r"resid_post\[0\]: NaN or infinity was written there, 1 of \d+ values"):
        run(rt, [IDS[0]], fn, check_finite=True)
    rt.install(lambda m: m.resid_post[0].fill_(torch.nan), name="broken")
    try:
        with pytest.raises(NonFiniteError, match=r"resid_post\[0\]: NaN or infinity was written there"):
            run(rt, [IDS[0]], lambda m: m.resid_post[1], check_finite=True)
    finally:
        rt.remove("broken")


# ---- errors of the user's own


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("through", [lambda x: x.data, lambda x: x.numpy()])
def test_an_edit_that_torch_does_not_count_takes_part_or_is_an_error_when_asked(
    rt: Runtime, through: Any, batch: int
) -> None:
    """A copy that was edited so is not written back: asked to check, that is said; what was lent has the edit in it."""
    row = torch.linspace(-1, 1, D_MODEL)

    def fn(m: Any) -> None:
        through(m.resid_post[1])[...] = row
        m.save("after", m.resid_pre[2])

    outs = run(rt, IDS[:batch], fn, max_new_tokens=1, check_finite=True, on_error="return")
    lent = batch == 1 and rt.engine.points.engine == "hf"
    for out in outs:
        if lent:
            assert out.error is None
            assert torch.equal(out.cat("after"), row.expand(len(out.prompt_token_ids), D_MODEL))
        else:
            assert isinstance(out.error, StaleWriteError)
            assert "resid_post[1] was edited in a way that torch does not count" in str(out.error)
            assert __file__ in str(out.error)
    counted = run(rt, IDS[:batch], lambda m: m.resid_post[1].mul_(2), max_new_tokens=1, check_finite=True)
    assert [o.error for o in counted] == [None] * batch
    untouched = run(
        rt, IDS[:batch], capture(("q", 1), ("resid_post", 1), ("logits",)), max_new_tokens=1, check_finite=True
    )
    assert [o.error for o in untouched] == [None] * batch


def test_the_users_error_arrives_with_file_and_line(rt: Runtime) -> None:
    """case 53."""

    def fn(m: Any) -> None:
        if m.step == 1:
            return 1 / 0  # here
        m.save("step", m.step)
        return None

    error = refused(rt, fn, ZeroDivisionError, "division by zero")
    frames = traceback.extract_tb(error.__traceback__)
    assert (frames[-1].filename, frames[-1].lineno) == (__file__, line_of(fn, "# here"))


def test_an_error_before_at_and_after_every_kind_of_read(rt: Runtime) -> None:
    def at(stage: int) -> Any:
        def fn(m: Any) -> None:
            for i, read in enumerate((lambda: m.embed, lambda: m.resid_post[1], lambda: m.logits, lambda: m.sampled)):
                if i == stage:
                    raise KeyError(stage)
                read()
            raise KeyError(stage)

        return fn

    for stage in range(5):
        refused(rt, at(stage), KeyError, str(stage))


def test_a_failed_pass_keeps_no_token_and_the_passes_before_keep_theirs(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("post", m.resid_post[2])
        if m.step == 2:
            raise RuntimeError

    out = run(rt, IDS, [fn, None, fn, None], on_error="return", max_new_tokens=6)
    plain = run(rt, IDS, max_new_tokens=6)
    for i, (o, p) in enumerate(zip(out, plain, strict=True)):
        assert o.token_ids == p.token_ids[: 2 if i % 2 == 0 else 6]
        assert isinstance(o.error, RuntimeError) == (i % 2 == 0)
        assert len(o.saves.get("post", [])) == (3 if i % 2 == 0 else 0)


def test_the_first_error_is_raised_and_all_are_there(rt: Runtime) -> None:
    def fail(name: str) -> Any:
        def fn(m: Any) -> None:
            raise ValueError(name)

        return fn

    with pytest.raises(ValueError, match="b") as caught:
        run(rt, IDS, [None, fail("b"), fail("c"), None])
    assert [str(o.error) for o in caught.value.outputs] == ["None", "b", "c", "None"]  # type: ignore[attr-defined]


def test_one_function_of_a_request_ends_all_of_it(rt: Runtime) -> None:
    ran = []

    def fails(m: Any) -> None:
        m.resid_post[0]
        raise OSError("first")

    def other(m: Any) -> None:
        try:
            m.resid_post[2]
            ran.append("read")
        finally:
            ran.append("unwound")

    rt.install(fails, name="fails")
    try:
        with pytest.raises(OSError, match="first"):
            run(rt, [IDS[0]], other)
    finally:
        rt.remove("fails")
    assert ran == ["unwound"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, pytest.fail.Exception])
def test_what_is_not_an_exception_stops_everything_and_leaves_the_engine_whole(
    rt: Runtime, kind: type[BaseException]
) -> None:
    def fn(m: Any) -> None:
        if m.step == 1:
            raise kind("stop")
        m.save("post", m.resid_post[1])

    plain = run(rt, IDS, capture(("resid_post", 1)))
    with pytest.raises(kind):
        run(rt, IDS, [None, fn, None, fn], max_new_tokens=200)
    assert_clean(rt)
    same(run(rt, IDS, capture(("resid_post", 1))), plain)


@pytest.mark.engine
def test_a_function_that_swallows_everything_does_not_hang() -> None:
    def stubborn(m: Any) -> None:
        while True:
            with contextlib.suppress(BaseException):
                m.at("lm_head").output  # vLLM never runs it as a module  # noqa: B018

    with pytest.raises(InterventionError, match="does it catch every error"):
        run(booted("vllm"), IDS[:2], [stubborn, None])
    assert_clean(booted("vllm"))


@pytest.mark.parametrize("catch", [Exception, BaseException])
def test_a_caught_error_is_not_an_error(rt: Runtime, catch: type[BaseException]) -> None:
    def fn(m: Any) -> None:
        m.save("post", m.resid_post[1])
        try:
            m.resid_post[0]
        except catch as error:
            m.save("caught", type(error).__name__)
        m.save("still", m.resid_post[2])

    out = run(rt, [IDS[0]], fn)[0]
    assert out.saves["caught"] == ["PassedError"] * 4
    assert len(out.saves["still"]) == 4


def test_functions_that_would_never_run(rt: Runtime) -> None:
    def generator(m: Any) -> Any:
        yield m.resid_post[0]

    async def coroutine(m: Any) -> Any:
        return m.resid_post[0]

    for fn in (generator, coroutine):
        refused(rt, fn, InterventionError, "is a generator or a coroutine function: calling it runs nothing")
    with pytest.raises(TypeError, match="an intervention is a function of one argument, not 'steer'"):
        run(rt, IDS[:2], [None, "steer"])
    with pytest.raises(TypeError, match="an intervention is a function of one argument"):
        rt.install(3, name="three")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 interventions for 2 prompts"):
        run(rt, IDS[:2], [None])
    with pytest.raises(ValueError, match="on_error='ignore'"):
        run(rt, IDS[:1], on_error="ignore")


def test_a_pass_is_over_when_it_is_over(rt: Runtime) -> None:
    kept: list[Any] = []
    run(rt, [IDS[0]], lambda m: kept.append((m, m.resid_post[1])))
    m = kept[0][0]
    for read in (lambda: m.resid_post[1], lambda: m.resid_post[2], lambda: m.logits):
        with pytest.raises(PassedError, match="was read after its pass had ended"):
            read()


def test_another_requests_pass_is_not_mine(rt: Runtime) -> None:
    passes: list[Any] = []

    def lends(m: Any) -> None:
        passes.append(m)
        m.resid_post[1]

    def borrows(m: Any) -> None:
        m.resid_post[0]
        passes[0].resid_post[2]

    with pytest.raises(InterventionError, match=r"resid_post\[2\] was read on the Pass of another request"):
        run(rt, IDS[:2], [lends, borrows])


def test_a_run_inside_a_run_is_refused(rt: Runtime) -> None:
    refused(rt, lambda m: run(rt, [IDS[0]]), LoadError, "already inside a run: an intervention cannot start another")
    with rt.trace(IDS[0]) as m:
        m.resid_post[0]
        with pytest.raises(LoadError, match="already inside a run"):
            run(rt, [IDS[0]])
        logits = m.logits.clone()
    assert torch.equal(logits, run(rt, [IDS[0]], capture(("logits",)), max_new_tokens=1)[0].cat("logits"))


# ---- prompts and arguments


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "there is no prompt"),
        ("", "there is no prompt"),
        ([[1, 2], []], "prompt 1 is empty"),
        ([[1, VOCAB]], f"prompt 0: token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([[1], [-1]], "prompt 1: token id -1 is outside"),
        ([[1, 2.5]], "prompt 0 holds 2.5, which is no token id"),
        ([[1, True]], "prompt 0 holds True"),
        ([None], "prompt 0 is neither text nor token ids: NoneType"),
        (None, "prompts are text or token ids"),
        ([[1] * 3000], r"prompt 0 has 3000 tokens and 4 more are asked for, which is over the \d+"),
    ],
)
def test_prompts_that_cannot_be(rt: Runtime, bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rt.run(bad, max_new_tokens=4)


def test_the_longest_request_that_fits(rt: Runtime) -> None:
    longest = rt.engine.max_tokens
    assert longest is not None
    ids = [3 + i % 500 for i in range(longest - 2)]
    assert len(run(rt, [ids], max_new_tokens=2)[0].token_ids) == 2
    with pytest.raises(ValueError, match=f"over the {longest}"):
        run(rt, [ids], max_new_tokens=3)


def test_prompts_as_arrays_and_tensors(rt: Runtime) -> None:
    wanted = run(rt, [IDS[0]])
    for given in (torch.tensor(IDS[0]), torch.tensor([IDS[0]]), [torch.tensor(IDS[0])], torch.tensor(IDS[0]).numpy()):
        same(run_raw(rt, given), wanted)


def run_raw(rt: Runtime, given: Any) -> Any:
    return rt.run(given, max_new_tokens=4, ignore_eos=True)


@pytest.mark.engine
def test_text_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="prompt 0 is text and this model has no tokenizer"):
        booted("vllm").run("hello")


def test_sampling_settings_that_cannot_be(rt: Runtime) -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, not 0"):
        run(rt, IDS[:1], max_new_tokens=0)
    with pytest.raises(ValueError, match="temperature must not be negative"):
        run(rt, IDS[:1], temperature=-1.0)


# ---- a hundred of them


def test_a_hundred_errors_in_a_row_leave_the_engine_serving_and_memory_flat(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        h = m.resid_post[1].repeat(1, 200)  # about 2 MB that the traceback holds
        m.save("big", h)
        if m.step % 2:
            raise RuntimeError(str(h.shape))

    def tensors() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor)

    plain = run(rt, IDS, capture(("resid_post", 1)))
    counts = []
    for i in range(100):
        with pytest.raises(RuntimeError):
            run(rt, IDS[:2], [fn, None])
        if i in (4, 99):
            counts.append(tensors())
    assert counts[1] <= counts[0]
    same(run(rt, IDS, capture(("resid_post", 1))), plain)


# ---- over the wire


@pytest.mark.engine
def test_errors_and_saves_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 53.

    As with a worker in another process: functions as bytes, saves as buffers, errors with the user's line.
    """
    runtime = booted("vllm")
    plain = run(runtime, IDS, capture(("resid_post", 1), ("logits",)))

    def fails(m: Any) -> None:
        m.save("few", m.resid_post[1])
        m.save("kinds", {"step": m.step, "rows": [m.positions]})
        if m.step == 2:
            return 1 / 0  # travels
        return None

    def stops(m: Any) -> None:
        m.save("step", m.step)
        if m.step == 1:
            m.stop()

    host = runtime.engine.host  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime.engine, "host", None)
    same(run(runtime, IDS, capture(("resid_post", 1), ("logits",))), plain)
    out = run(runtime, IDS, [fails, stops, None, None], on_error="return", max_new_tokens=6)
    assert isinstance(out[0].error, ZeroDivisionError)
    note = out[0].error.__notes__[0]
    assert f'{__file__}", line {line_of(fails, "# travels")}' in note
    assert [len(o.token_ids) for o in out] == [2, 2, 6, 6]
    assert out[0].saves["kinds"][1]["step"] == 1
    assert out[0].cat("few").shape == (len(IDS[0]) + 2, D_MODEL)
    assert out[1].saves["step"] == [0, 1]
    assert out[1].stopped
    monkeypatch.setattr(runtime.engine, "host", host)
    assert_clean(runtime)


def test_an_intervention_that_names_a_module_is_small_on_the_wire() -> None:
    """case 95."""
    fns = (lambda m: m.save("x", m.at("model.layers.1.mlp").output), capture(("resid_post", 1)))
    assert len(Carried(fns).packed()) < 10_000
