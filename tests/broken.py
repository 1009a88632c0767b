"""Our own `transformers` column, broken on purpose: what a user must never be shown as a result."""

from __future__ import annotations

from adapters.ours import TapgridHF
from validation.faults import wrap


def shifted() -> object:
    """Values shifted by one token."""
    return wrap(TapgridHF(), "shifted-token")


def dropped() -> object:
    """Writes that never land."""
    return wrap(TapgridHF(), "write-dropped")
