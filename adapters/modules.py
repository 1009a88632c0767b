"""Modules and parameters by their paths: which have run before which, and near names for what is not there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch

from adapters.errors import PointRefusedError, UnknownModuleError, at_user_line
from adapters.points import Points

Key = tuple[str, str]


def ran_before(asked: Key, current: Key) -> bool:
    """Whether `asked` is sure to run before `current`: part of a module that is done, or input of one under way."""
    inside = asked[0].startswith(current[0] + ".") or asked[0] == current[0]
    around = current[0].startswith(asked[0] + ".") and asked[0] != ""
    return (inside and current[1] == "out" and asked != current) or (around and asked[1] == "in")


def layer_stem(points: Points) -> str | None:
    """What the paths of layers begin with: "model.layers."."""
    try:
        path = points.at("resid_post", 0).key[0]
    except Exception:
        return None
    stem, zero, _ = path.partition("0")
    return stem if zero else None


def parameter(model: torch.nn.Module, path: str) -> torch.Tensor:
    """A parameter of the model by its path; refused where the engine has packed it away."""
    try:
        found = model.get_parameter(path).detach()
    except AttributeError:
        near = difflib.get_close_matches(path, [n for n, _ in model.named_parameters()], n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownModuleError(at_user_line(f"the model has no parameter {path!r}{hint}")) from None
    if found.numel() == 0:
        raise PointRefusedError(
            at_user_line(
                f"{path}: the engine has packed this parameter for its own kernels and let the original go; read it "
                "from the checkpoint instead"
            )
        )
    return found


def no_such_module(path: str, known: Sequence[str]) -> UnknownModuleError:
    """The error for a module path that the model does not have, with near ones."""
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.6)
    return UnknownModuleError(
        at_user_line(f"the model has no module {path!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    )
