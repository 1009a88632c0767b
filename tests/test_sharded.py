"""Whole tensors from slices: the pure functions, the plan as it is printed, and two processes that share a small model.

What the two processes do is in tests/ranks.py; here it is compared with the same model in one process.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import adapters
from adapters.engines.module import WrappedModule
from adapters.engines.settings import environment
from adapters.engines.vllm_sharded import check_divides, merged
from adapters.engines.wire import Kept
from adapters.errors import LoadError, RanksDivergedError, ShardingError
from adapters.ours_sharded import TapgridSharded, TapgridShardedTaps
from adapters.ranks import digest, parted
from adapters.sharded import Layer, Sharding
from adapters.splits import Piece, Split, even, gathered, own
from adapters.work import BootRefused, Settings
from tests import ranks as two
from tests.ranks import DIM, EDITS, HEADS, MLP, PLAN, QKV, RANKS, outcomes

# ---- slices and wholes


def slices(whole: torch.Tensor, split: Split, ranks: int) -> list[torch.Tensor]:
    return [own(whole, split, r, ranks).contiguous() for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("widths", [[(4, 1)], [(2, 1), (3, 1)], [(4, 1), (1, 1), (2, 1)], [(4, 1), (3, 0), (3, 0)]])
def test_slices_of_a_whole_make_the_whole(ranks: int, axis: int, widths: list[tuple[int, int]]) -> None:
    split = Split("any", tuple(Piece(w, copies or ranks) for w, copies in widths), axis)
    size = sum(p.width * ranks // p.copies for p in split.pieces)
    shape = [5, 6]
    shape[axis] = size
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    parts = slices(whole, split, ranks)
    assert {p.shape[axis] for p in parts} == {sum(w for w, _ in widths)}
    assert torch.equal(gathered(parts, split), whole)


def test_fused_projections_come_back_in_the_order_of_one_rank() -> None:
    split = Split("q|k|v", (Piece(2), Piece(1), Piece(1)))
    parts = [torch.tensor([["q0", "q1", "k0", "v0"].index(x) for x in ("q0", "q1", "k0", "v0")]), torch.arange(4) + 10]
    assert gathered(parts, split).tolist() == [0, 1, 10, 11, 2, 12, 3, 13]
    assert torch.cat(parts).tolist() != gathered(parts, split).tolist()


def test_heads_that_several_ranks_hold_are_taken_once() -> None:
    """Four ranks, two key-value heads: ranks 0 and 1 hold the first, 2 and 3 the second."""
    split = Split("q|k", (Piece(1), Piece(2, copies=2)))
    whole = torch.tensor([0, 1, 2, 3, 40, 41, 50, 51])
    assert [p.tolist() for p in slices(whole, split, 4)] == [[0, 40, 41], [1, 40, 41], [2, 50, 51], [3, 50, 51]]
    assert gathered(slices(whole, split, 4), split).tolist() == whole.tolist()


def test_summands_are_added_and_given_to_the_first_rank() -> None:
    split = Split("sum")
    assert gathered([torch.ones(2), torch.full((2,), 4.0)], split).tolist() == [5.0, 5.0]
    assert [own(torch.full((2,), 9.0), split, r, 2).tolist() for r in (0, 1)] == [[9.0, 9.0], [0.0, 0.0]]
    assert str(split) == "sum: a summand on each rank"


def test_a_whole_of_one_part_is_a_tensor_of_its_own() -> None:
    part = torch.ones(3)
    for split in (Split("sum"), even("column", 3)):
        found = gathered([part], split)
        found += 1
        assert part.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_no_value_and_no_dtype_changes_on_the_way(dtype: torch.dtype) -> None:
    whole = torch.randn(3, 12).mul(100).to(dtype)
    back = gathered(slices(whole, QKV, 2), QKV)
    assert back.dtype == dtype
    assert torch.equal(back, whole)


@pytest.mark.parametrize(
    "parts", [[torch.zeros(2, 7)] * 2, [torch.zeros(2, 8), torch.zeros(2, 7)], [torch.zeros(())] * 2]
)
def test_a_slice_that_is_not_of_the_plans_size_is_refused(parts: list[torch.Tensor]) -> None:
    with pytest.raises(ShardingError, match=r"plan \(column: 8 of axis -1 on each rank\) says 8"):
        gathered(parts, even("column", 8))


def test_a_whole_that_is_not_of_the_plans_size_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"the whole has shape \(2, 15\).* says 16"):
        own(torch.zeros(2, 15), even("column", 8), 0, 2)


# ---- the plan


def test_the_plan_is_printed_with_layers_together() -> None:
    layers = {f"model.layers.{i}.mlp.down": Layer("Row", even("row", 4)) for i in (0, 1, 2, 4)}
    plan = Sharding(
        2, {"embed": Layer("replicated"), **layers, "head": Layer("Head", parameters={"weight": even("v", 9, 0)})}
    )
    assert repr(plan).splitlines() == [
        "2 ranks",
        "model.layers.0-2,4.mlp.down  Row: input row: 4 of axis -1 on each rank",
        "head                         Head: weight v: 9 of axis 0 on each rank",
    ]


def test_the_plan_says_what_is_whole_and_what_it_does_not_know() -> None:
    plan = Sharding(2, {"a": Layer("x", even("row", 4), unsaid=frozenset({"out", "packed"}))})
    assert plan.at(("a", "in")) == even("row", 4)
    assert plan.parameter("a.weight") is None
    for unknown in (("a", "out"), ("b", "in")):
        with pytest.raises(LookupError):
            plan.at(unknown)
    for path in ("a.packed", "b.weight"):
        with pytest.raises(LookupError):
            plan.parameter(path)


def test_attention_of_a_layer_that_says_nothing_of_its_heads_is_unknown() -> None:
    with pytest.raises(LookupError):
        Sharding(2, {"a": Layer("replicated")}).at(("a", "attention"))


# ---- trails


def test_digests_tell_values_apart_and_nothing_else() -> None:
    x = torch.randn(4, 6)
    assert digest(x) == digest(x.clone()) == digest(x.t().t()) == digest(x[:].requires_grad_())
    others = [x + 1e-6, x.t(), x[:3], x.bfloat16(), torch.zeros(0), [x, x], {"a": x[:1]}, (x,), 3, "3"]
    assert len({digest(o) for o in (x, *others)}) == len(others) + 1
    assert digest([1, x]) == digest((1, x.clone()))
    assert digest({"a": x}) == digest([x])
    assert digest(torch.tensor(2.0)) != digest(torch.tensor(3.0))
    assert digest(object()) == 0


def test_trails_part_at_the_first_difference() -> None:
    a = [("q[0]", 1), ("z[0]", 2), ("z[1]", 3)]
    assert parted([a, a, list(a)]) is None
    assert parted([]) is None
    assert parted([a, [*a[:1], ("z[0]", 9), ("z[1]", 9)]]) == "z[0]"
    assert parted([a, a[:2]]) == "z[1] (on some ranks only)"
    assert parted([a, a, [*a[:1], ("k[0]", 2)]]) == "z[0] (on some ranks only)"


# ---- what all ranks left


def kept(**given: Any) -> Kept:
    return Kept(**{"saves": {}, "error": None, "stopped": False, "tokens": 4} | given).packed()


def test_the_first_ranks_saves_come_home() -> None:
    home = merged([kept(saves={"x": [torch.ones(2, 3)]}), kept()])
    assert home is not None
    assert home.error is None
    assert home.saves["x"][0].tolist() == [[1.0] * 3] * 2
    assert merged([None, None]) is None


def test_a_users_error_comes_before_that_others_missed_them() -> None:
    found = merged([kept(error=RanksDivergedError("waited"), tokens=2), kept(error=KeyError("mine"), tokens=1)])
    assert found is not None
    assert isinstance(found.error, KeyError)
    assert found.tokens == 1
    assert not any("only" in note for note in found.error.__notes__)


def test_an_error_of_one_rank_says_so() -> None:
    found = merged([kept(), kept(error=KeyError("mine"))])
    assert found is not None
    assert isinstance(found.error, KeyError)
    assert "on rank 1 of 2 only" in found.error.__notes__


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"trail": (("z[1] written (step 3)", 8),)}, "z[1] written (step 3)"),
        ({"trail": ()}, "z[1] written (step 3) (on some ranks only)"),
        ({"trail": (("z[1] written (step 3)", 7),), "stopped": True}, "when it stopped"),
        ({"trail": (("z[1] written (step 3)", 7),), "tokens": 3}, "when it stopped"),
    ],
)
def test_trails_that_part_are_an_error_that_names_the_place(other: dict[str, Any], where: str) -> None:
    found = merged([kept(trail=(("z[1] written (step 3)", 7),)), kept(**other)])
    assert found is not None
    assert isinstance(found.error, RanksDivergedError)
    assert str(found.error).startswith(f"{where}: the ranks hold different values")


# ---- two ranks against one


def alone(fns: Any) -> list[Any]:
    return two.everything(WrappedModule(two.whole()), fns)


def same(got: list[Any], wanted: list[Any], exactly: bool = False) -> None:
    """Outputs and saves of every request, in order; none has failed."""
    for (out, saves, error), (wanted_out, wanted_saves, wanted_error) in zip(got, wanted, strict=True):
        assert (error, wanted_error) == (None, None)
        assert list(saves) == list(wanted_saves)
        pairs = [(out, wanted_out), *((a, b) for n in saves for a, b in zip(saves[n], wanted_saves[n], strict=True))]
        for a, b in pairs:
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=0 if exactly else 1e-5, atol=0 if exactly else 2e-6)


@pytest.mark.parametrize("rank", range(RANKS))
def test_reads_are_whole_on_every_rank(rank: int) -> None:
    got = outcomes()["reads"][rank]
    same(got, alone(two.read_and()))
    first = got[0][1]
    assert [x.shape[-1] for (x,) in first.values()] == [12, HEADS * DIM, 8, 8, 2 * MLP, MLP, 8, 8]


def test_both_ranks_see_the_same_bits() -> None:
    same(*outcomes()["reads"], exactly=True)
    for name in outcomes()["writes"][0]:
        same(*(found[name] for found in outcomes()["writes"]), exactly=True)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("place", list(EDITS))
def test_writes_do_what_they_do_on_one_rank(place: str, rank: int) -> None:
    got = outcomes()["writes"][rank][place]
    same(got, alone([two.nothing, two.read_and(place, EDITS[place]), two.nothing]))
    plain = outcomes()["reads"][rank]
    for i in (0, 2):
        assert torch.equal(got[i][0], plain[i][0])
    assert not torch.equal(got[1][0], plain[1][0])


@pytest.mark.parametrize("rank", range(RANKS))
def test_zeroed_up_makes_the_mlp_exactly_zero(rank: int) -> None:
    saves = outcomes()["writes"][rank]["gate_up"][1][1]
    assert not saves["down.in"][0].any()
    assert not saves["down"][0].any()
    assert saves["gate_up"][0][:, :MLP].all()


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_second_function_sees_the_write_of_the_first(rank: int) -> None:
    out, saves = outcomes()["two_functions"][rank]
    plain = outcomes()["reads"][rank][0]
    assert torch.equal(saves["seen"][0], plain[1]["qkv"][0] + 1.0)
    assert not torch.equal(out, plain[0])


@pytest.mark.parametrize("rank", range(RANKS))
def test_parameters_are_whole(rank: int) -> None:
    saves, error = outcomes()["weights"][rank]
    assert error is None
    for path, (held,) in saves.items():
        assert torch.equal(held, two.whole().get_parameter(path)), path


def test_a_slice_that_no_plan_explains_is_refused() -> None:
    for errors in outcomes()["an_unplanned_slice"]:
        assert len(errors) == len(two.INPUTS)
        for error in errors:
            assert error.startswith(
                "ShardingError: act (out) differs between ranks, and the engine's plan does not say"
            )
            assert "ranks.py:" in error


def test_a_slice_beside_a_point_is_left_out_and_never_handed_over() -> None:
    def fn(m: Any) -> None:
        x, _ = m.at("both").output
        m.save("x", x)
        x[:] = 1.0
        m.save("norm", m.at("norm").output)

    for refused, named in outcomes()["what_lies_beside"]:
        assert all(error.startswith("ShardingError: both (out) differs between ranks") for error in refused)
        same(named, alone(fn))


def test_one_gather_a_visit_and_none_where_all_ranks_hold_the_same() -> None:
    for counted in outcomes()["gathers"]:
        assert counted == {"qkv": (1, 1), "norm": (0, 0), "out": (0, 0)}


def test_an_error_ends_its_own_request_on_every_rank() -> None:
    for got in outcomes()["an_error_in_one"]:
        assert [error for _, _, error in got] == [None, "KeyError: 'mine'", None]
        plain = outcomes()["reads"][0]
        for i in (0, 2):
            same([got[i]], [plain[i]], exactly=True)


def test_ranks_at_different_places_are_an_error_and_the_engine_serves_on() -> None:
    plain = outcomes()["reads"][0]
    first, second = outcomes()["another_place_on_each_rank"]
    for errors, broken, after in (first, second):
        assert broken
        assert all(
            e.startswith("RanksDivergedError: ") and "no random numbers or clock of its own" in e for e in errors
        )
        same(after, plain, exactly=True)
    assert first[0][0].startswith("RanksDivergedError: qkv (out): rank 0 waited 5 s")
    assert second[0][0].startswith("RanksDivergedError: gate_up (out): rank 1 ")


def test_a_place_that_one_rank_alone_comes_to_is_an_error_there() -> None:
    (quiet, _, _), (errors, broken, after) = outcomes()["only_on_one_rank"]
    assert quiet == [None] * 3
    assert broken
    assert all(e.startswith("RanksDivergedError: qkv (out): rank 1 waited 5 s") for e in errors)
    same(after, outcomes()["reads"][0], exactly=True)


def test_trails_are_alike_unless_a_rank_draws_numbers_of_its_own() -> None:
    (written, read, noisy, noisy_read), others = outcomes()["trails"]
    assert [w for w, _ in written] == ["at('qkv').output written (step 0)", "at('norm').output written (step 0)"]
    assert [w for w, _ in read] == [
        x for w, _ in written for x in (w.replace("at('", "").replace("').output written", " (out)"), w)
    ]
    assert parted([written, others[0]]) is None
    assert parted([read, others[1]]) is None
    assert parted([noisy, others[2]]) == "at('norm').output written (step 0)"
    assert parted([noisy_read, others[3]]) == "at('norm').output written (step 0)"


def test_the_fixture_is_split_as_it_says() -> None:
    """Otherwise everything above would compare a whole model with itself."""
    model = two.part(1)
    assert model.qkv.weight.shape == ((HEADS // RANKS + 2) * DIM, two.D)
    assert PLAN.modules["qkv"].output == QKV
    assert not torch.equal(two.part(0).qkv.weight, model.qkv.weight)
    assert torch.equal(two.part(0).qkv.weight[-2 * DIM :], model.qkv.weight[-2 * DIM :])


# ---- what is refused before anything boots


def config(folder: Path, **own: Any) -> Path:
    sizes = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
             "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 100}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes | own))
    return folder


@pytest.mark.parametrize(
    ("own", "tp", "why"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "has 9 attention heads, which do not divide by tp=2"),
        ({}, 3, "has 8 attention heads, which do not divide by tp=3"),
        ({"intermediate_size": 97}, 2, "has 97 MLP neurons, which do not divide by tp=2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "has 3 key-value heads, and neither"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_number(
    own: dict[str, Any], tp: int, why: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=why):
        check_divides(config(tmp_path, **own), tp)


@pytest.mark.parametrize("column", [TapgridSharded, TapgridShardedTaps])
@pytest.mark.parametrize(
    ("ranks", "heads", "why"),
    [(1, 8, "say `tensor_parallel = 2` in the grid's"), (2, 9, "9 attention heads, which do not divide by tp=2")],
)
def test_a_column_that_cannot_be_split_refuses_as_a_whole(
    column: type[TapgridSharded], ranks: int, heads: int, why: str, tmp_path: Path
) -> None:
    """A refusal and not a lost cell: nothing is booted."""
    model = config(tmp_path, num_attention_heads=heads, num_key_value_heads=heads)
    with pytest.raises(BootRefused, match=why) as refused:
        column().boot(model, Settings(dtype="float32", tensor_parallel=ranks))
    assert refused.value.code == "model"


def test_an_engine_that_holds_no_head_twice_says_which_does(tmp_path: Path) -> None:
    check_divides(config(tmp_path, num_key_value_heads=1), 2)
    with pytest.raises(LoadError, match=r"has 1 key-value heads, .*engine='vllm' does"):
        check_divides(tmp_path, 2, copies=False)


@pytest.mark.parametrize(("kv", "tp"), [(4, 2), (4, 8), (1, 4), (8, 8), (2, 8)])
def test_key_value_heads_divide_or_are_held_by_several_ranks(kv: int, tp: int, tmp_path: Path) -> None:
    check_divides(config(tmp_path, num_key_value_heads=kv), tp)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"backend": "sharded"}, "tp=None with backend='sharded'"),
        ({"backend": "sharded", "tp": 1}, "tp=1 with backend='sharded'"),
        ({"backend": "eager", "tp": 2}, "tp=2 with backend='eager'"),
        ({"backend": "eager", "tensor_parallel_size": 2}, "backend='sharded', tp=..."),
    ],
)
def test_ranks_and_their_backend_go_together(given: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=why.replace("(", "\\(").replace("...", r"\.\.\.")):
        adapters.load(config(tmp_path), engine="vllm", **given)


def test_every_rank_is_bound_to_a_core_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 4, 5}, raising=False)
    for ranks, cores in ((1, "nobind"), (2, "4|5"), (4, "4|5|9|4")):
        assert environment(Settings(tensor_parallel=ranks))["VLLM_CPU_OMP_THREADS_BIND"] == cores


def test_an_engine_on_one_rank_has_no_plan_to_print() -> None:
    from adapters.runtime import Runtime

    with pytest.raises(LoadError, match="on one rank, so nothing is split"):
        Runtime(object()).sharding()  # type: ignore[arg-type]


def test_every_width_that_a_split_can_have_comes_back_in_order() -> None:
    """All small shapes of three pieces over up to four ranks, against a picture drawn by hand: whole, then copies."""
    for n, (a, b, c) in itertools.product((2, 4), itertools.product((1, 2), repeat=3)):
        for copies in (1, 2, n):
            split = Split("x", (Piece(a), Piece(b, copies), Piece(c)))
            whole = torch.arange(n * a + n // copies * b + n * c)
            for r in range(n):
                q, k = r * a, n * a + r // copies * b
                v = n * a + n // copies * b + r * c
                wanted = [*range(q, q + a), *range(k, k + b), *range(v, v + c)]
                assert own(whole, split, r, n).tolist() == wanted
