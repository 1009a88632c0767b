"""The residual stream adds up, and what breaks it is seen without a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.validation_adapter import LocalServer, make_model
from validation.identities import check, points
from validation.query import Query
from validation.reference import References

torch = pytest.importorskip("torch")
IDS = tuple(range(3, 43))


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def refs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> References:
    folder = make_model(request.param, tmp_path_factory.mktemp("model"), layers=3)
    return References(folder, tmp_path_factory.mktemp("cache"), server=LocalServer())


def captured(refs: References, dtype: str) -> dict[str, Any]:
    return dict(refs.get([Query(IDS, dtype, points=points([0, 2]))])[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_model_adds_up(refs: References, dtype: str) -> None:
    found = check(captured(refs, dtype), [0, 2], dtype)
    assert [(f.point, f.layer) for f in found] == [
        ("resid_mid", 0),
        ("resid_post", 0),
        ("resid_mid", 2),
        ("resid_post", 2),
    ]
    assert {f.verdict for f in found} == {"PASS"}, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sublayer_that_already_contains_the_residual_does_not(refs: References, dtype: str) -> None:
    values = captured(refs, dtype)
    values["attn_out.2"] = values["attn_out.2"] + values["resid_pre.2"]  # as BLOOM's module hands it out
    found = {(f.point, f.layer): f.verdict for f in check(values, [2], dtype)}
    assert found == {("resid_mid", 2): "FAIL", ("resid_post", 2): "PASS"}


@pytest.mark.parametrize("scale", [1.05, 0.22])
def test_a_scaled_sublayer_does_not(refs: References, scale: float) -> None:
    values = captured(refs, "float32")
    values["mlp_out.0"] = values["mlp_out.0"] * scale
    assert [f.verdict for f in check(values, [0], "float32")] == ["PASS", "FAIL"]


def test_what_is_missing_or_misshapen_is_named() -> None:
    values = {p: np.random.default_rng(0).normal(size=(4, 8)) for p in points([1])}
    del values["attn_out.1"]
    assert "cannot be checked without attn_out.1" in check(values, [1], "float32")[0].reason
    values["attn_out.1"] = np.ones((3, 8))
    assert "shape (3, 8), expected (4, 8)" in check(values, [1], "float32")[0].reason


def test_torch_tensors_of_the_engines_dtype_are_taken_as_they_are() -> None:
    g = torch.Generator().manual_seed(0)
    pre, attn, mlp = (torch.randn(16, 32, generator=g).bfloat16() for _ in range(3))
    mid = pre + attn
    values = {"resid_pre.0": pre, "attn_out.0": attn, "resid_mid.0": mid, "mlp_out.0": mlp, "resid_post.0": mid + mlp}
    assert {f.verdict for f in check(values, [0], "bfloat16")} == {"PASS"}
    values["resid_post.0"] = mid.roll(1, 0) + mlp
    assert check(values, [0], "bfloat16")[1].verdict == "FAIL"
