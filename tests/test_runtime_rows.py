"""A request's rows are its own: whoever runs beside it, in whatever order, whenever they join and leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.errors import NotInRowsError
from adapters.rows import Batch, Part, Slab
from adapters.runtime import Runtime
from tests.engines import VOCAB, booted, capture, hf, in_turn, prompts, rt, run, same, worst

__all__ = ["hf", "rt"]  # fixtures

POINTS = [("embed",), ("q", 0), ("resid_post", 1), ("z", 2), ("final_norm",), ("logits",), ("sampled",)]
IDS = prompts(12)
# A batch adds up in another order than a request alone.
TOLERANCE = 2e-5


def stop_after(passes: int) -> Any:
    def fn(m: Any) -> None:
        if m.step == passes - 1:
            m.stop()

    return fn


def test_twelve_requests_that_end_at_different_times_equal_themselves_alone(rt: Runtime) -> None:
    """case 1: More than the engine runs at once, so slots are freed, condensed and filled again."""
    fns = [in_turn(capture(*POINTS), stop_after(1 + i)) for i in range(12)]
    together = run(rt, IDS, fns, max_new_tokens=12)
    for i, out in enumerate(together):
        alone = run(rt, [IDS[i]], fns[i], max_new_tokens=12)[0]
        assert out.prompt_token_ids == tuple(IDS[i])
        assert len(out.token_ids) == 1 + i
        assert out.token_ids == alone.token_ids
        assert worst(out, alone) < TOLERANCE


def test_the_embedding_names_the_owner_of_every_row(rt: Runtime) -> None:
    """case 1."""
    table = booted("hf").engine.model.get_input_embeddings().weight  # type: ignore[attr-defined]
    for out in run(rt, IDS, capture(("embed",)), max_new_tokens=5):
        tokens = (*out.prompt_token_ids, *out.token_ids[:-1])
        assert torch.equal(out.cat("embed"), table[list(tokens)])


def test_positions_steps_and_phases(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("positions", m.positions)
        m.save("step", m.step)
        m.save("prompt", m.is_prompt)
        m.save("tokens", m.tokens)

    for out in run(rt, IDS, fn, max_new_tokens=3):
        n = len(out.prompt_token_ids)
        assert out.cat("positions").tolist() == list(range(n + 2))
        assert out.cat("positions").dtype == torch.int64
        assert out.saves["step"] == [0, 1, 2]
        assert out.saves["prompt"] == [True, False, False]
        assert out.saves["tokens"] == [n, 1, 1]


def test_permuting_the_batch_permutes_the_results(rt: Runtime) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    straight = run(rt, IDS, capture(*POINTS))
    permuted = run(rt, [IDS[i] for i in order], capture(*POINTS))
    for place, i in enumerate(order):
        assert permuted[place].token_ids == straight[i].token_ids
        assert worst(permuted[place], straight[i]) < TOLERANCE


def test_the_same_function_again_and_again(rt: Runtime) -> None:
    """case 17: Batch of one, of four, of four shuffled, of one: nothing is left in the function or the engine."""
    fn = capture(*POINTS)
    first = run(rt, [IDS[2]], fn)[0]
    four = run(rt, IDS[:4], fn)
    shuffled = run(rt, [IDS[i] for i in (3, 1, 2, 0)], fn)
    again = run(rt, [IDS[2]], fn)[0]
    same([again], [first])
    for out in (four[2], shuffled[2]):
        assert worst(out, first) < TOLERANCE


@pytest.mark.parametrize("model", ["synthetic:llama", "synthetic:gpt2", "synthetic:gemma3", "synthetic:mistral"])
def test_left_padding_never_shows(model: str) -> None:
    """cases 5 and 35: Also where positions are learned, and where a sliding window is shorter than the prompt."""
    runtime = booted("hf", model)
    ids = prompts(4, 4, 40)
    points = [("embed",), ("resid_post", 0), ("resid_post", -1), ("logits",)]
    together = run(runtime, ids, capture(*points), max_new_tokens=6)
    for i, out in enumerate(together):
        alone = run(runtime, [ids[i]], capture(*points), max_new_tokens=6)[0]
        assert out.token_ids == alone.token_ids
        assert worst(out, alone) < TOLERANCE


def test_plain_and_instrumented_requests_side_by_side(rt: Runtime) -> None:
    plain = run(rt, IDS, max_new_tokens=6)
    mixed = run(rt, IDS, [capture(*POINTS) if i % 3 == 0 else None for i in range(12)], max_new_tokens=6)
    assert [o.token_ids for o in mixed] == [o.token_ids for o in plain]
    assert [bool(o.saves) for o in mixed] == [i % 3 == 0 for i in range(12)]


def test_end_of_sequence_ends_a_request(rt: Runtime) -> None:
    """The same tokens on both engines, the end token among them."""
    plain = run(booted("hf"), [IDS[5]], max_new_tokens=8)[0].token_ids
    rt.engine.eos_token_id, kept = plain[3], rt.engine.eos_token_id  # type: ignore[attr-defined]
    try:
        out = rt.run([IDS[5], IDS[4]], capture(("sampled",)), max_new_tokens=8)
    finally:
        rt.engine.eos_token_id = kept  # type: ignore[attr-defined]
    at = plain.index(plain[3])
    assert out[0].token_ids == plain[: at + 1]
    assert not out[0].stopped
    assert out[0].cat("sampled").tolist() == list(out[0].token_ids)


def test_seeded_sampling_is_reproducible(rt: Runtime) -> None:
    draws = [run(rt, IDS[:3], temperature=2.0, seed=7, max_new_tokens=8) for _ in range(2)]
    same(*draws)
    assert [o.token_ids for o in draws[0]] != [o.token_ids for o in run(rt, IDS[:3], max_new_tokens=8)]


# ---- the arithmetic


def test_a_slab_refuses_a_tensor_that_is_not_in_rows() -> None:
    slab = Slab([0, 3, 4])
    with pytest.raises(NotInRowsError, match=r"shape \(2, 512\): this pass packs 2 requests into 4 rows"):
        slab.of(torch.zeros(2, VOCAB), 0)
    with pytest.raises(NotInRowsError, match="cannot tell the requests apart"):
        slab.copy(torch.tensor(1.0), 0)
    assert Slab([0, 3, 4], padded=8).of(torch.arange(8), 1).tolist() == [3]


def test_a_batch_finds_its_rows_in_both_layouts() -> None:
    batch = Batch(2, 3, [0, 1])
    x = torch.arange(6).view(2, 3)
    assert batch.of(x, 1).tolist() == [4, 5]
    assert batch.of(x.view(6, 1), 1).tolist() == [[4], [5]]
    with pytest.raises(NotInRowsError, match=r"shape \(1, 3\): this pass has 2 requests of 3 tokens"):
        batch.of(torch.zeros(1, 3), 0)


@pytest.mark.parametrize(("lo", "hi"), [(0, 2), (2, 4), (1, 1)])
def test_a_part_is_a_view_and_its_copy_is_not(lo: int, hi: int) -> None:
    x = torch.arange(10.0)[:, None]
    part = Part(Slab([0, 3, 10]), lo, hi)
    assert part.of(x, 1).flatten().tolist() == list(range(3 + lo, 3 + hi))
    copy = part.copy(x, 1)
    part.of(x, 1).zero_()
    assert copy.flatten().tolist() == list(range(3 + lo, 3 + hi))
