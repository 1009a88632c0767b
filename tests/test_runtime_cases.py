"""Small inputs with the right answer, for faults that people reported elsewhere and that no other file here covers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.engines.module import WrappedModule
from adapters.errors import NeverRanError
from adapters.prompts import prompts_of
from tests.engines import booted, prompts, run, vllm

ROOT = Path(__file__).resolve().parent.parent


def test_a_flattened_batch_is_cut_by_its_requests() -> None:
    """case 11: a router sees [batch * tokens, d]: two of three requests send their last token elsewhere."""
    rt = booted("hf", "synthetic:qwen2_moe")
    ids = [p[:7] for p in prompts(3, 7, 7)]
    layer = rt.engine.points.layers("router")[-1]
    experts = rt.run(ids[:1], lambda m: m.save("r", m.router[layer]), max_new_tokens=1)[0].cat("r").shape[-1]

    def reads(m: Any) -> None:
        m.save("router", m.router[layer])
        m.save("out", m.mlp_out[layer])
        m.save("logits", m.logits)

    def to(expert: int) -> Any:
        def fn(m: Any) -> None:
            m.router[layer][-1] = float("-inf")
            m.router[layer][-1, expert] = 30.0
            reads(m)

        return fn

    plain = run(rt, ids, reads, max_new_tokens=1)
    sent = run(rt, ids, [to(0), to(1), reads], max_new_tokens=1)
    for i, out in enumerate(sent):
        assert out.cat("router").shape == (7, experts)
        alone = run(rt, [ids[i]], reads, max_new_tokens=1)[0]
        assert torch.allclose(plain[i].cat("router"), alone.cat("router"), atol=1e-5)
        assert torch.allclose(out.cat("out")[:-1], plain[i].cat("out")[:-1], atol=1e-6)
    for i in (0, 1):
        assert float((sent[i].cat("out")[-1] - plain[i].cat("out")[-1]).norm()) > 1e-3
    assert torch.equal(sent[2].cat("logits"), plain[2].cat("logits"))


@pytest.mark.parametrize("called", [0, 1, 2])
def test_a_module_that_was_compiled_before_fires_or_says_that_it_did_not(called: int) -> None:
    """case 12: what listens after the first compiled call must never be skipped without a word."""
    torch._dynamo.reset()
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    compiled: Any = torch.compile(plain, backend="eager")
    wrapped, x = WrappedModule(compiled), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(called):
            compiled(x)
        wanted = plain[0](x)
    seen = []
    for _ in range(2):
        try:
            with wrapped.trace(x) as m:
                seen.append(m.at("_orig_mod.0").output.clone())
        except NeverRanError as said:
            assert "did not run after it was asked for" in str(said)  # noqa: PT017
    assert all(torch.equal(s, wanted) for s in seen)
    with torch.no_grad():
        assert torch.equal(compiled(x), plain(x))


class Tupled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + 1, None


class Bare(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class First(torch.nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return (x[0] if isinstance(x, tuple) else x) * 2


@pytest.mark.parametrize("kind", [Tupled, Bare])
def test_a_layers_output_is_the_requests_rows_whatever_it_returns(kind: type[torch.nn.Module]) -> None:
    """case 22: of a tensor, `output[0]` is the first token; of a tuple, what is a tensor in it is handed out."""
    wrapped = WrappedModule(torch.nn.Sequential(kind(), First()))
    xs = [torch.randn(n, 4) for n in (1, 3)]

    def fn(m: Any) -> None:
        m.save("out", m.at("0").output)
        if m.request == "1":
            m.at("0").output[0] = 0.0

    results = wrapped.forward(xs, fn)
    for x, result in zip(xs, results, strict=True):
        assert result.error is None
        assert torch.equal(result.saves["out"][0], x + 1)
    assert torch.equal(results[0].output, (xs[0] + 1) * 2)
    assert torch.equal(results[1].output[1:], (xs[1][1:] + 1) * 2)
    assert torch.equal(results[1].output[0], torch.zeros(4))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux' /proc"
)
def test_a_hundred_requests_need_hardly_more_memory_than_their_batch() -> None:
    """case 59: the peak of 100 requests that read, edit and save is at most 1.2 times that of the plain batch.

    What they save are plain numbers: a small tensor that stays where a large one was leaves a hole that the allocator
    of a CPU does not fill, which is no memory of ours.
    """
    code = """
        import re, sys, torch
        from adapters.engines.module import WrappedModule
        torch.set_num_threads(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
        xs = [torch.randn(400, 256) for _ in range(100)]

        def fn(m):
            m.at("1").output *= 2
            m.save("norm", float(m.at("3").output.norm()))
            m.save("mean", float(m.at("4").output.mean()))

        def status(key):
            return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

        def peak(run):
            run()
            open("/proc/self/clear_refs", "w").write("5")
            before = status("VmRSS")
            run()
            return status("VmHWM") - before

        def plain():
            with torch.no_grad():
                model(torch.cat(xs))

        print(peak(plain), peak(lambda: WrappedModule(model).forward(xs, fn)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "PermissionError" in done.stderr:
        pytest.skip("/proc/self/clear_refs may not be written here")
    assert done.returncode == 0, done.stderr
    plain, ours = map(int, done.stdout.split())
    assert plain > 80_000, "the batch itself is 100 MB"
    assert ours <= 1.2 * plain


@pytest.mark.engine
def test_a_sweep_sends_its_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 95: 1024 requests of one function serialize it once, and each carries the same few bytes."""
    from adapters.engines.wire import Carried

    rt = vllm()
    engine: Any = rt.engine
    packs = []
    packed = Carried.packed
    monkeypatch.setattr(Carried, "packed", lambda self: packs.append(1) or packed(self))
    monkeypatch.setattr(engine, "host", None)
    big = torch.zeros(1000)

    def fn(m: Any) -> None:
        m.save("x", m.at("model.layers.1.mlp").output @ big[:128])

    asks = rt._asks([[5, 6]] * 1024, fn)
    seen: dict[Any, bytes] = {}
    sent = [engine._carried(ask, seen) for ask in asks]
    assert len(packs) == 1
    assert len({id(s) for s in sent}) == 1
    assert len(sent[0]) < 10_000


# ---- token ids (case 67)


def tokenizer(bos: bool, template: bool = True) -> Any:
    """A tiny fast tokenizer, with or without a first token of its own; its BOS is its PAD as well."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<s>": 0, "hi": 1, "user": 2, "assistant": 3, "?": 4}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", pad_token="<s>", unk_token="?")
    if template:
        made.chat_template = (
            "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %} assistant{% endif %}"
        )
    return made


def ids(prompt: Any, of: Any) -> tuple[int, ...]:
    return prompts_of(prompt, of, 10, 100, 1)[0]


def test_a_prompt_has_its_first_token_once() -> None:
    """case 67: with a BOS that the tokenizer adds, without one, and where it is the padding as well."""
    chat = [{"role": "user", "content": "hi"}]
    assert ids("hi hi", tokenizer(bos=True)) == (0, 1, 1)
    assert ids("hi hi", tokenizer(bos=False)) == (1, 1)
    assert ids("<s> hi", tokenizer(bos=False)) == (0, 1)
    assert ids(chat, tokenizer(bos=True)) == ids(chat, tokenizer(bos=False)) == (0, 2, 1, 3)
    assert ids([0, 0, 1], tokenizer(bos=True)) == (0, 0, 1)


def test_a_first_token_that_would_be_there_twice_is_refused() -> None:
    """case 67: the text of a chat template begins with BOS, and the tokenizer adds another."""
    of = tokenizer(bos=True)
    text = of.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    with pytest.raises(ValueError, match=r"prompt 0 begins with '<s>' twice.*leave it out of the text"):
        ids(text, of)
