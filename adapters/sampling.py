"""How the next token is drawn, with the same words on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# What `run(..., logprobs=True)` keeps them under until the run is over.
LOGPROBS = "tapgrid.logprobs"


@dataclass(frozen=True)
class Sampling:
    """Generation settings of one request. Temperature 0 is greedy.

    >>> Sampling(max_new_tokens=8).temperature
    0.0
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, not {self.max_new_tokens}: a pass is what interventions run in"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative: {self.temperature}")

    def ends(self, new: Sequence[int]) -> bool:
        """Whether the last token of `new` ends the generation."""
        return bool(new) and new[-1] in self.stop_token_ids

    def generator(self) -> torch.Generator | None:
        """A seeded generator, where this request asked for one."""
        return torch.Generator().manual_seed(self.seed) if self.temperature and self.seed is not None else None


def draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """Next token ids, int64 [batch], from logits [batch, vocab]; each row by its own settings."""
    greedy = logits.argmax(-1)
    if not any(s.temperature for s in samplings):
        return greedy
    for i, s in enumerate(samplings):
        if s.temperature:
            weights = torch.softmax(logits[i].float().cpu() / s.temperature, -1)
            greedy[i] = torch.multinomial(weights, 1, generator=generators[i]).item()
    return greedy


def keep_logprobs(m: Any) -> None:
    """The last intervention of a request that asks for log-probabilities: keeps that of the token that was drawn, or
    written in its place, under the logits as they were left."""
    if m.draws:
        scores = m.logits[0].float().log_softmax(-1)
        m.save(LOGPROBS, scores[m.sampled])
