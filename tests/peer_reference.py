"""What a Llama-shaped model holds at a point: `validation.conformance_reference`, under the name that tests use."""

from __future__ import annotations

from validation.conformance_reference import reference, sequence, worst

__all__ = ["reference", "sequence", "worst"]
