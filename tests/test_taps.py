"""Taps: the operator alone, compiled `transformers`, compiled vLLM, and every trap that the self-test must catch."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapters import boot, taps
from adapters.boot import load
from adapters.declared import Capture
from adapters.engines import hf_taps as hf_taps_engine
from adapters.errors import LoadError, NotDeclaredError, UnknownPointError, WriteError
from adapters.points import FAMILIES, PER_LAYER, Dimensions, Location, Points, points_of
from adapters.runtime import Runtime
from adapters.selftest import PROMPT, check_taps
from harness.models import resolve

DIMS = Dimensions(layers=4, d_model=64, heads=4, kv_heads=2, head_dim=16, d_mlp=128, vocab=100)
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [31, 37, 41], [43, 47, 53, 59, 61]]


@pytest.fixture
def direct() -> Iterator[None]:
    """As on a torch for CPUs, whatever this one is."""
    before = taps._ONE._op, taps._PAIR._op
    taps.dispatch(through=False)
    yield
    taps._ONE._op, taps._PAIR._op = before


@pytest.fixture
def tap() -> Iterator[torch.Tensor]:
    """The id of a tap that only this test calls."""
    id = taps.new_id()
    yield id
    taps._ARMED.pop(int(id), None)


# ---- the operator


def test_cuda_graphs_end_before_a_tap() -> None:
    """Inside of one its Python would run when the graph is captured, and never again."""
    for operator in (torch.ops.tapgrid.tap_.default, torch.ops.tapgrid.tap_pair_.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_an_idle_tap_changes_nothing(tap: torch.Tensor) -> None:
    x = torch.arange(6.0).view(2, 3)
    before = x.clone()
    torch.ops.tapgrid.tap_(x, tap)
    assert torch.equal(x, before)


def test_a_write_lands_in_the_tensor_itself(tap: torch.Tensor) -> None:
    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    taps._ARMED[int(tap)] = double
    x = torch.arange(6.0).view(2, 3)
    torch.ops.tapgrid.tap_(x[1:], tap)
    assert x.tolist() == [[0.0, 1.0, 2.0], [6.0, 8.0, 10.0]]


def test_a_tap_is_found_by_the_address_of_its_id_and_by_its_value(tap: torch.Tensor) -> None:
    assert int(tap) == tap.data_ptr()
    other, seen = taps.new_id(), []
    assert int(other) != int(tap)
    taps._ARMED[int(tap)] = seen.append
    x = torch.zeros(2)
    torch.ops.tapgrid.tap_(x, tap)
    taps.at(int(tap), x)
    taps._by_value(x, tap.clone())  # as what replays CUDA graphs hands it over
    torch.ops.tapgrid.tap_(x, other)
    taps.at(int(other), x)
    assert len(seen) == 3
    assert all(found is x or found.data_ptr() == x.data_ptr() for found in seen)


def test_the_pair_form_hands_over_both(tap: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []

    def fold(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        seen.append(hidden + residual)
        residual.copy_(hidden + residual)
        hidden.zero_()

    taps._ARMED[int(tap)] = fold
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    torch.ops.tapgrid.tap_pair_(hidden, residual, tap)
    assert hidden.abs().sum() == 0
    assert torch.equal(residual, seen[0])


class Seen(TorchDispatchMode):
    """The operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_compiled_code_calls_a_tap_without_torchs_dispatcher(
    tap: torch.Tensor, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, calls, dispatched = tap, [], []
    monkeypatch.setattr(taps, "at", lambda *arguments: dispatched.append(arguments))

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a + 1, b + 1
        torch.ops.tapgrid.tap_(a, id)
        torch.ops.tapgrid.tap_pair_(a, b, id)
        return a + b

    taps._ARMED[int(tap)] = lambda *parts: calls.append([p.clone() for p in parts]) or parts[0].mul_(10)
    compiled = torch.compile(f, dynamic=True)
    with torch.inference_mode():
        found = [compiled(torch.ones(n), torch.zeros(n)).tolist() for n in (3, 4, 5)]
    assert found == [[201.0] * n for n in (3, 4, 5)]
    assert [[p[0].item() for p in parts] for parts in calls] == [[2.0], [20.0, 1.0]] * 3
    assert dispatched == []
    torch.ops.tapgrid.tap_(torch.ones(1), id)
    assert len(dispatched) == 1


def test_what_is_no_ordinary_tensor_is_dispatched(tap: torch.Tensor, direct: None) -> None:
    taps._ARMED[int(tap)] = lambda *parts: [p.add_(1) for p in parts]
    x, y = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
    with torch.no_grad(), Seen() as seen:
        torch.ops.tapgrid.tap_.default(x, tap)
        torch.ops.tapgrid.tap_pair_.default(x, y, tap)
        torch.ops.tapgrid.tap_pair_.default(y, y, tap)
    assert [n for n in seen.names if "tapgrid" in n] == ["tapgrid.tap_.default", "tapgrid.tap_pair_.default"]
    assert x.tolist() == [2.0, 2.0]
    assert y.tolist() == [3.0, 3.0]
    taps.dispatch(through=True)
    with Seen() as seen:
        torch.ops.tapgrid.tap_.default(y, tap)
    assert seen.names[0] == "tapgrid.tap_.default"
    assert y.tolist() == [4.0, 4.0]


def test_a_torch_whose_overloads_have_no_op_of_their_own_dispatches(
    direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = taps._ONE._op
    monkeypatch.setattr(taps, "_DISPATCHED", (None, None))
    taps.dispatch(through=False)
    assert taps._ONE._op is before


def test_versions_count_in_the_first_call_of_a_fresh_graph(tap: torch.Tensor) -> None:
    """torch runs a graph's first call with the key that counts versions excluded: an edit went unnoticed there."""
    steps: list[int] = []

    def count(x: torch.Tensor) -> None:
        before = x._version
        x.add_(1)
        steps.append(x._version - before)

    id = tap

    def f(a: torch.Tensor, once: bool) -> torch.Tensor:
        b = a * 2
        torch.ops.tapgrid.tap_(b, id)
        return b + (1 if once else 2)

    taps._ARMED[int(tap)] = count
    compiled = torch.compile(f, dynamic=True)
    with torch.no_grad():
        out = [compiled(torch.zeros(3), once).tolist() for once in (True, True, False, False)]
    assert out == [[2.0] * 3] * 2 + [[3.0] * 3] * 2
    assert steps == [1, 1, 1, 1]


def test_one_graph_serves_every_length_and_swapping_callbacks_recompiles_nothing(tap: torch.Tensor) -> None:
    from torch._dynamo.utils import counters

    id = tap

    def f(a: torch.Tensor) -> torch.Tensor:
        b = a + 1
        torch.ops.tapgrid.tap_(b, id)
        return b * 2

    torch._dynamo.reset()
    compiled = torch.compile(f, dynamic=True, backend="aot_eager")
    compiled(torch.zeros(4))
    graphs = counters["stats"]["unique_graphs"]
    for n in range(20):
        taps._ARMED.pop(int(tap), None)
        if n % 2:
            taps._ARMED[int(tap)] = lambda x, n=n: x.fill_(float(n))
        assert compiled(torch.zeros(3 + n))[0].item() == (2.0 * n if n % 2 else 2.0)
    assert counters["stats"]["unique_graphs"] == graphs


# ---- declaring


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["resid_post.*"], [f"resid_post[{i}]" for i in range(4)]),
        (["z.2", "resid_post.1"], ["resid_post[1]", "z[2]"]),
        (["q.1", "k.1", "v.1"], ["q[1]"]),
        (["embed", "logits", "sampled"], ["embed"]),
        (["resid_post.*", "resid_post.-1"], [f"resid_post[{i}]" for i in range(4)]),
    ],
)
def test_declared_in_the_models_order_one_a_place(given: list[str], expected: list[str]) -> None:
    points = Points(FAMILIES["llama"], "vllm", DIMS)
    assert [str(loc) for loc in taps.declared(given, points)] == expected


@pytest.mark.parametrize("wrong", ["logits.*", "resid_pots.1", "resid_post.x", "resid_post"])
def test_a_tap_that_is_no_point_is_refused(wrong: str) -> None:
    with pytest.raises((UnknownPointError, IndexError)):
        taps.declared([wrong], Points(FAMILIES["llama"], "vllm", DIMS))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"backend": "taps"}, "needs taps="),
        ({"taps": ["z.1"]}, "needs backend='taps'"),
        ({"backend": "taps", "taps": "z.1"}, "taps is a list"),
        ({"backend": "nonsense"}, "there are"),
    ],
)
def test_load_refuses_what_does_not_fit_together(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        load(resolve("synthetic:llama"), engine="hf", **arguments)


@pytest.mark.parametrize("by_name", [(), ("residual",), ("hidden_states", "residual")], ids=len)
def test_a_residual_that_is_kept_apart_is_found_however_it_is_passed(by_name: tuple[str, ...]) -> None:
    class Layer(torch.nn.Module):
        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return hidden_states + residual

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([Layer()])
    found: list[Any] = []
    loc = Points(FAMILIES["llama"], "vllm", DIMS).at("resid_pre", 0)
    layer = taps.hook(model, loc, lambda module, x, second: found.append((x, second)))
    given = {name: torch.full((2, 3), float(i)) for i, name in enumerate(("positions", "hidden_states", "residual"))}
    layer(*(x for name, x in given.items() if name not in by_name), **{name: given[name] for name in by_name})
    assert [(x is given["hidden_states"], second is given["residual"]) for x, second in found] == [(True, True)]


# ---- compiled transformers


def hf_taps(compiler: str = "aot_eager", declared: tuple[str, ...] = ("resid_post.*", "z.1", "q.0")) -> Runtime:
    return load(
        resolve("synthetic:llama"),
        engine="hf",
        backend="taps",
        taps=declared,
        dtype="float32",
        compiler=compiler,
        threads=1,
    )


def edit(m: Any) -> None:
    m.save("q", m.q[0])
    m.resid_post[0] += 0.5
    m.z[1][:, 3] = 0
    m.save("last", m.resid_post[-1])
    m.save("logits", m.logits)
    if m.step == 2:
        m.sampled[:] = 100


def same(a: list[Any], b: list[Any], tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.token_ids == y.token_ids
        assert set(x.saves) == set(y.saves)
        for name in x.saves:
            assert x.cat(name).shape == y.cat(name).shape
            error = float((x.cat(name) - y.cat(name)).norm() / y.cat(name).norm())
            assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def eager() -> Iterator[Runtime]:
    with load(resolve("synthetic:llama"), engine="hf", dtype="float32", threads=1) as rt:
        yield rt


@pytest.mark.engine
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_transformers_equals_eager(eager: Runtime, compiler: str) -> None:
    with hf_taps(compiler) as rt:
        one = [5]  # a prompt that is as long as a step of decode
        cases: list[tuple[list[list[int]], Any]] = [(PROMPTS[:1], edit), (PROMPTS, edit), (PROMPTS, [edit, None, edit])]
        for prompts, work in (*cases, (PROMPTS, None), ([one], edit), ([one, *PROMPTS], edit), ([one, one], edit)):
            a = rt.run(prompts, work, max_new_tokens=5, ignore_eos=True)
            b = eager.run(prompts, work, max_new_tokens=5, ignore_eos=True)
            same(a, b, 1e-5)


@pytest.mark.engine
@pytest.mark.parametrize("family", ["bloom", "gemma3", "mistral"])
def test_families_whose_masks_are_not_llamas(family: str, tmp_path: Path) -> None:
    """Position biases made from the mask, layers that slide and layers that do not, and none that does not slide; with
    prompts of unequal length and generations that go beyond the window."""
    folder = resolve(f"synthetic:{family}")
    if family == "mistral":
        shutil.copytree(folder, tmp_path / "mistral")
        folder = tmp_path / "mistral"
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    prompts = [list(range(5, 5 + n)) for n in (20, 3, 6)]

    def look(m: Any) -> None:
        m.save("first", m.resid_post[0])
        m.save("last", m.resid_post[-1])

    with (
        load(folder, engine="hf", backend="taps", taps=["resid_post.*"], dtype="float32", compiler="aot_eager") as rt,
        load(folder, engine="hf", dtype="float32") as eager,
    ):
        for some in (prompts, prompts[:1], prompts[2:]):
            a = rt.run(some, look, max_new_tokens=8, ignore_eos=True)
            same(a, eager.run(some, look, max_new_tokens=8, ignore_eos=True), 1e-5)


@pytest.mark.engine
def test_bystanders_are_bit_equal_and_an_undeclared_point_is_refused_at_the_users_line() -> None:
    with hf_taps() as rt:
        idle = rt.run(PROMPTS, lambda m: m.save("logits", m.logits), max_new_tokens=4, ignore_eos=True)
        edited = rt.run(PROMPTS, [edit, lambda m: m.save("logits", m.logits), edit], max_new_tokens=4, ignore_eos=True)
        assert torch.equal(idle[1].cat("logits"), edited[1].cat("logits"))
        assert not torch.equal(idle[0].cat("logits"), edited[0].cat("logits"))
        line = r"mlp_out\[1\], .*taps=\['resid_post.\*', 'z.1', 'q.0', 'mlp_out.1'\]\) has one \(at .*test_taps.py"
        with pytest.raises(NotDeclaredError, match=line):
            rt.run(PROMPTS, lambda m: m.mlp_out[1])
        with pytest.raises(NotDeclaredError, match=r"no point lies there .*backend='eager'"):
            rt.run(PROMPTS, lambda m: m.at("model.layers.1.mlp.act_fn").output)
        assert len(rt.engine.hooks) == 0
        rt.engine.model.share_memory()  # type: ignore[attr-defined]
        with pytest.raises(LoadError, match="has been moved"):
            rt.run(PROMPTS, lambda m: m.resid_post[1])


@pytest.mark.engine
def test_a_bystander_without_work_has_the_logits_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with hf_taps() as rt:
        engine: Any = rt.engine
        plain, seen = engine._forward, list[torch.Tensor]()

        def forward(*arguments: Any) -> Any:
            logits, cache = plain(*arguments)
            seen.append(logits[1].clone())
            return logits, cache

        monkeypatch.setattr(engine, "_forward", forward)
        idle = rt.run(PROMPTS, max_new_tokens=4, ignore_eos=True)
        alone = list(seen)
        seen.clear()
        edited = rt.run(PROMPTS, [edit, None, edit], max_new_tokens=4, ignore_eos=True)
        assert len(alone) == len(seen) == 4
        assert all(map(torch.equal, alone, seen))
        assert edited[1].token_ids == idle[1].token_ids


@pytest.mark.engine
def test_an_edit_of_an_input_that_others_read_is_refused_and_changes_nothing() -> None:
    """On the eager backend such an input is the module's own; inside a graph the residual stream would change as well,
    without a word."""

    def norms(m: Any) -> None:
        m.at("model.layers.1.post_attention_layernorm").input[:] = 0

    with hf_taps(declared=("resid_mid.1", "z.1")) as rt:
        plain = rt.run(PROMPTS, max_new_tokens=3, ignore_eos=True)
        with pytest.raises(WriteError, match=r"one of resid_mid\[1\], .*write m.resid_mid\[1\] .*step 0\)") as caught:
            rt.run(PROMPTS, [norms, None, None], max_new_tokens=3, ignore_eos=True)
        assert [o.token_ids for o in caught.value.outputs[1:]] == [o.token_ids for o in plain[1:]]  # type: ignore[attr-defined]

        def heads(m: Any) -> None:
            m.at("model.layers.1.self_attn.o_proj").input[:, :32] = 0
            m.save("z", m.z[1])

        out = rt.run(PROMPTS[0], heads, max_new_tokens=2, ignore_eos=True)[0]
        assert not out.cat("z")[:, 0].any(), "an input that is read by its module alone may be edited by its path"
        assert out.cat("z")[:, 1].any()


@pytest.mark.engine
def test_a_closed_engine_keeps_no_model() -> None:
    rt = hf_taps()
    rt.run(PROMPTS, edit, max_new_tokens=2, ignore_eos=True)
    engine: Any = rt.engine
    held = weakref.ref(next(engine.model.parameters()))
    caches = [weakref.ref(cache) for cache, _ in engine._caches.values()]
    assert caches
    rt.close()
    gc.collect()
    assert held() is None
    assert [cache() for cache in caches] == [None] * len(caches)


@pytest.mark.engine
def test_swapping_interventions_recompiles_nothing() -> None:
    from torch._dynamo.utils import counters

    with hf_taps() as rt:
        for _ in range(2):
            rt.run(PROMPTS[:1], edit, max_new_tokens=4, ignore_eos=True)
        graphs = counters["stats"]["unique_graphs"]
        for i in range(10):
            rt.run(PROMPTS[:1], lambda m, i=i: m.save("x", m.resid_post[i % 2]), max_new_tokens=4, ignore_eos=True)
        assert counters["stats"]["unique_graphs"] == graphs


# ---- the traps, each caught by the self-test


def _boot_broken(monkeypatch: pytest.MonkeyPatch, break_it: Any) -> Runtime:
    """A tapped engine without its self-test, with something wrong in it."""
    monkeypatch.setattr(boot, "check_taps", break_it)
    return hf_taps()


@pytest.mark.engine
def test_hooks_that_come_after_the_first_compiled_call_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    inserted: list[Any] = []
    monkeypatch.setattr(taps, "_insert", lambda *arguments: inserted.append(arguments))
    rt = _boot_broken(monkeypatch, lambda rt: None)
    rt.run(PROMPTS[:1], max_new_tokens=2, ignore_eos=True)
    rt.run(PROMPTS[:1], max_new_tokens=2, ignore_eos=True)
    monkeypatch.undo()
    for arguments in inserted:
        taps._insert(*arguments)
    with pytest.raises(LoadError, match=r"did not fire: .*resid_post\[0\] \(0 of 2 passes\)"):
        check_taps(rt)


@pytest.mark.engine
def test_one_dead_tap_among_live_ones_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = taps._insert
    monkeypatch.setattr(taps, "_insert", lambda model, loc, id: None if str(loc) == "z[1]" else whole(model, loc, id))
    rt = _boot_broken(monkeypatch, lambda rt: None)
    with pytest.raises(LoadError) as caught:
        check_taps(rt)
    assert "z[1] (0 of 2 passes)" in str(caught.value)
    assert "resid_post[0]" not in str(caught.value)


@pytest.mark.engine
def test_taps_that_are_dead_in_decode_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a full graph replayed over the taps does: the prompt is tapped, the decode steps are not."""
    rt = _boot_broken(monkeypatch, lambda rt: None)
    engine: Any = rt.engine
    tapped = engine._decode

    def replayed(**arguments: Any) -> Any:
        armed = dict(taps._ARMED)
        taps._ARMED.clear()
        try:
            return tapped(**arguments)
        finally:
            taps._ARMED.update(armed)

    engine._decode = replayed
    with pytest.raises(LoadError, match=r"\(1 of 2 passes\)"):
        check_taps(rt)


@pytest.mark.engine
def test_taps_whose_writes_are_lost_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the functional form of the operator does under inductor: reads are right, writes go nowhere."""
    honest = taps._call
    monkeypatch.setattr(taps, "_call", lambda callback, *parts: honest(callback, *(p.clone() for p in parts)))
    rt = _boot_broken(monkeypatch, lambda rt: None)
    with pytest.raises(LoadError, match="writes change nothing"):
        check_taps(rt)


@pytest.mark.parametrize(("rows", "when"), [(1, "decode"), (len(PROMPT), "the prompt")])
@pytest.mark.engine
def test_writes_that_are_lost_in_some_passes_only_are_caught(
    rows: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written into the prompt changes the logits of decode, so each has to be written by itself."""
    honest = taps._call

    def call(callback: Any, *parts: torch.Tensor) -> None:
        lost = parts[0].shape[-2] == rows
        honest(callback, *((p.clone() for p in parts) if lost else parts))

    monkeypatch.setattr(taps, "_call", call)
    rt = _boot_broken(monkeypatch, lambda rt: None)
    with pytest.raises(LoadError, match="writes change nothing"):
        check_taps(rt)


@pytest.mark.engine
def test_layers_that_share_the_code_of_one_with_other_taps_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are not guarded: without code of its own, a layer runs the taps of another layer's graph, or none."""
    monkeypatch.setattr(hf_taps_engine, "tapped_at", lambda layer: frozenset())
    rt = _boot_broken(monkeypatch, lambda rt: None)
    with pytest.raises(LoadError, match=r"did not (fire|run)"):
        check_taps(rt)


@pytest.mark.engine
def test_a_layer_is_compiled_once_for_all_that_are_alike() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    with hf_taps(declared=("resid_post.*", "z.*")) as rt:
        assert rt.engine.describe()["by_layer"]
        assert counters["stats"]["unique_graphs"] - before == 2  # prompts, and decode
        rt.run(PROMPTS[:1], edit_post, max_new_tokens=3, ignore_eos=True)
        assert counters["stats"]["unique_graphs"] - before == 2


def edit_post(m: Any) -> None:
    m.resid_post[1] *= 2


# ---- compiled vLLM


@pytest.fixture(scope="module")
def vllm_taps() -> Iterator[Runtime]:
    with load(resolve("synthetic:llama"), engine="vllm", backend="taps", taps=everything(), dtype="float32") as rt:
        yield rt


def everything() -> list[str]:
    """Every point that can have a tap."""
    points = points_of(json.loads((resolve("synthetic:llama") / "config.json").read_text()), "vllm")

    def first(name: str) -> Location:
        return points.at(name, 0 if name in PER_LAYER else None)

    names = [n for n in points.names() if n not in ("logits", "sampled") and first(n).site.in_place]
    return [f"{n}.*" if n in PER_LAYER else n for n in names]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("as_function", [False, True], ids=["stated", "function"])
def test_every_point_of_compiled_vllm_equals_eager(vllm_taps: Runtime, eager: Runtime, as_function: bool) -> None:
    """At every layer, prompt and decode, alone and with seven neighbours."""
    named = everything()
    assert {"embed", "resid_pre.*", "q.*", "k.*", "v.*", "z.*", "mlp_act.*", "resid_post.*", "final_norm"} <= set(named)
    capture = Capture(*named, "logits")
    work = (lambda m: capture(m)) if as_function else capture
    prompts = [[k + 3, *range(100, 103 + 2 * k)] for k in range(8)]
    for some in (prompts[3:4], prompts):
        a = vllm_taps.run(some, work, max_new_tokens=5, ignore_eos=True)
        same(a, eager.run(some, work, max_new_tokens=5, ignore_eos=True), 2e-5)
        assert len(a[0].saves) == len(capture.places(vllm_taps.engine.points))
        assert all(o.cat("z.2").shape[0] == len(p) + 4 for o, p in zip(a, some, strict=True))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_compiled_vllm_equals_transformers(vllm_taps: Runtime, eager: Runtime) -> None:
    def more(m: Any) -> None:
        m.save("q", m.q[0])
        m.mlp_act[0] = m.mlp_act[0] * 2
        m.resid_post[0] += 0.5
        m.z[1][:, 3] = 0
        m.resid_mid[1][:, 7] = 3.0
        m.save("last", m.resid_post[-1])
        m.save("logits", m.logits)

    for prompts, work in ((PROMPTS[:1], more), (PROMPTS, more), (PROMPTS, [more, None, more])):
        a = vllm_taps.run(prompts, work, max_new_tokens=6, ignore_eos=True)
        b = eager.run(prompts, work, max_new_tokens=6, ignore_eos=True)
        same(a, b, 2e-5)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_compiled_vllm_keeps_neighbours_apart(vllm_taps: Runtime) -> None:
    def look(m: Any) -> None:
        m.save("last", m.resid_post[-1])

    prompts = [[k, *range(100, 103 + 2 * k)] for k in range(7)]
    idle = vllm_taps.run(prompts, look, max_new_tokens=4, ignore_eos=True)

    def steer(m: Any) -> None:
        m.resid_post[0] += 1.0
        look(m)

    edited = vllm_taps.run(
        prompts, [steer if k in (2, 5) else look for k in range(7)], max_new_tokens=4, ignore_eos=True
    )
    for k in range(7):
        assert idle[k].cat("last").shape[0] == len(prompts[k]) + 3
        assert torch.equal(idle[k].cat("last"), edited[k].cat("last")) == (k not in (2, 5)), k


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_compiled_vllm_is_compiled_and_plain_when_idle(vllm_taps: Runtime) -> None:
    from vllm.config import CompilationMode

    config = vllm_taps.engine.core.vllm_config.compilation_config  # type: ignore[attr-defined]
    assert config.mode != CompilationMode.NONE
    vllm_taps.run(PROMPTS, edit_nothing, max_new_tokens=2)
    assert not taps._ARMED


def edit_nothing(m: Any) -> None:
    m.resid_post[0]
