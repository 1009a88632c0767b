"""How vLLM's layers are read, on stand-ins of the same names: every kind of cut, and what is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.engines.vllm_sharding import sharding_of
from adapters.sharded import Sharding
from adapters.splits import Piece, Split, even, gathered, own


class LinearBase(torch.nn.Module):
    """A layer with a weight whose loader is its own, and the axis that the loader is told."""

    def __init__(self, tp_size: int = 2, **own: Any) -> None:
        super().__init__()
        self.tp_size, self.gather_output, self.reduce_results, self.input_is_parallel = tp_size, False, True, True
        for name, value in own.items():
            setattr(self, name, value)
        self.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.told(self.weight)

    def told(self, p: torch.nn.Parameter, **axes: int) -> None:
        for name, value in {"output_dim": 0, "input_dim": 1, "weight_loader": self.load, **axes}.items():
            setattr(p, name, value)

    def load(self) -> None:
        """What the loader calls."""


class ReplicatedLinear(LinearBase):
    pass


class ColumnParallelLinear(LinearBase):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class QKVWithSomethingElse(QKVParallelLinear):
    pass


class RowParallelLinear(LinearBase):
    pass


class VocabParallelEmbedding(LinearBase):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RoutedExperts(torch.nn.Module):
    def __init__(self, ep: int = 1, tp: int = 2, rank: int = 0, mine: list[int] | None = None) -> None:
        super().__init__()
        parallel = SimpleNamespace(use_ep=ep > 1, tp_size=tp, ep_rank=rank)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        self.w13_weight = torch.nn.Parameter(torch.zeros(4, 2 * 6, 8))
        self.w2_weight = torch.nn.Parameter(torch.zeros(4, 8, 6))
        self.local_num_experts = len(mine or ())
        self.expert_map = None if mine is None else torch.tensor([mine.index(i) if i in mine else -1 for i in range(8)])


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.head_size_v = 2, 16, 8


def plan(**modules: torch.nn.Module) -> Sharding:
    return sharding_of(torch.nn.ModuleDict(modules), 2)


def column(*widths: int, kind: type = ColumnParallelLinear, **more: Any) -> torch.nn.Module:
    module: torch.nn.Module = kind(output_partition_sizes=list(widths), output_size_per_partition=sum(widths), **more)
    return module


def test_columns() -> None:
    found = plan(a=column(8), b=column(6, 6, kind=MergedColumnParallelLinear), c=column(8, gather_output=True))
    assert found.at(("a", "out")) == Split("column", (Piece(8),))
    assert found.at(("b", "out")) == Split("merged columns", (Piece(6), Piece(6)))
    assert found.at(("c", "out")) is None
    for path, width in (("a", 8), ("c", 8)):
        assert found.at((path, "in")) is None
        assert found.parameter(f"{path}.weight") == Split("column", (Piece(width),), 0)
    assert found.parameter("b.weight") == Split("merged columns", (Piece(6), Piece(6)), 0)


@pytest.mark.parametrize("copies", [1, 2])
def test_fused_q_k_v_with_heads_that_several_ranks_hold(copies: int) -> None:
    found = plan(qkv=column(16, 4, 4, kind=QKVParallelLinear, num_kv_head_replicas=copies))
    split = found.at(("qkv", "out"))
    assert split == Split("q|k|v", (Piece(16), Piece(4, copies), Piece(4, copies)))
    assert split is not None
    whole = torch.arange(32 + 2 * 8 // copies)
    assert torch.equal(gathered([own(whole, split, r, 2) for r in (0, 1)], split), whole)


def test_a_subclass_with_pieces_of_its_own_is_not_guessed() -> None:
    found = plan(qkv=column(16, 4, 4, 8, kind=QKVWithSomethingElse, num_kv_head_replicas=1))
    assert "qkv" not in found.modules


def test_rows() -> None:
    found = plan(
        a=RowParallelLinear(input_size_per_partition=6),
        b=RowParallelLinear(input_size_per_partition=6, reduce_results=False),
        c=RowParallelLinear(input_size_per_partition=6, input_is_parallel=False),
    )
    assert found.at(("a", "in")) == found.at(("b", "in")) == even("row", 6)
    assert found.at(("c", "in")) is None
    assert found.at(("a", "out")) is None
    assert found.at(("b", "out")) == Split("sum")
    assert found.parameter("a.weight") == even("row", 6, 1)


def test_vocabulary_with_padding_and_added_words() -> None:
    shard = SimpleNamespace(num_org_elements_padded=64, num_added_elements_padded=0)
    more = SimpleNamespace(num_org_elements_padded=64, num_added_elements_padded=32)
    found = plan(a=VocabParallelEmbedding(shard_indices=shard), b=ParallelLMHead(shard_indices=more))
    assert found.parameter("a.weight") == Split("vocabulary", (Piece(64),), 0)
    assert found.parameter("b.weight") == Split("vocabulary", (Piece(64), Piece(32)), 0)
    assert found.at(("a", "out")) is None
    assert found.modules["b"].kind == "ParallelLMHead"


def test_experts_in_slices_and_whole_experts() -> None:
    found = plan(
        slices=RoutedExperts(),
        first=RoutedExperts(ep=2, mine=[0, 1, 2, 3]),
        second=RoutedExperts(ep=2, rank=1, mine=[4, 5, 6, 7]),
        in_turn=RoutedExperts(ep=2, mine=[0, 2, 4, 6]),
    )
    assert found.parameter("slices.w13_weight") == Split("gate|up", (Piece(6), Piece(6)), 1)
    assert found.parameter("slices.w2_weight") == even("row", 6, 2)
    for path in ("first", "second"):
        assert found.parameter(f"{path}.w13_weight") == found.parameter(f"{path}.w2_weight") == even("experts", 4, 0)
    assert "in_turn" not in found.modules
    for path in ("slices", "first"):
        for side in ("in", "out"):
            with pytest.raises(LookupError):
                found.at((path, side))


def test_experts_with_more_than_two_weights_are_not_guessed() -> None:
    experts = RoutedExperts()
    experts.w13_bias = torch.nn.Parameter(torch.zeros(4, 12))
    assert "e" not in plan(e=experts).modules


def test_attention_says_which_heads_it_has_and_nothing_of_its_inputs() -> None:
    found = plan(a=Attention())
    assert found.at(("a", "attention")) == even("heads", 2, 0)
    assert found.at(("a", "out")) == even("heads", 16)
    with pytest.raises(LookupError):
        found.at(("a", "in"))


def test_attention_outside_of_the_module_tree_is_found() -> None:
    model = torch.nn.ModuleDict({"a": column(8)})
    object.__setattr__(model, "attention_instances", {0: Attention(), 1: Attention()})
    found = sharding_of(model, 2)
    assert found.at(("attention_instances.1", "attention")) == even("heads", 2, 0)
    assert sorted(found.modules) == ["a", "attention_instances.0", "attention_instances.1"]


def test_a_layer_that_is_not_split_is_compared_and_not_believed() -> None:
    for module in (ReplicatedLinear(), column(8, tp_size=1), RowParallelLinear(tp_size=1, input_size_per_partition=8)):
        found = plan(a=module)
        assert not found.modules["a"].split
        assert found.parameter("a.weight") is None
        for side in ("in", "out"):
            with pytest.raises(LookupError):
                found.at(("a", side))


def test_a_weight_with_a_loader_of_its_own_is_not_guessed() -> None:
    """A mixer lays several things side by side in one column layer, and loads them itself."""

    def mixers(param: Any, loaded: Any) -> None:
        """Nobody calls it."""

    odd, tied, plain = column(8), column(8), column(8)
    odd.weight.weight_loader = mixers  # type: ignore[union-attr]
    tied.weight.weight_loader = plain.load  # type: ignore[union-attr,operator]
    found = plan(odd=odd, tied=tied, plain=plain)
    assert sorted(found.modules) == ["plain", "tied"]


def test_a_parameter_without_an_axis_is_whole() -> None:
    layer = RowParallelLinear(input_size_per_partition=6)
    layer.bias = torch.nn.Parameter(torch.zeros(4))
    assert plan(a=layer).parameter("a.bias") is None


def test_modules_of_other_classes_are_not_in_the_plan() -> None:
    found = plan(a=torch.nn.Linear(2, 2), b=torch.nn.SiLU(), c=LinearBase())
    assert found.modules == {}
    assert repr(found) == "2 ranks"


@pytest.mark.engine
def test_the_plan_is_read_before_kernels_pack_the_weights() -> None:
    """What the engine lays out anew is off the plan, what it leaves alone is on it, and its own function is back."""
    from vllm.model_executor.model_loader import base_loader

    from adapters.engines.vllm_sharding import planned

    before = base_loader.process_weights_after_loading
    kept, packed, gone = column(4), column(4), column(4)

    def process(model: Any, *args: Any) -> str:
        packed.weight.data.fill_(3.0)  # type: ignore[union-attr,operator]
        gone.weight = torch.nn.Parameter(torch.empty(0))
        return "done"

    base_loader.process_weights_after_loading = process
    try:
        with planned(2) as found:
            model = torch.nn.ModuleDict({"kept": kept, "packed": packed, "gone": gone})
            assert base_loader.process_weights_after_loading(model, None, None) == "done"
        assert base_loader.process_weights_after_loading is process
    finally:
        base_loader.process_weights_after_loading = before
    (plan,) = found
    assert {path: layer.output for path, layer in plan.modules.items()} == dict.fromkeys(
        ("kept", "packed", "gone"), Split("column", (Piece(4),))
    )
    assert plan.parameter("kept.weight") == Split("column", (Piece(4),), 0)
    for path in ("packed.weight", "gone.weight"):
        with pytest.raises(LookupError):
            plan.parameter(path)
