"""Passes of requests that decode together: stacked, cut for each of them, and joined when somebody asks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from adapters import stacked
from adapters.declared import Capture
from adapters.engines.wire import Kept
from adapters.errors import BadCaptureError
from adapters.live import Job, Live
from adapters.rows import Batch, Rows, Slab
from adapters.runtime import Output, Runtime
from adapters.saves import Joined, Run, Saves, held, whole
from adapters.stacked import PASSES, Stack
from tests.engines import by_hand, same_entries, tapped
from tests.test_recorded import Host

# Widths of several kinds, a name that lies where another does, heads, parts of a fused projection.
DECLARED = ["resid_post.*", "resid_pre.1", "z.1", "q.0", "k.1", "v.2", "mlp_act.1"]
EVERYTHING = Capture(*DECLARED)
PROMPTS = [[5, 6, 7, 8], [9], [11, 12, 13, 14, 15, 16, 17]]

pytestmark = pytest.mark.timeout(600)  # a compiled engine may take minutes to boot


compiled = tapped(DECLARED)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What stacks do, in order: "new", "add", "cut" with the passes that they held."""
    seen: list[Any] = []
    init, add, cut = Stack.__init__, Stack.add, Stack.cut

    def made(self: Stack, *args: Any) -> None:
        init(self, *args)
        seen.append("new")

    def added(self: Stack, *args: Any) -> None:
        add(self, *args)
        seen.append("add")

    def was_cut(self: Stack) -> None:
        seen.append(self._passes)
        cut(self)

    monkeypatch.setattr(Stack, "__init__", made)
    monkeypatch.setattr(Stack, "add", added)
    monkeypatch.setattr(Stack, "cut", was_cut)
    return seen


# ---- on compiled engines, against the same work as a function


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[1:2], PROMPTS])
def test_long_generations_are_what_a_function_reads(rt: Runtime, stacks: list[Any], prompts: list[list[int]]) -> None:
    """Longer than a stack, so that it is cut while its requests go on; a prompt of one token starts in one."""
    new = 2 * PASSES + 3
    found = rt.run(prompts, EVERYTHING, max_new_tokens=new, ignore_eos=True)
    assert stacks.count("add") >= new - 1
    assert [n for n in stacks if isinstance(n, int) and n] [:2] == [PASSES, PASSES]  # fmt: skip
    stacks.clear()
    same_entries(found, rt.run(prompts, by_hand(EVERYTHING), max_new_tokens=new, ignore_eos=True))
    assert "add" not in stacks
    for out, prompt in zip(found, prompts, strict=True):
        entries = out.saves["q.0"]
        assert [tuple(e.shape) for e in entries] == [(len(prompt), 4, 32)] + [(1, 4, 32)] * (new - 1)
        assert out.cat("mlp_act.1").shape[0] == len(prompt) + new - 1


def test_requests_that_leave_and_neighbours_that_interfere(rt: Runtime) -> None:
    """Every way from one kind of pass to another: nothing is lost and nothing out of order."""

    def until(step: int) -> Any:
        def leaves(m: Any) -> None:
            m.save("x", m.resid_post[0])
            if m.step == step:
                m.stop()

        return leaves

    prompts = [*PROMPTS, [3, 4, 5]]
    for fns in ([EVERYTHING, until(2), EVERYTHING, until(7)], [until(1), EVERYTHING, None, EVERYTHING]):
        outs = rt.run(prompts, fns, max_new_tokens=12, ignore_eos=True)
        plain = [by_hand(fn) if fn is EVERYTHING else fn for fn in fns]
        same_entries(outs, rt.run(prompts, plain, max_new_tokens=12, ignore_eos=True))


def test_after_a_run_nothing_of_it_is_held(rt: Runtime) -> None:
    (out,) = rt.run(PROMPTS[0], EVERYTHING, max_new_tokens=6, ignore_eos=True)
    entry = weakref.ref(out.saves["resid_post.1"][2])
    host: Any = getattr(rt.engine, "host", None) or rt.engine
    stack = host.il.recorder._stack
    assert stack._stacks == stack._by_request == stack._lives == []
    del out
    gc.collect()
    assert entry() is None


# ---- by hand


class Passes:
    """Passes of requests, of numbers that say whose they are: request * 1000 + position, plus the column."""

    def __init__(self, names: Sequence[str], capture: Capture | None = None) -> None:
        self.host, self.capture = Host(), capture or Capture("resid_post.0", "resid_post.1")
        self.lives: dict[str, Live] = {}
        self.steps: dict[str, int] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.lives[name] = self.host.il.live(name, [self.capture])
        self.steps[name] = 0

    def step(self, names: Sequence[str], tokens: Sequence[int] | None = None, padded: int = -1) -> None:
        """One pass of `names` in this order, each with its tokens."""
        tokens = tokens or [1] * len(names)
        starts, jobs, rows = [0], [], []
        for i, (name, n) in enumerate(zip(names, tokens, strict=True)):
            first = self.steps[name]
            jobs.append(Job(self.lives[name], i, first, n, first == 0))
            rows += [float(ord(name) * 1000 + first + k) for k in range(n)]
            starts.append(starts[-1] + n)
            self.steps[name] += n
        every = torch.tensor(rows + [-1.0] * max(0, padded - len(rows)), dtype=torch.float64)
        x = every[:, None] + torch.arange(8) / 100
        self.host.il.begin(Slab(starts, padded), jobs)
        kept = self.host.recorder.kept
        assert kept is not None
        for i, key in enumerate(kept):
            kept[key] = x + i / 10
        self.host.il.end()

    def close(self, name: str) -> None:
        live = self.lives.pop(name)
        live.close()
        assert live.error is None
        for i in range(2):
            entries = live.saves[f"resid_post.{i}"]
            said = torch.cat(entries)[:, 0].tolist()
            expected = torch.arange(self.steps[name]) + ord(name) * 1000 + i / 10
            assert said == pytest.approx(expected.tolist()), name
            assert all(e.untyped_storage().nbytes() == e.nbytes for e in entries)
            assert not any(e.is_inference() for e in entries)


@torch.inference_mode()  # as an engine's forward
@pytest.mark.parametrize("seed", range(12))
def test_whoever_comes_and_goes_everybody_has_all_of_their_rows_in_order(seed: int) -> None:
    """Joins, leaves, prompts amid others' decoding, another order in the batch, padding, one that pauses."""
    rng = random.Random(seed)
    names = iter("abcdefghijklmnopqrstuvwxyz")
    passes, here = Passes([]), list[str]()
    for _ in range(120):
        if not here or (len(here) < 5 and rng.random() < 0.15):
            here.append(next(names, "?"))
            if here[-1] == "?":
                break
            passes.join(here[-1])
        if rng.random() < 0.1:
            rng.shuffle(here)
        taking = [n for n in here if rng.random() < 0.95] or here
        tokens = [rng.choice([1, 1, 4]) if passes.steps[n] == 0 else 1 for n in taking]
        passes.step(taking, tokens, padded=sum(tokens) + 2 if rng.random() < 0.1 else -1)
        if len(here) > 1 and rng.random() < 0.1:
            gone = here.pop(rng.randrange(len(here)))
            passes.close(gone)
    with torch.inference_mode(False):
        for name in here:
            passes.close(name)


def test_one_stack_goes_on_while_its_requests_do(stacks: list[Any]) -> None:
    passes = Passes("ab")
    for _ in range(PASSES + 2):
        passes.step("ab")
    assert stacks.count("new") == 1
    assert [n for n in stacks if isinstance(n, int)] == [PASSES]
    passes.step("ba")  # who is where has changed
    assert stacks.count("new") == 2
    assert [n for n in stacks if isinstance(n, int)] == [PASSES, 2]
    passes.close("a")
    assert passes.lives["b"].stack is None
    passes.step("b")
    passes.close("b")


def test_a_stack_is_as_large_as_may_be_and_never_smaller_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_of_two = 2 * 2 * 8 * 8  # points, requests, width, bytes
    for room, most in ((1, 1), (pass_of_two * 3, 3), (1 << 26, PASSES)):
        monkeypatch.setattr(stacked, "BYTES", room)
        passes = Passes("ab")
        passes.step("ab")
        stack = passes.lives["a"].stack
        assert stack is not None
        assert [s.shape[0] for s, _ in stack._stacks] == [most]
        for _ in range(7):
            passes.step("ab")
        passes.close("a")
        passes.close("b")


def test_places_of_other_widths_and_dtypes_lie_in_stacks_of_their_own() -> None:
    host = Host()
    names = ["resid_post.0", "z.0", "resid_post.1", "z.1"]
    live = host.il.live("a", [Capture(*names)])
    for step in range(3):
        host.il.begin(Slab([0, 1]), [Job(live, 0, step, 1, step == 0)])
        assert host.recorder.kept is not None
        for i, name in enumerate(names):
            x = torch.full((1, 8), 10.0 * i + step, dtype=torch.float64 if name == "resid_post.1" else torch.float32)
            host.recorder.kept[host.points.parse(name).key] = x
        host.il.end()
    assert live.stack is not None
    assert [len(own) for _, own in live.stack._stacks] == [3, 1]
    live.close()
    assert list(live.saves) == [name for name, _ in Capture(*names).places(host.points)]
    for i, name in enumerate(names):
        assert whole(live.saves, name).flatten()[:: 8].tolist() == [10.0 * i, 10.0 * i + 1, 10.0 * i + 2]  # fmt: skip
    assert whole(live.saves, "resid_post.1").dtype == torch.float64
    assert whole(live.saves, "z.0").shape == (3, 2, 4), "by head"


@pytest.mark.parametrize(
    ("rows", "x", "expected"),
    [
        (Slab([0, 1, 2]), torch.arange(6.0).view(2, 3), [[0, 1, 2], [3, 4, 5]]),
        (Slab([0, 1, 2], 3), torch.arange(9.0).view(3, 3), [[0, 1, 2], [3, 4, 5]]),
        (Batch(2, 1, [0, 0]), torch.arange(6.0).view(2, 1, 3), [[0, 1, 2], [3, 4, 5]]),
        (Batch(2, 1, [0, 0]), torch.arange(6.0).view(2, 3), [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_every_requests_one_row(rows: Rows, x: torch.Tensor, expected: list[list[float]]) -> None:
    ones = rows.ones(x)
    assert ones.tolist() == expected
    assert ones.data_ptr() == x.data_ptr()
    assert all(torch.equal(ones[i : i + 1], rows.of(x, i)) for i in range(2))


def test_rows_that_are_not_one_a_request_are_refused_as_ever() -> None:
    passes = Passes("ab")
    passes.step("ab")
    jobs = [Job(live, i, 1, 1, False) for i, live in enumerate(passes.lives.values())]
    passes.host.il.begin(Slab([0, 1, 2]), jobs)
    assert passes.host.recorder.kept is not None
    for key in passes.host.recorder.kept:
        passes.host.recorder.kept[key] = torch.ones(7, 8)
    passes.host.il.end()
    for live in passes.lives.values():
        assert "(7, 8)" in str(live.error)
        live.close()
        assert [e.shape[0] for e in live.saves["resid_post.0"]] == [1], "what came before it is there"


def test_without_memory_for_its_own_rows_a_request_has_an_error_and_its_neighbour_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, asked = stacked._own, list[int]()

    def full(rows: torch.Tensor) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("out of memory")
        return honest(rows)

    monkeypatch.setattr(stacked, "_own", full)
    passes = Passes("ab")
    passes.step("ab")
    failed = passes.lives.pop("a")
    passes.close("b")
    failed.close()
    assert "out of memory" in str(failed.error)
    assert failed.saves == {}


def test_without_memory_to_join_a_request_is_over_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its engine goes on: closing it raises nothing."""

    def full(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    passes = Passes("a")
    passes.step("a")
    live = passes.lives["a"]
    monkeypatch.setattr(Run, "rows", full)
    live.close()
    assert "out of memory" in str(live.error)
    assert live.saves == {}


def test_a_stack_that_was_closed_takes_nothing_and_another_dtype_is_not_cast() -> None:
    passes = Passes("ab")
    passes.step("ab")
    stack = passes.lives["a"].stack
    assert stack is not None
    kept = {key: torch.zeros(2, 8, dtype=torch.float64) for key in passes.host.recorder._keys}
    assert stack.fits(kept)
    assert not stack.fits({key: x.float() for key, x in kept.items()})
    stack.close()
    assert not stack.fits(kept)


def test_what_was_read_is_checked_where_it_lies_joined() -> None:
    for value, why in ((0.0, "nothing but zeros"), (float("nan"), "NaN or infinity"), (2.0, "one constant")):
        host = Host()
        live = host.il.live("a", [Capture("resid_post.0")])
        for step in range(3):
            host.pass_of([live], [0, 1], step, {"resid_post.0": torch.full((1, 8), value)})
        live.close()
        assert isinstance(live.error, BadCaptureError)
        assert why in str(live.error)
        assert isinstance(held(live.saves, "resid_post.0"), Joined), "nothing was cut for it"


# ---- what is handed to the user


def lying(*lengths: int) -> Saves:
    """Saves whose entries lie joined, counted through."""
    return Saves({"x": Joined(torch.arange(sum(lengths) * 2.0).view(-1, 2), lengths), "n": [3]})


def test_entries_are_cut_when_they_are_asked_for_and_share_nothing() -> None:
    saves = lying(3, 1, 1)
    entries = saves["x"]
    assert [tuple(e.shape) for e in entries] == [(3, 2), (1, 2), (1, 2)]
    assert saves["x"] is entries, "the same list from now on"
    assert all(e.untyped_storage().nbytes() == e.nbytes for e in entries)
    entries[1].zero_()
    entries.append(torch.ones(1, 2))
    assert whole(saves, "x")[3:].tolist() == [[0, 0], [8, 9], [1, 1]], "what was changed in the list is what is joined"


def test_the_whole_is_the_askers_own() -> None:
    saves = lying(2, 1)
    whole(saves, "x").zero_()
    assert whole(saves, "x").flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert saves["x"][1].tolist() == [[4, 5]]
    out = Output("r", (5,), (7,), lying(2, 1))
    assert out.cat("x").shape == (3, 2)
    assert repr(out) == "Output(r: 1 + 1 tokens, None, saved x x2, n x1)"
    assert isinstance(held(out.saves, "x"), Joined), "neither has cut it"
    with pytest.raises(KeyError, match="nothing was saved under 'y'; saved: n, x"):
        out.cat("y")


def test_saves_are_a_mapping_like_any_other() -> None:
    saves = lying(1, 1)
    assert list(saves) == ["x", "n"]
    assert len(saves) == 2
    assert "x" in saves
    assert "y" not in saves
    assert isinstance(held(saves, "x"), Joined), "looking at names cuts nothing"
    assert saves.get("y") is None
    with pytest.raises(KeyError):
        saves["y"]
    saves["y"] = [1]
    del saves["n"]
    assert [(name, len(entries)) for name, entries in saves.items()] == [("x", 2), ("y", 1)]
    assert {**saves}.keys() == dict(saves).keys() == {"x", "y"}
    assert repr(lying(1)) == repr({"x": [torch.tensor([[0.0, 1.0]])], "n": [3]})


def test_saves_travel_as_a_plain_dict_of_small_tensors() -> None:
    for again in (pickle.loads(pickle.dumps(lying(2, 1))), copy.deepcopy(lying(2, 1))):
        assert type(again) is dict
        assert [e.tolist() for e in again["x"]] == [[[0, 1], [2, 3]], [[4, 5]]]
    many = Saves({"x": Joined(torch.zeros(1000, 50), [1] * 1000)})
    buffer = io.BytesIO()
    torch.save(many["x"][0], buffer)
    assert buffer.tell() < 5000, "an entry does not drag the others with it"


def test_only_runs_are_joined() -> None:
    plain = {"x": [torch.ones(2, 2), torch.ones(1, 2)], "n": [1, "a"]}
    assert Saves.of(plain) is plain
    run = Run(torch.arange(4.0).view(2, 2), lambda rows: rows * 10)
    mixed = Saves.of({"x": [torch.ones(2, 2), run, torch.ones(1, 2)], "n": [1]})
    assert held(mixed, "n") == [1]
    assert [e.tolist() for e in mixed["x"]] == [[[1, 1]] * 2, [[0, 10]], [[20, 30]], [[1, 1]]]


def test_what_lies_joined_goes_over_the_wire_as_it_lies() -> None:
    kept = Kept(lying(3, 1), None, False, 2)
    there = pickle.loads(pickle.dumps(kept.packed()))
    again = there.unpacked().saves
    assert isinstance(held(again, "x"), Joined)
    assert [tuple(e.shape) for e in again["x"]] == [(3, 2), (1, 2)]
    assert again["n"] == [3]
