"""Stated work: `Capture` and `Add` as ordinary interventions, and the same bits from inside a compiled graph."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tapgrid
from adapters import boot, taps
from adapters.boot import load
from adapters.buffers import Buffers, Part, rounded, shape_of
from adapters.declared import Add, Capture, every, one_by_one
from adapters.errors import LoadError, NotDeclaredError, PointRefusedError, UnknownPointError, WriteError
from adapters.live import Live
from adapters.points import FAMILIES, Dimensions, Points
from adapters.runtime import Runtime
from adapters.sampling import keep_logprobs
from adapters.selftest import check_buffers
from harness.models import resolve
from tests.engines import armed, assert_clean, booted, by_hand  # noqa: F401  # autouse

DIMS = Dimensions(layers=3, d_model=8, heads=2, kv_heads=1, head_dim=4, d_mlp=16, vocab=50)
POINTS = Points(FAMILIES["llama"], "vllm", DIMS)
PROMPTS = [[k, *range(100, 103 + 2 * k)] for k in range(7)]


# ---- as ordinary interventions


def test_the_public_face() -> None:
    assert tapgrid.Capture is Capture
    assert tapgrid.Add is Add
    assert Capture("z.1") == Capture("z.1") != Capture("z.2")


def test_a_capture_saves_under_its_points_names_in_the_models_order() -> None:
    rt = booted("hf")
    out = rt.run(PROMPTS[:2], Capture("logits", "resid_post.*", "z.1", "embed"), max_new_tokens=3, ignore_eos=True)

    def by_hand(m: Any) -> None:
        m.save("embed", m.embed)
        m.save("resid_post.0", m.resid_post[0])
        m.save("z.1", m.z[1])
        m.save("resid_post.1", m.resid_post[1])
        m.save("resid_post.2", m.resid_post[2])
        m.save("logits", m.logits)

    for got, wanted in zip(out, rt.run(PROMPTS[:2], by_hand, max_new_tokens=3, ignore_eos=True), strict=True):
        assert list(got.saves) == list(wanted.saves)
        assert all(torch.equal(got.cat(n), wanted.cat(n)) for n in wanted.saves)
    assert_clean(rt)


def test_what_comes_after_sees_what_came_before_in_whatever_order_the_points_are() -> None:
    rt = booted("hf")
    add, watch = Add("resid_post.1", torch.ones(128), 2.0), Capture("resid_post.*")
    after = rt.run(PROMPTS[2], add.then(watch), max_new_tokens=1)[0]
    before = rt.run(PROMPTS[2], watch.then(add), max_new_tokens=1)[0]
    assert torch.equal(after.cat("resid_post.1"), before.cat("resid_post.1") + 2.0)
    assert torch.equal(after.cat("resid_post.0"), before.cat("resid_post.0"))
    assert torch.equal(after.cat("resid_post.2"), before.cat("resid_post.2"))
    assert one_by_one(add.then(watch).then(add)) == (add, watch, add)


def test_an_addition_is_scaled_and_reaches_every_token() -> None:
    rt = booted("hf")
    v = torch.linspace(-1, 1, 128)
    plain = rt.run(PROMPTS[3], Capture("resid_post.1"), max_new_tokens=3, ignore_eos=True)[0]
    rt.install(Add("resid_post.0", v, -2.5), name="steer")
    rt.install(Capture("resid_post.0"), name="watch")
    steered = rt.run(PROMPTS[3], by_hand(Capture("resid_post.1")), max_new_tokens=3, ignore_eos=True)[0]
    rt.remove("steer")
    before = rt.run(PROMPTS[3], max_new_tokens=3, ignore_eos=True)[0]
    rt.remove("watch")
    rows = len(PROMPTS[3])  # what comes after depends on the tokens that were drawn
    assert torch.equal(steered.cat("resid_post.0")[:rows], before.cat("resid_post.0")[:rows] + v * -2.5)
    assert not torch.equal(steered.cat("resid_post.1")[:rows], plain.cat("resid_post.1")[:rows])
    assert_clean(rt)


def test_the_vector_is_copied_when_it_is_stated() -> None:
    v = torch.ones(8)
    add = Add("resid_post.0", v)
    v.zero_()
    loc = POINTS.at("resid_post", 0)
    assert add.amount(loc, torch.Size((8,)), torch.zeros(1, dtype=torch.bfloat16)).tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Capture(), TypeError, "names of points"),
        (lambda: Capture(["z.1"]), TypeError, "names of points"),  # type: ignore[arg-type]
        (lambda: Add("z.1", [1.0]), TypeError, "tensor of floats"),  # type: ignore[arg-type]
        (lambda: Add("z.1", torch.tensor([1])), TypeError, "tensor of floats"),
        (lambda: every("logits.*", POINTS), UnknownPointError, "has no layers"),
        (lambda: every("resid_pots.1", POINTS), UnknownPointError, "resid_post"),
        (lambda: every("z.3", POINTS), IndexError, "layers 0 to 2"),
    ],
)
def test_what_is_refused_when_it_is_stated(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_vector_of_another_shape_is_an_error_of_its_request_only() -> None:
    rt = booted("hf")
    out = rt.run(PROMPTS[:2], [Add("z.1", torch.ones(128)), Capture("z.1")], max_new_tokens=2, on_error="return")
    assert isinstance(out[0].error, WriteError)
    assert "z[1] has shape (4, 32), the vector (128,)" in str(out[0].error)
    assert out[1].error is None
    assert_clean(rt)


def test_buffers_are_for_compiled_vllm() -> None:
    with pytest.raises(LoadError, match="needs engine='vllm' with backend='taps'"):
        load(resolve("synthetic:llama"), engine="hf", backend="taps", taps=["z.1"], buffers=["z.1"])
    with pytest.raises(LoadError, match=r"buffers is a list of points: buffers=\['z.1'\]"):
        load(resolve("synthetic:llama"), engine="vllm", backend="taps", taps=["z.1"], buffers="z.1")


# ---- the graph's part, on a model of this file's own with vLLM's module paths


class Layer(torch.nn.Module):
    """A layer that keeps the residual apart, as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.o_proj = torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden + residual
        project: Any = self.self_attn.o_proj
        return project(torch.tanh(residual) * 3), residual


class Toy(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, residual = x, x * 0.5
        layers: Any = self.model.layers
        for layer in layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


def toy(dtype: torch.dtype, *names: str, requests: int = 2) -> tuple[Toy, Buffers]:
    model = Toy(dtype)
    return model, Buffers(model, names, POINTS, names, tokens=16, requests=requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_graph_gives_the_bits_of_python_at_the_taps(dtype: torch.dtype, compiler: str) -> None:
    """One compiled model with both: additions and captures by the graph, and by functions that its taps call."""
    names = ["resid_post.*", "z.1"]
    model = Toy(dtype)
    tapped = taps.Taps(model, names, POINTS)
    buffers = Buffers(model, names, POINTS, tokens=16, requests=2)
    run = torch.compile(model, backend=compiler, dynamic=True, fullgraph=True)
    g = torch.Generator().manual_seed(1)
    v, w = (torch.randn(8, generator=g).to(dtype) for _ in range(2))

    def calls(edited: int, found: dict[str, torch.Tensor]) -> None:
        """Python at every tap: adds to the first `edited` rows, then keeps what is there."""
        for loc in tapped_at:

            def post(hidden: torch.Tensor, residual: torch.Tensor, name: str) -> None:
                if name == "resid_post.0" and edited:
                    residual[:edited] = (hidden[:edited] + residual[:edited]) + v * 3.0
                    hidden[:edited] = 0
                found[name] = hidden + residual

            def z(x: torch.Tensor, name: str) -> None:
                x[:edited] += w
                found[name] = x.clone()

            name = f"{loc.name}.{loc.layer}"
            taps._ARMED[int(tapped._ids[loc.key])] = functools.partial(post if "post" in name else z, name=name)

    tapped_at = taps.declared(names, POINTS)
    adds = Add("resid_post.0", v, 3.0).then(Add("z.1", w.view(2, 4)))
    watch = Capture(*names)
    for rows in (9, 3, 2):
        x = torch.randn(rows, 8, generator=g).to(dtype)
        kept = []
        for work, edited in ((adds.then(watch), 0), (watch, rows - 1)):
            one, two = Live("a"), Live("b")
            parts = [
                Part(one, buffers.split(one_by_one(work))[1], 0, rows - 1, 0),
                Part(two, buffers.split([watch])[1], rows - 1, rows, 0),
            ]
            with torch.no_grad():
                seen: dict[str, torch.Tensor] = {}
                calls(edited, seen)
                buffers.begin(parts)
                out = run(x).clone()
                buffers.end(parts)
            kept.append((out, {n: torch.cat([one.saves[n][0], two.saves[n][0]]).view(rows, -1) for n in one.saves}))
        (graph, by_graph), (hand, by_hand) = kept
        assert torch.equal(graph, hand)
        assert list(by_graph) == ["resid_post.0", "z.1", "resid_post.1", "resid_post.2"]
        for name in by_graph:
            assert torch.equal(by_graph[name], by_hand[name]), name
            assert torch.equal(by_hand[name], seen[name]), name
    tapped._armed.update(tapped._ids)
    tapped.clear()


def test_rows_that_nobody_owns_are_left_alone_and_the_next_pass_knows_nothing_of_the_last() -> None:
    model, buffers = toy(torch.float32, "resid_post.1")
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    plain = model(x)
    planned = buffers.split([Add("resid_post.1", torch.ones(8), 9.0)])[1]
    buffers.begin([Part(Live("a"), planned, 1, 3, 0)])
    changed = (model(x) != plain).any(1).tolist()
    buffers.begin(())
    assert changed == [False, True, True, False, False, False]
    assert torch.equal(model(x), plain)


def test_more_additions_than_slots_take_turns() -> None:
    model, buffers = toy(torch.float32, "resid_post.2", requests=2)
    x = torch.zeros(2, 8)
    plain = model(x)
    planned = [buffers.split([Add("resid_post.2", torch.full((8,), float(n)))])[1] for n in range(1, 6)]
    for a, b in ((0, 1), (2, 3), (4, 0), (0, 4), (1, 1)):
        buffers.begin([Part(Live("a"), planned[a], 0, 1, 0), Part(Live("b"), planned[b], 1, 2, 0)])
        moved = (model(x) - plain).mean(1)
        assert torch.allclose(moved, torch.tensor([a + 1.0, b + 1.0]), atol=1e-5), (a, b)


def test_the_graph_writes_the_rows_of_a_pass_and_no_more() -> None:
    """A whole buffer copied at every pass made a SmolLM2 step fourteen times as slow, and no value was wrong."""

    def cost(tokens: int) -> float:
        model = Toy(torch.float32)
        Buffers(model, ["resid_post.*"], POINTS, tokens=tokens, requests=2)
        run = torch.compile(model, dynamic=True, fullgraph=True)
        spent = []
        with torch.no_grad():
            for _ in range(8):
                start = time.process_time()
                run(torch.randn(3, 8))
                spent.append(time.process_time() - start)
        return min(spent)

    # 96 MB are copied in 10 ms and more; a pass of three rows takes a tenth of one.
    assert cost(1 << 20) < 5 * cost(64) + 2e-3


def test_positions_that_are_computed_again_are_handed_out_once() -> None:
    model, buffers = toy(torch.float32, "resid_post.0")
    live, planned = Live("a"), buffers.split([Capture("resid_post.0")])[1]
    for first, rows in ((0, 4), (4, 1), (0, 5), (0, 7)):
        part = Part(live, planned, 0, rows, first)
        buffers.begin([part])
        model(torch.randn(rows, 8))
        buffers.end([part])
    assert [len(kept) for kept in live.saves["resid_post.0"]] == [4, 1, 2]


def test_a_request_that_has_ended_adds_nothing_more() -> None:
    model, buffers = toy(torch.float32, "resid_post.0")
    live, x = Live("a", stopped=True), torch.randn(2, 8)
    plain = model(x)
    buffers.begin([Part(live, buffers.split([Add("resid_post.0", torch.ones(8))])[1], 0, 2, 0)])
    assert torch.equal(model(x), plain)


def look(m: Any) -> None:
    """Some Python."""


A0, A1, C0, C1 = (
    Add("resid_post.0", torch.ones(8)),
    Add("resid_post.1", torch.ones(8)),
    *map(Capture, ("resid_post.0", "resid_post.1")),
)
FAR = Capture("resid_post.2", "resid_post.0")


class Rows(Capture):
    """A subclass does what it says itself."""

    def __call__(self, m: Any) -> None:
        m.save("first", m.resid_post[0][:1])


OWN = Rows("resid_post.0")


@pytest.mark.parametrize(
    ("fns", "left", "adds", "captures"),
    [
        ((A0, C0), (), [A0], ["resid_post.0"]),
        ((look, A0, C0), (look,), [A0], ["resid_post.0"]),
        ((A0, look, C0), (A0, look), [], ["resid_post.0"]),  # what comes before Python is Python
        ((C0, A0), (C0, A0), [], []),  # the graph adds before it captures
        ((A0, A0), (A0, A0), [], []),  # and adds once
        ((C0, A1), (), [A1], ["resid_post.0"]),
        ((A0, A1, C0, C1), (), [A0, A1], ["resid_post.0", "resid_post.1"]),
        ((FAR,), (Capture("resid_post.2"),), [], ["resid_post.0"]),  # no buffer at layer 2
        ((Capture("logits"),), (Capture("logits"),), [], []),
        ((A0, C0, keep_logprobs), (keep_logprobs,), [A0], ["resid_post.0"]),  # it reads none of these points
        ((A0, look, C0, keep_logprobs), (A0, look, keep_logprobs), [], ["resid_post.0"]),
        ((OWN,), (OWN,), [], []),
        ((A1, OWN, C1), (A1, OWN), [], ["resid_post.1"]),
        ((), (), [], []),
    ],
)
def test_what_the_graph_takes_and_what_is_left_to_python(
    fns: tuple[Any, ...], left: tuple[Any, ...], adds: list[Add], captures: list[str]
) -> None:
    _, buffers = toy(torch.float32, "resid_post.0", "resid_post.1")
    got, planned = buffers.split(fns)
    assert got == left
    assert list(planned.adds.values()) == adds
    assert [name for name, _, _ in planned.captures] == captures


@pytest.mark.parametrize(
    ("fns", "left", "adds", "captures"),
    [
        ((A0, look), (look,), [A0], []),
        ((A0, C0, look), (look,), [A0], ["resid_post.0"]),
        ((FAR, look), (Capture("resid_post.2"), look), [], ["resid_post.0"]),
        ((A0, A1, look), (A1, look), [A0], []),  # at layer 1 there is a tap, too
        ((A0, look, A0), (A0, look, A0), [], []),
    ],
)
def test_where_no_function_can_be_the_graph_does_what_is_stated_before_one(
    fns: tuple[Any, ...], left: tuple[Any, ...], adds: list[Add], captures: list[str]
) -> None:
    both = ["resid_post.0", "resid_post.1"]
    buffers = Buffers(Toy(torch.float32), both, POINTS, ["resid_post.1"], tokens=16, requests=2)
    got, planned = buffers.split(fns)
    assert got == left
    assert list(planned.adds.values()) == adds
    assert [name for name, _, _ in planned.captures] == captures


def test_a_wrong_vector_is_found_before_anything_runs() -> None:
    _, buffers = toy(torch.float32, "resid_post.0")
    with pytest.raises(WriteError, match=r"shape \(8,\), the vector \(9,\)"):
        buffers.split([Add("resid_post.0", torch.ones(9))])


@pytest.mark.parametrize("name", ["q.0", "k.1"])
def test_a_part_of_a_fused_tensor_has_no_buffer(name: str) -> None:
    with pytest.raises(PointRefusedError, match=r"taps=\[...\]"):
        toy(torch.float32, name)


@pytest.mark.parametrize(("name", "shape"), [("z.1", (2, 4)), ("resid_post.1", (8,)), ("mlp_act.0", (16,))])
def test_the_shape_of_a_row(name: str, shape: tuple[int, ...]) -> None:
    assert shape_of(POINTS.parse(name), DIMS) == shape


def test_rounding_is_torchs_own() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(3))
    x = bits.to(torch.int32).view(torch.float32)
    halves = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, float("inf"), -float("inf"), 3.4e38])
    for values in (x, halves):
        got, wanted = rounded(values, torch.bfloat16), values.bfloat16().float()
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(0), wanted.nan_to_num(0))


# ---- in compiled vLLM


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    declared = ["resid_post.*", "z.1"]
    with load(
        resolve("synthetic:llama"), engine="vllm", backend="taps", taps=declared, buffers=declared, dtype="bfloat16"
    ) as runtime:
        yield runtime


def assert_idle(rt: Runtime) -> None:
    """Nothing of a run is left: no tap is armed, no row belongs to anybody."""
    host: Any = rt.engine.host  # type: ignore[attr-defined]
    assert not host.live
    assert not host.planned
    assert not host.ended
    assert not taps._ARMED
    assert not host.buffers.slots.any()


def equal(a: Any, b: Any) -> bool:
    return a.token_ids == b.token_ids and all(torch.equal(a.cat(n), b.cat(n)) for n in {**a.saves, **b.saves})


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[5:6], PROMPTS], ids=["short", "long", "neighbours"])
def test_the_graph_equals_python_bit_for_bit(rt: Runtime, prompts: list[list[int]]) -> None:
    g = torch.Generator().manual_seed(0)
    edits = Add("resid_post.0", torch.randn(128, generator=g), 0.5), Add("z.1", torch.randn(4, 32, generator=g))
    watch = Capture("resid_post.*", "z.1", "logits")

    def run(work: Any, *installed: Any) -> list[Any]:
        for i, fn in enumerate(installed):
            rt.install(fn, name=str(i))
        try:
            return rt.run(prompts, work, max_new_tokens=6, ignore_eos=True)
        finally:
            for i in range(len(installed)):
                rt.remove(str(i))

    by_python = [by_hand(edit) for edit in edits]
    graph, hand = run(watch, *edits), run(by_hand(watch), *by_python)
    assert all(map(equal, graph, run(edits[0].then(edits[1], watch))))
    idle, plain = run(watch), run(by_hand(watch))
    assert all(map(equal, graph, hand))
    assert all(map(equal, idle, plain))
    assert not any(map(equal, graph, idle))
    both = edits[0].then(edits[1], watch)
    mixed = run([watch if k % 3 else both for k in range(len(prompts))])
    assert [equal(m, i) for m, i in zip(mixed, idle, strict=True)] == [bool(k % 3) for k in range(len(prompts))]
    assert_idle(rt)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_graph_runs_no_python_in_a_pass(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = rt.engine.host  # type: ignore[attr-defined]
    busy: list[bool] = []
    plain = host._forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        busy.append(host.busy())
        assert len(host.hooks) == 0
        return plain(*args, **kwargs)

    monkeypatch.setattr(host, "_forward", forward)
    rt.install(Add("resid_post.1", torch.ones(128)), name="steer")
    out = rt.run(PROMPTS, Capture("resid_post.*"), max_new_tokens=4, ignore_eos=True)
    rt.remove("steer")
    assert busy
    assert not any(busy)
    busy.clear()
    rt.run(PROMPTS[:3], [lambda m: m.stop(), None, Capture("resid_post.1")], max_new_tokens=4, ignore_eos=True)
    assert busy == [True, False, False, False], "a request that has ended keeps no graph from running"
    assert [o.cat("resid_post.2").shape for o in out] == [(len(p) + 3, 128) for p in PROMPTS]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_swapping_stated_work_recompiles_nothing(rt: Runtime) -> None:
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    def compiled() -> tuple[int, int, int]:
        c = compilation_counter
        return counters["stats"]["unique_graphs"], c.num_backend_compilations, c.num_inductor_compiles

    rt.run(PROMPTS[:3], Capture("resid_post.0"), max_new_tokens=2, ignore_eos=True)
    before = compiled()
    for i in range(10):
        point = f"resid_post.{i % 3}"
        work: list[Any] = [
            Capture(point),
            Add(point, torch.full((128,), float(i))),
            lambda m, i=i: m.save("x", m.resid_post[i % 3] * i),  # at a tap
        ]
        rt.run(PROMPTS[: 1 + i % 3], work[: 1 + i % 3], max_new_tokens=2, ignore_eos=True)
    assert compiled() == before


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_undeclared_point_and_a_wrong_vector_end_their_own_request(rt: Runtime) -> None:
    work: list[Any] = [lambda m: m.mlp_out[0], Add("z.1", torch.ones(7)), Capture("z.1")]
    out = rt.run(PROMPTS[:3], work, max_new_tokens=3, ignore_eos=True, on_error="return")
    assert isinstance(out[0].error, NotDeclaredError)
    line = "load(..., backend='taps', taps=['resid_post.*', 'z.1', 'mlp_out.0'])"
    assert line in str(out[0].error)
    assert isinstance(out[1].error, WriteError)
    assert out[2].cat("z.1").shape == (len(PROMPTS[2]) + 2, 4, 32)
    assert_idle(rt)
    ran: list[Any] = []
    for stated in (Capture("mlp_out.0"), Add("mlp_out.0", torch.ones(128))):
        with pytest.raises(NotDeclaredError, match=re.escape(line)):
            rt.run(PROMPTS[:2], [stated, ran.append], max_new_tokens=3, ignore_eos=True, on_error="return")
        with pytest.raises(NotDeclaredError, match=re.escape(line)):
            rt.install(stated, name="nowhere")
    assert not ran, "a neighbour ran before what could be seen was refused"


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_finite_checks_and_traces_still_see_stated_work(rt: Runtime) -> None:
    nan = Add("resid_post.0", torch.full((128,), float("nan")))
    out = rt.run(PROMPTS[0], nan, max_new_tokens=2, on_error="return", check_finite=True)[0]
    assert "NaN" in str(out.error)
    plain = rt.run(PROMPTS[0], Capture("resid_post.1"), max_new_tokens=1)[0]
    rt.install(Add("resid_post.1", torch.full((128,), 64.0)), name="steer")
    with rt.trace(PROMPTS[0]) as m:
        seen = m.resid_post[1].clone()
    rt.remove("steer")
    assert torch.equal(seen, plain.cat("resid_post.1") + 64.0)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_dead_buffers_are_caught_by_the_self_test(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a full graph without them, or an artifact of another engine, would leave."""
    host: Any = rt.engine.host  # type: ignore[attr-defined]
    monkeypatch.setattr(rt, "close", lambda: None)
    with monkeypatch.context() as swapped:
        swapped.setattr(host.buffers, "kept", [torch.zeros_like(k) for k in host.buffers.kept])
        with pytest.raises(LoadError, match=r"does not fill: resid_post.0"):
            check_buffers(rt)
    with monkeypatch.context() as swapped:
        swapped.setattr(host.buffers, "slots", torch.zeros_like(host.buffers.slots))
        with pytest.raises(LoadError, match="add nothing: "):
            check_buffers(rt)
    with monkeypatch.context() as swapped:
        # Rows that are handed out as if something had been added to them, of a model that goes on without it.
        whole = host.buffers._hand_out

        def pretend(part: Any) -> None:
            whole(part)
            for name in ("resid_post.0", "resid_post.1", "resid_post.2", "z.1"):
                part.live.saves[name][-1] += 1024.0 * bool(wanted)

        wanted: list[int] = []
        swapped.setattr(host.buffers, "begin", lambda parts: wanted.extend(1 for p in parts if p.planned.adds))
        swapped.setattr(host.buffers, "_hand_out", pretend)
        with pytest.raises(LoadError, match="add nothing: "):
            check_buffers(rt)
    check_buffers(rt)


def test_load_runs_the_self_test_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(boot._ENGINES_OF, ("vllm", "taps"), lambda path, dtype, taps, arguments: arguments)
    monkeypatch.setattr(boot, "check_taps", lambda rt: None)
    monkeypatch.setattr(boot, "check_buffers", lambda rt: asked.append(rt.engine))
    load(resolve("synthetic:llama"), engine="vllm", backend="taps", taps=[], buffers=["z.1"])
    assert asked == [{"buffers": ["z.1"]}]
