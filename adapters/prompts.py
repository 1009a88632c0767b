"""What `run` takes as prompts: text, token ids or chat messages, one or many, as lists, arrays or tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

# A chat's messages are mappings with a "role" and a "content".
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def prompts_of(given: Any, tokenizer: Any, vocab: int, longest: int | None, new: int) -> list[tuple[int, ...]]:
    """Token ids of every prompt; a ValueError names what is wrong with which one.

    >>> prompts_of([[1, 2], [3]], None, vocab=10, longest=8, new=2)
    [(1, 2), (3,)]
    >>> prompts_of([5, 6], None, vocab=10, longest=8, new=2)
    [(5, 6)]
    >>> prompts_of([[1, 99]], None, vocab=10, longest=8, new=2)
    Traceback (most recent call last):
        ...
    ValueError: prompt 0: token id 99 is outside the vocabulary of 10
    """
    given = _plain(given)
    if given is None or not isinstance(given, (str, Sequence)):
        raise ValueError(f"prompts are text or token ids, one or a list of them, not {type(given).__name__}")
    if len(given) == 0:
        raise ValueError("there is no prompt: give at least one, of at least one token")
    one = isinstance(given, str) or isinstance(given[0], (Integral, Mapping))
    return [_ids(i, p, tokenizer, vocab, longest, new) for i, p in enumerate([given] if one else given)]


def _plain(given: Any) -> Any:
    """Arrays and tensors as lists."""
    return given.tolist() if hasattr(given, "tolist") else given


def _ids(i: int, prompt: Any, tokenizer: Any, vocab: int, longest: int | None, new: int) -> tuple[int, ...]:
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {i} is text and this model has no tokenizer: give prompts as token ids")
        prompt = tokenizer(prompt)["input_ids"]
        first = getattr(tokenizer, "bos_token_id", None)
        if first is not None and list(prompt[:2]) == [first, first]:
            raise ValueError(
                f"prompt {i} begins with {tokenizer.bos_token!r} twice: the tokenizer adds one by itself, so leave it "
                "out of the text; where both are meant, give token ids"
            )
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        prompt = _chat(i, prompt, tokenizer)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValueError(f"prompt {i} is neither text nor token ids: {type(prompt).__name__}")
    if not prompt:
        raise ValueError(f"prompt {i} is empty: a pass needs at least one token")
    odd = next((t for t in prompt if type(t) is not int and (isinstance(t, bool) or not isinstance(t, Integral))), None)
    if odd is not None:
        raise ValueError(f"prompt {i} holds {odd!r}, which is no token id")
    if min(prompt) < 0 or max(prompt) >= vocab:
        bad = next(t for t in prompt if not 0 <= t < vocab)
        raise ValueError(f"prompt {i}: token id {bad} is outside the vocabulary of {vocab}")
    if longest is not None and len(prompt) + new > longest:
        raise ValueError(
            f"prompt {i} has {len(prompt)} tokens and {new} more are asked for, which is over the {longest} that this "
            "engine takes: shorten it, lower max_new_tokens, or load the engine with a larger limit"
        )
    return tuple(int(t) for t in prompt)


def _chat(i: int, messages: Sequence[Any], tokenizer: Any) -> Any:
    """A chat as the model's own template writes it, up to where the assistant begins."""
    odd = next((m for m in messages if not isinstance(m, Mapping) or not {"role", "content"} <= set(m)), None)
    if odd is not None:
        raise ValueError(f'prompt {i} holds {odd!r}: every message of a chat has a "role" and a "content"')
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"prompt {i} is a chat and this model has no chat template: write it as text, or give its token ids"
        )
    found = tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, tokenize=True)
    return found["input_ids"] if isinstance(found, Mapping) else found
