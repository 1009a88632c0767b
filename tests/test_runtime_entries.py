"""Every way into the runtime means the same: run, arun, stream, trace, steps, several samples, text, ids and chats."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.errors import LoadError
from adapters.prompts import prompts_of
from adapters.runtime import Output, Runtime
from tests.engines import VOCAB, assert_clean, booted, prompts, rt, run, same, vllm

__all__ = ["rt"]

IDS = prompts(3, longest=9)
VECTOR = torch.linspace(-1, 1, 128)


def edit(m: Any) -> None:
    """The same edit everywhere, and what it changes two layers on."""
    if m.is_prompt:
        m.resid_post[0] += VECTOR
    m.save("post", m.resid_post[2])


def plain(m: Any) -> None:
    m.save("post", m.resid_post[2])


def delta(edited: Output, untouched: Output) -> torch.Tensor:
    """What the edit did to the prompt's rows."""
    return edited.saves["post"][0] - untouched.saves["post"][0]


class Tokenizer:
    """Bytes as tokens, with a chat template: tests need no vocabulary."""

    chat_template: str | None = "yes"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [b + 3 for b in text.encode()]}

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return bytes(max(i - 3, 0) % 256 for i in ids).decode(errors="replace")

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, tokenize: bool) -> dict[str, list[int]]:
        assert add_generation_prompt
        assert tokenize
        return self("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


@pytest.fixture
def worded(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """An engine with a tokenizer."""
    monkeypatch.setattr(rt.engine, "tokenizer", Tokenizer())
    return rt


# ---- case 54: no way in goes past the intervention


def test_every_entry_point_gives_the_same_change(worded: Runtime) -> None:
    """case 54: text, token ids, a chat, n=2, async, streaming, trace and steps: one edit, one captured change."""
    rt = worded
    chat = [{"role": "user", "content": "hi"}]
    text = "<user>hi<assistant>"
    ids = [b + 3 for b in text.encode()]
    options: dict[str, Any] = {"max_new_tokens": 1, "ignore_eos": True}
    untouched = rt.run(ids, plain, **options)[0]
    found: dict[str, Output] = {
        "ids": rt.run(ids, edit, **options)[0],
        "text": rt.run(text, edit, **options)[0],
        "chat": rt.run(chat, edit, **options)[0],
        "chats": rt.run([chat], edit, **options)[0],
        "tensor": rt.run(torch.tensor(ids), edit, **options)[0],  # type: ignore[arg-type]
        "second of two": rt.run(ids, edit, n=2, **options)[1],
        "beside others": rt.run([IDS[0], text], edit, **options)[1],
    }
    rt.install(edit, name="edit")
    try:
        found["installed"] = rt.run(chat, **options)[0]
        found["installed, async"] = asyncio.run(rt.arun(chat, **options))[0]
    finally:
        rt.remove("edit")

    async def later() -> None:
        found["async"] = (await rt.arun(text, edit, **options))[0]
        stream = rt.stream(chat, edit, **options)
        async for _ in stream:
            pass
        assert stream.output is not None
        found["stream"] = stream.output

    asyncio.run(later())
    wanted = delta(found["ids"], untouched)
    assert float(wanted.norm()) > 1
    for name, output in found.items():
        assert output.prompt_token_ids == tuple(ids), name
        assert torch.allclose(delta(output, untouched), wanted, atol=1e-5), name
    with rt.trace(chat) as m:
        edit(m)
        traced = m.saves["post"][0]
    assert torch.allclose(traced - untouched.saves["post"][0], wanted, atol=1e-5)
    for m in rt.steps(text, max_new_tokens=1):
        edit(m)
        stepped = m.saves["post"][0]
    assert torch.allclose(stepped - untouched.saves["post"][0], wanted, atol=1e-5)


# ---- several samples


def test_samples_come_prompt_by_prompt_and_each_is_a_request_of_its_own(rt: Runtime) -> None:
    seen: list[str] = []

    def fn(m: Any) -> None:
        if m.step == 0:
            seen.append(m.request)
            m.state["first"] = m.request
        m.save("mine", m.state["first"] == m.request)
        plain(m)

    outs = run(rt, IDS[:2], fn, n=3, temperature=1.0, seed=7)
    assert [o.prompt_token_ids for o in outs] == [tuple(p) for p in IDS[:2] for _ in range(3)]
    assert len(set(seen)) == len(outs) == 6
    assert all(o.saves["mine"] == [True] * 4 for o in outs)
    assert len({o.token_ids for o in outs[:3]}) == 3
    alone = [run(rt, IDS[:1], fn, temperature=1.0, seed=7 + i)[0] for i in range(3)]
    assert [o.token_ids for o in outs[:3]] == [o.token_ids for o in alone]
    assert all(o.saves["post"][0].shape == (len(IDS[0]), 128) for o in outs[:3])


def test_greedy_samples_are_all_the_same(rt: Runtime) -> None:
    outs = run(rt, IDS[:1], plain, n=2)
    assert outs[0].token_ids == outs[1].token_ids
    assert torch.allclose(outs[0].cat("post"), outs[1].cat("post"), atol=1e-5)


def test_one_intervention_a_prompt_is_that_of_all_its_samples(rt: Runtime) -> None:
    outs = run(rt, IDS[:2], [plain, None], n=2, max_new_tokens=1)
    assert [list(o.saves) for o in outs] == [["post"], ["post"], [], []]


def test_no_sample_is_refused(rt: Runtime) -> None:
    with pytest.raises(ValueError, match="n=0: at least one sample"):
        rt.run(IDS, n=0)


# ---- log-probabilities


def test_logprobs_are_those_of_the_drawn_tokens(rt: Runtime) -> None:
    outs = run(rt, IDS, lambda m: m.save("logits", m.logits), logprobs=True)
    for out in outs:
        assert out.logprobs is not None
        assert list(out.saves) == ["logits"]
        scores = out.cat("logits").float().log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(scores, out.token_ids, strict=True)]
        assert out.logprobs == pytest.approx(wanted, abs=1e-5)
        assert list(out.logprobs) == pytest.approx([float(row.max()) for row in scores], abs=1e-5)


def test_logprobs_follow_a_token_that_was_written(rt: Runtime) -> None:
    forced = [17, 400, 3, 99]

    def force(m: Any) -> None:
        m.save("logits", m.logits)
        m.sampled[:] = forced[m.step]

    out = run(rt, IDS[:1], force, logprobs=True)[0]
    assert out.token_ids == tuple(forced)
    scores = out.cat("logits").float().log_softmax(-1)
    assert out.logprobs == pytest.approx([float(scores[i, t]) for i, t in enumerate(forced)], abs=1e-5)
    assert all(scores[i, t] < scores[i].max() - 0.1 for i, t in enumerate(forced))


def test_logprobs_are_under_the_logits_that_were_left(rt: Runtime) -> None:
    def only(m: Any) -> None:
        m.logits[:] = float("-inf")
        m.logits[:, [5, 6]] = torch.tensor([0.0, 1.0])

    out = run(rt, IDS[:1], only, logprobs=True, max_new_tokens=2)[0]
    assert out.token_ids == (6, 6)
    assert out.logprobs == pytest.approx([float(torch.tensor([0.0, 1.0]).log_softmax(0)[1])] * 2, abs=1e-6)


def test_logprobs_without_an_intervention_change_no_token(rt: Runtime) -> None:
    asked, plainly = run(rt, IDS, logprobs=True), run(rt, IDS)
    assert [o.token_ids for o in asked] == [o.token_ids for o in plainly]
    assert all(o.logprobs is not None and len(o.logprobs) == 4 and max(o.logprobs) < 0 for o in asked)
    assert all(o.logprobs is None for o in plainly)
    assert all(not o.saves for o in asked)


def test_logprobs_of_what_stops_or_fails_are_those_of_its_tokens(rt: Runtime) -> None:
    def ends(m: Any) -> None:
        m.logits  # noqa: B018
        if m.step == 1:
            m.stop()

    def fails(m: Any) -> None:
        m.logits  # noqa: B018
        if m.step == 2:
            raise RuntimeError

    outs = run(rt, IDS[:2], [ends, fails], logprobs=True, on_error="return")
    assert [len(o.token_ids) for o in outs] == [2, 2]
    assert [len(o.logprobs or ()) for o in outs] == [2, 2]


# ---- async


def test_three_prompts_in_async_mode_give_three_results_in_order(rt: Runtime) -> None:
    """case 32."""
    same(asyncio.run(rt.arun(IDS, plain, max_new_tokens=4, ignore_eos=True)), run(rt, IDS, plain), bits=False)


def test_coroutines_share_nothing(rt: Runtime) -> None:
    """case 30: eight coroutines that save under one name, and wait for one another in between."""
    ids = prompts(8, longest=12)

    async def one(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        def fn(m: Any) -> None:
            m.state.setdefault("who", i)
            m.save("who", m.state["who"])
            m.resid_post[0] += i
            m.save("post", m.resid_post[2])

        found = []
        for _ in range(2):
            out = (await rt.arun(ids[i], fn, max_new_tokens=2, ignore_eos=True))[0]
            assert out.saves["who"] == [i, i]
            found.append(out.cat("post"))
            await asyncio.sleep(0)
        return found[0], found[1]

    async def all_of_them() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return await asyncio.gather(*map(one, range(8)))

    together = asyncio.run(all_of_them())
    for i, (first, second) in enumerate(together):

        def fn(m: Any, i: int = i) -> None:
            m.resid_post[0] += i
            m.save("post", m.resid_post[2])

        wanted = run(rt, [ids[i]], fn, max_new_tokens=2)[0].cat("post")
        assert torch.allclose(first, wanted, atol=1e-4)
        assert torch.allclose(second, wanted, atol=1e-4)


def test_what_is_asked_for_together_runs_as_one_batch() -> None:
    """One pass serves them all: asked one after the other there would be one each."""
    rt = booted("hf")
    passes: list[tuple[str, int]] = []
    wait = threading.Event()

    def slow(m: Any) -> None:
        wait.wait(10)

    def fn(m: Any) -> None:
        m.at("model.layers.0").output  # noqa: B018
        passes.append((m.request, id(m._rows)))

    async def main() -> None:
        first = asyncio.ensure_future(rt.arun(IDS[0], slow, max_new_tokens=1))
        await asyncio.sleep(0.1)
        others = [asyncio.ensure_future(rt.arun(p, fn, max_new_tokens=1)) for p in IDS]
        await asyncio.sleep(0.1)
        wait.set()
        await asyncio.gather(first, *others)

    asyncio.run(main())
    assert len(passes) == 3
    assert len({rows for _, rows in passes}) == 1
    assert_clean(rt)


def test_an_error_reaches_its_own_coroutine_and_no_other(rt: Runtime) -> None:
    def fails(m: Any) -> None:
        raise ZeroDivisionError("mine")

    async def main() -> list[Any]:
        asked = [rt.arun(IDS[0], fails), rt.arun(IDS[1], plain, max_new_tokens=2, ignore_eos=True)]
        return await asyncio.gather(*asked, return_exceptions=True)

    failed, fine = asyncio.run(main())
    assert isinstance(failed, ZeroDivisionError)
    assert len(failed.outputs) == 1  # type: ignore[attr-defined]
    same(fine, run(rt, IDS[1:2], plain, max_new_tokens=2), bits=False)


def test_errors_in_the_arguments_are_raised_where_they_are_made(rt: Runtime) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        asyncio.run(rt.arun([VOCAB]))
    with pytest.raises(TypeError, match="max_tokens"):
        asyncio.run(rt.arun(IDS, max_tokens=3))
    with pytest.raises(ValueError, match="one prompt and one sample, not 3"):
        rt.stream(IDS)
    with pytest.raises(ValueError, match="one prompt and one sample, not 2"):
        rt.stream(IDS[0], n=2)


def test_a_cancelled_coroutine_leaves_the_engine_serving(rt: Runtime) -> None:
    started = threading.Event()

    def slow(m: Any) -> None:
        started.set()

    async def main() -> list[Output]:
        task = asyncio.ensure_future(rt.arun(IDS[0], slow, max_new_tokens=20, ignore_eos=True))
        while not started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await rt.arun(IDS[1], plain, max_new_tokens=2, ignore_eos=True)

    same(asyncio.run(main()), run(rt, IDS[1:2], plain, max_new_tokens=2), bits=False)


# ---- streaming


def test_a_stream_gives_every_token_and_then_the_saves(worded: Runtime) -> None:
    rt = worded
    wanted = run(rt, IDS[:1], plain)[0]

    async def main() -> tuple[list[int], str, Output]:
        stream = rt.stream(IDS[0], plain, max_new_tokens=4, ignore_eos=True)
        assert stream.output is None
        pieces = [piece async for piece in stream]
        assert stream.output is not None
        assert [piece async for piece in stream] == []
        return [p.token_id for p in pieces], "".join(p.text for p in pieces), stream.output

    ids, text, output = asyncio.run(main())
    assert tuple(ids) == wanted.token_ids
    assert wanted.text is not None
    assert wanted.text.startswith(text)
    same([output], [wanted], bits=False)


def test_tokens_come_while_the_generation_runs(rt: Runtime) -> None:
    """The intervention goes on only when the reader has the token before."""
    read = [threading.Event() for _ in range(4)]

    def fn(m: Any) -> None:
        if m.step:
            assert read[m.step - 1].wait(20), "the reader had to wait for the end"

    async def main() -> int:
        count = 0
        async for _ in rt.stream(IDS[0], fn, max_new_tokens=4, ignore_eos=True):
            read[count].set()
            count += 1
        return count

    assert asyncio.run(main()) == 4


def test_streams_side_by_side_stay_apart(rt: Runtime) -> None:
    async def one(ids: list[int]) -> tuple[int, ...]:
        stream = rt.stream(ids, plain, max_new_tokens=3, ignore_eos=True)
        found = tuple([piece.token_id async for piece in stream])
        assert stream.output is not None
        assert stream.output.token_ids == found
        return found

    async def main() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(one, IDS))

    assert asyncio.run(main()) == [o.token_ids for o in run(rt, IDS, plain, max_new_tokens=3)]


def test_a_stream_that_is_stopped_ends_early(rt: Runtime) -> None:
    async def main() -> Output:
        stream = rt.stream(IDS[0], plain, max_new_tokens=200, ignore_eos=True)
        async for _ in stream:
            stream.stop()
        assert stream.output is not None
        return stream.output

    output = asyncio.run(main())
    assert output.stopped
    assert 1 <= len(output.token_ids) < 200
    assert len(output.saves["post"]) == len(output.token_ids)


def test_a_streams_error_is_raised_at_its_end(rt: Runtime) -> None:
    def fails(m: Any) -> None:
        if m.step == 2:
            raise ZeroDivisionError("mine")

    async def main() -> list[int]:
        ids: list[int] = []

        async def read() -> None:
            async for piece in rt.stream(IDS[0], fails, max_new_tokens=4, ignore_eos=True):
                ids.append(piece.token_id)

        with pytest.raises(ZeroDivisionError, match="mine"):
            await read()
        return ids

    assert tuple(asyncio.run(main())) == run(rt, IDS[:1], max_new_tokens=2)[0].token_ids


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    from adapters.asynchronous import Stream

    stream = Stream(None, None, Tokenizer(), list)  # type: ignore[arg-type]
    ids = [b + 3 for b in "aé€b".encode()]
    assert [stream._added(i) for i in ids] == ["a", "", "é", "", "", "€", "b"]


@pytest.mark.engine
def test_streaming_out_of_another_process_is_refused() -> None:
    rt = vllm()
    engine: Any = rt.engine
    engine.in_process = False
    try:
        with pytest.raises(LoadError, match=r"stream\(\) needs the engine in this process"):
            rt.stream(IDS[0])
    finally:
        engine.in_process = True


# ---- chats


def test_chats_are_written_by_the_models_own_template() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    wanted = tuple(b + 3 for b in b"<system>s<user>u<assistant>")
    assert prompts_of(chat, Tokenizer(), 512, 100, 1) == [wanted]
    assert prompts_of([chat, "u", [5]], Tokenizer(), 512, 100, 1) == [wanted, (ord("u") + 3,), (5,)]


def test_a_chat_that_cannot_be_written_is_refused() -> None:
    bare = Tokenizer()
    bare.chat_template = None
    chat = [{"role": "user", "content": "u"}]
    with pytest.raises(ValueError, match="prompt 0 is a chat and this model has no chat template"):
        prompts_of(chat, bare, 512, 100, 1)
    with pytest.raises(ValueError, match="has no chat template"):
        prompts_of(chat, None, 512, 100, 1)
    with pytest.raises(ValueError, match=r'prompt 1 holds .*: every message of a chat has a "role" and a "content"'):
        prompts_of([[5], [{"role": "user"}]], Tokenizer(), 512, 100, 1)


# ---- the tokenizer inside


@pytest.mark.engine
def test_an_intervention_has_the_engines_own_tokenizer() -> None:
    runtime = vllm(skip_tokenizer_init=False)
    assert runtime.tokenizer is not None
    seen: list[Any] = []
    out = run(runtime, [IDS[0]], lambda m: seen.append(m.tokenizer) or m.save("text", m.tokenizer.decode([70, 71])))
    assert all(found is runtime.tokenizer for found in seen)
    assert out[0].saves["text"] == [runtime.tokenizer.decode([70, 71])] * 4


@pytest.mark.engine
@pytest.mark.parametrize("skipped", [False, True])
def test_a_worker_in_a_process_of_its_own_reads_it_when_it_is_asked(
    skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adapters.engines.vllm_worker import WorkerHost

    read: list[str] = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: read.append(path) or Tokenizer())
    host = object.__new__(WorkerHost)
    config = SimpleNamespace(skip_tokenizer_init=skipped, tokenizer="here")
    host.runner = SimpleNamespace(model_config=config)
    assert read == []
    assert (host.tokenizer is None) == skipped
    assert host.tokenizer is host.tokenizer
    assert read == ([] if skipped else ["here"])
