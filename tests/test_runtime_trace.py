"""`trace` and `steps`: the body is ordinary code, wherever it stands and however it is left."""

# ruff: noqa: PT012 (that an error comes out of a whole body is what is tested)

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import BadCaptureError, PassedError, StaleWriteError, UnknownPointError, WriteError
from adapters.runtime import Runtime
from tests.engines import VOCAB, assert_clean, booted, capture, hf, prompts, relative, rt, run

__all__ = ["hf", "rt"]  # fixtures

IDS = prompts(3, shortest=9)
PROMPT = IDS[0]


def reference(rt: Runtime, *points: tuple[Any, ...], **options: Any) -> Any:
    return run(rt, [PROMPT], capture(*points), **options)[0]


def test_a_trace_reads_and_writes(rt: Runtime) -> None:
    wanted = reference(rt, ("resid_post", 1), ("logits",), max_new_tokens=1)
    with rt.trace(PROMPT) as m:
        h = m.resid_post[1]
        kept = h.clone()
        h += 3
        edited = m.logits.clone()
    assert torch.equal(kept, wanted.cat("resid_post.1"))

    def fn(m: Any) -> None:
        m.resid_post[1] += 3
        m.save("logits", m.logits)

    assert torch.equal(edited, run(rt, [PROMPT], fn, max_new_tokens=1)[0].cat("logits"))
    assert m.saves == {}


def test_what_the_body_saves_is_on_the_pass(rt: Runtime) -> None:
    with rt.trace(PROMPT) as m:
        m.save("post", m.resid_post[1])
        m.save("n", m.tokens)
    assert torch.equal(m.saves["post"][0], reference(rt, ("resid_post", 1), max_new_tokens=1).cat("resid_post.1"))
    assert m.saves["n"] == [len(PROMPT)]


def test_a_body_that_reads_nothing(rt: Runtime) -> None:
    with rt.trace(PROMPT) as m:
        assert m.positions.tolist() == list(range(len(PROMPT)))
    assert [m.step for m in rt.steps(PROMPT, max_new_tokens=3)] == [0, 1, 2]


def test_steps_are_the_passes_of_a_generation(rt: Runtime) -> None:
    wanted = reference(rt, ("resid_post", 2), ("sampled",), max_new_tokens=5)
    rows, tokens = [], []
    for m in rt.steps(PROMPT, max_new_tokens=5):
        rows.append(m.resid_post[2].clone())
        tokens.append(int(m.sampled))
    assert tokens == list(wanted.token_ids)
    assert torch.equal(torch.cat(rows), wanted.cat("resid_post.2"))


def test_a_step_steers_and_forces(rt: Runtime) -> None:
    tokens = []
    for m in rt.steps(PROMPT, max_new_tokens=4):
        m.resid_post[1] += 2.0
        m.sampled[:] = 50 + m.step
        tokens.append(int(m.sampled))
    assert tokens == [50, 51, 52, 53]


def test_installed_interventions_come_first(rt: Runtime) -> None:
    with rt.trace(PROMPT) as m:
        plain = m.resid_post[1].clone()
    rt.install(lambda m: m.resid_post[1].mul_(2), name="double")
    try:
        with rt.trace(PROMPT) as m:
            doubled = m.resid_post[1].clone()
    finally:
        rt.remove("double")
    assert torch.equal(doubled, plain * 2)


# ---- however it is left


def test_a_loop_that_is_left_early(rt: Runtime) -> None:
    for m in rt.steps(PROMPT, max_new_tokens=50):
        m.resid_post[0]
        if m.step == 2:
            break
    assert_clean(rt)
    first = reference(rt, max_new_tokens=1).token_ids[0]
    generator = rt.steps(PROMPT, max_new_tokens=50)
    assert int(next(generator).sampled) == first
    next(generator).resid_post[0]
    generator.close()  # type: ignore[attr-defined]
    assert_clean(rt)
    next(rt.steps(PROMPT, max_new_tokens=50))  # dropped on the spot
    assert_clean(rt)
    assert run(rt, [PROMPT])[0].token_ids


def test_a_loop_ended_by_stop(rt: Runtime) -> None:
    seen = []
    for m in rt.steps(PROMPT, max_new_tokens=50):
        seen.append(m.step)
        if m.step == 2:
            m.stop()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("after", ["nothing", "embed", "resid_post", "logits", "sampled"])
def test_an_exception_in_the_body(rt: Runtime, after: str) -> None:
    def read(m: Any) -> None:
        if after == "resid_post":
            m.resid_post[1]
        elif after != "nothing":
            getattr(m, after)

    with pytest.raises(ZeroDivisionError), rt.trace(PROMPT) as m:
        read(m)
        1 / 0  # noqa: B018
    assert_clean(rt)
    with pytest.raises(ZeroDivisionError):
        for m in rt.steps(PROMPT, max_new_tokens=9):
            read(m)
            if m.step == 1:
                1 / 0  # noqa: B018
    assert_clean(rt)
    assert run(rt, [PROMPT])[0].token_ids


def test_errors_of_the_runtime_in_a_body(rt: Runtime) -> None:
    with (
        pytest.raises(PassedError, match=r"resid_post\[0\] had already passed.*test_runtime_trace.py:\d+\)"),
        rt.trace(PROMPT) as m,
    ):
        m.resid_post[1]
        m.resid_post[0]
    with (
        pytest.raises(UnknownPointError, match=r"did you mean resid_post.*test_runtime_trace.py:\d+\)"),
        rt.trace(PROMPT) as m,
    ):
        m.resid_posts[1]
    with pytest.raises(WriteError, match=r"the write has \(1, 1\)"), rt.trace(PROMPT) as m:
        m.resid_post[1] = torch.zeros(1, 1)
    with pytest.raises(StaleWriteError, match=r"resid_post\[0\] was edited in place"), rt.trace(PROMPT) as m:
        h = m.resid_post[0]
        m.resid_post[1]
        h += 1
    assert_clean(rt)


def test_an_installed_interventions_error_reaches_the_trace(rt: Runtime) -> None:
    def fails(m: Any) -> None:
        m.resid_post[0]
        raise OSError("installed")

    rt.install(fails, name="fails")
    try:
        with pytest.raises(OSError, match="installed"), rt.trace(PROMPT) as m:
            m.embed  # noqa: B018
        with pytest.raises(OSError, match="installed"):
            for m in rt.steps(PROMPT, max_new_tokens=3):
                m.embed  # noqa: B018
        with pytest.raises(OSError, match="installed"), rt.trace(PROMPT) as m:
            m.resid_post[2]
    finally:
        rt.remove("fails")


def test_an_error_of_the_engine_reaches_the_body(hf: Runtime) -> None:
    layer = hf.engine.model.model.layers[2]  # type: ignore[attr-defined]
    handle = layer.register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        with hf.trace(PROMPT) as m:
            m.resid_post[0]
            with pytest.raises(ZeroDivisionError):
                m.resid_post[2]
            with pytest.raises(PassedError, match="was read after its pass had ended"):
                m.logits  # noqa: B018
        with pytest.raises(ZeroDivisionError):
            run(hf, IDS, capture(("resid_post", 2)))
    finally:
        handle.remove()


def test_a_read_after_the_end(rt: Runtime) -> None:
    with rt.trace(PROMPT) as m:
        h = m.resid_post[1]
    for read in (lambda: m.resid_post[1], lambda: m.resid_post[2], lambda: m.logits, lambda: m.at("model.norm").output):
        with pytest.raises(PassedError, match="was read after its pass had ended"):
            read()
    h += 1  # it is the body's own by now
    passes = list(rt.steps(PROMPT, max_new_tokens=2))
    with pytest.raises(PassedError, match="was read after its pass had ended"):
        passes[0].logits  # noqa: B018


def test_a_bad_capture_is_raised_when_the_trace_ends(hf: Runtime) -> None:
    layer = hf.engine.model.model.layers[1]  # type: ignore[attr-defined]
    handle = layer.register_forward_hook(lambda module, args, output: output * 0)
    try:
        with pytest.raises(BadCaptureError, match="nothing but zeros"), hf.trace(PROMPT) as m:
            m.save("x", m.resid_post[1])
    finally:
        handle.remove()


def test_many_prompts_are_refused(rt: Runtime) -> None:
    with pytest.raises(ValueError, match="take one prompt, not 3"), rt.trace(IDS):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="prompt 0: token id"):
        rt.steps([VOCAB])


@pytest.mark.engine
def test_traces_on_two_engines_at_once() -> None:
    """One inside the other, and loops side by side: each has its own model to go on with."""
    a, b = booted("hf"), booted("vllm")
    wanted = reference(a, ("resid_post", 1), ("logits",), max_new_tokens=1)
    with a.trace(PROMPT) as m:
        first = m.resid_post[0].clone()
        with b.trace(PROMPT) as n:
            assert relative(n.resid_post[0], first) < 2e-5
            inner = n.resid_post[1].clone()
            outer = m.resid_post[1].clone()
            assert relative(inner, outer) < 2e-5
        logits = m.logits.clone()
    assert torch.equal(outer, wanted.cat("resid_post.1"))
    assert torch.equal(logits, wanted.cat("logits"))
    tokens = [
        (int(m.sampled), int(n.sampled))
        for m, n in zip(a.steps(PROMPT, max_new_tokens=4), b.steps(PROMPT, max_new_tokens=4), strict=True)
    ]
    assert all(x == y for x, y in tokens)
    assert_clean(a)
    assert_clean(b)


# ---- wherever it stands


def test_in_nested_functions_comprehensions_and_callbacks(rt: Runtime) -> None:
    wanted = reference(rt, *((("resid_post", i)) for i in range(3)), max_new_tokens=1)
    with rt.trace(PROMPT) as m:

        def look(layer: int) -> torch.Tensor:
            def deeper() -> Any:
                return m.resid_post[layer].clone()

            return deeper()

        kept = [look(i) for i in range(2)]
        kept.append(next(iter(map(look, [2]))))
    assert all(torch.equal(k, wanted.cat(f"resid_post.{i}")) for i, k in enumerate(kept))


def test_under_exec(rt: Runtime) -> None:
    """No source to read, no frame to rewrite."""
    scope: dict[str, Any] = {"rt": rt, "PROMPT": PROMPT}
    exec("with rt.trace(PROMPT) as m:\n    x = m.resid_post[1].clone()\n    assert x.shape[0] == len(PROMPT)", scope)
    assert torch.equal(scope["x"], reference(rt, ("resid_post", 1), max_new_tokens=1).cat("resid_post.1"))


def test_asserts_that_pytest_rewrites(rt: Runtime) -> None:
    with pytest.raises(AssertionError, match="assert"), rt.trace(PROMPT) as m:
        assert m.resid_post[1].shape[0] == -1, m.tokens


def test_with_a_debugger_attached(rt: Runtime) -> None:
    """A trace function sees the body's lines in order, and only the body's frame has stopped."""
    lines: list[int] = []

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != "body":
            return None
        if event == "line":
            lines.append(frame.f_lineno - frame.f_code.co_firstlineno)
        return tracer

    def body() -> None:
        with rt.trace(PROMPT) as m:
            m.resid_post[0]
            m.resid_post[1]
            m.logits  # noqa: B018

    old = sys.gettrace()
    sys.settrace(tracer)
    try:
        body()
    finally:
        sys.settrace(old)
    assert [n for n in lines if n in (2, 3, 4)] == [2, 3, 4]


def test_in_a_script_and_with_pdb(tmp_path: Path) -> None:
    """A script of its own, stepped through by pdb with commands on stdin."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
            import adapters
            from harness.models import resolve

            rt = adapters.load(resolve("synthetic:llama"), engine="hf", dtype="float32", threads=1)
            with rt.trace([5, 6, 7]) as m:
                h = m.resid_post[1]
                breakpoint()
                print("tokens", h.shape[0])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        input="p h.shape\nnext\nnext\nc\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "torch.Size([3, 128])" in done.stdout, done.stdout + done.stderr
    assert "tokens 3" in done.stdout


@pytest.mark.parametrize(
    "left", ["g = rt.steps([5, 6, 7]); next(g).embed", "t = rt.trace([5, 6]); t.__enter__().embed"]
)
def test_one_that_is_still_open_at_exit(left: str) -> None:
    """As when a REPL is left in the middle of a loop: the process ends in peace."""
    code = f"""
import adapters
from harness.models import resolve
rt = adapters.load(resolve("synthetic:llama"), engine="hf", dtype="float32", threads=1)
{left}
print("leaving")
"""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "leaving\n"
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


def test_a_notebooks_cell_and_an_event_loop(rt: Runtime) -> None:
    """A cell runs inside a running event loop."""
    import asyncio

    async def cell() -> int:
        with rt.trace(PROMPT) as m:
            await asyncio.sleep(0)
            return int(m.logits.argmax())

    assert asyncio.run(cell()) == reference(rt, ("sampled",), max_new_tokens=1).token_ids[0]


def test_in_a_thread(rt: Runtime) -> None:
    import threading

    found: list[Any] = []

    def work() -> None:
        with rt.trace(PROMPT) as m:
            found.append(m.resid_post[1].clone())
        found.append(run(rt, [PROMPT], capture(("resid_post", 1)), max_new_tokens=1)[0].cat("resid_post.1"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], found[1])
