"""What a user's function sees: `Pass`, one request's rows of one forward pass.

Reading a point parks the function until the model gets there; the model then waits while the function
computes and writes, and goes on when the function asks for the next point or returns. No source is
rewritten and nothing is traced: the function is an ordinary one in a greenlet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import getrefcount
from typing import Any

import torch

from adapters.attributes import Module, layered, single
from adapters.errors import UnknownPointError, at_user_line
from adapters.exchange import lent
from adapters.handed import UNHELD_IN_SAVE
from adapters.points import AFTER, BEFORE, PER_LAYER
from adapters.reading import Reading
from adapters.saves import copied

Intervention = Callable[["Pass"], Any]


class Pass(Reading):
    """One request's part of one forward pass; the argument of every intervention.

    Points are attributes: `m.resid_post[16]` is [tokens of this pass, d_model]. Editing it in place and assigning to
    it both count as writes, until the next point is read: then the model goes on with what was left there, and the
    tensor stays as it was. `m.logits` is [1, vocab] and `m.sampled` [1], the row that the sampler sees and the token it
    drew; a pass that draws no token (an early chunk of a long prompt) ends where either is read.

    An edit that torch does not count, through `.data` or a NumPy array, may be lost without a word; with
    `run(..., check_finite=True)` it is an error.

    >>> import tapgrid
    >>> rt = tapgrid.load("synthetic:llama", dtype="float32")
    >>> def fn(m):
    ...     seen = m.state.setdefault("seen", [])
    ...     seen.append((m.step, m.is_prompt, m.tokens, m.positions.tolist()))
    ...     m.resid_post[0][m.positions == 1] *= 2                  # one position, in whichever pass it comes
    ...     m.save("mlp", m.at("model.layers.1.mlp").output)        # any module
    ...     guess = m.unembed(m.resid_post[1])                      # [tokens, vocab]: norm and head of the model
    ...     m.save("alike", m.norm(m.resid_post[1]) @ m.weight("lm_head.weight").T - guess)
    ...     if m.draws and m.step == 1:
    ...         m.save("seen", seen)
    ...         m.stop()                                            # keeps this pass's token
    >>> out = rt.run([5, 6, 7], fn, max_new_tokens=8, ignore_eos=True)[0]
    >>> out.saves["seen"], len(out.token_ids)
    ([[(0, True, 3, [0, 1, 2]), (1, False, 1, [3])]], 2)
    >>> tuple(out.cat("mlp").shape), bool(out.cat("alike").abs().max() < 1e-4)
    ((4, 128), True)

    In a `trace`, `m.saves` is what its body has saved, and `m.tokenizer` the model's, if it has one:

    >>> with rt.trace([5, 6]) as m:
    ...     m.save("token", m.sampled)
    >>> len(m.saves["token"]), m.request, m.tokenizer is rt.tokenizer
    (1, 'tapgrid-2', True)
    >>> rt.close()

    Attributes:
        step: passes of this request so far, from 0.
        is_prompt: whether these rows are prompt tokens.
        draws: whether this pass draws a token; an early chunk of a long prompt does not.
        state: this request's own dict, kept from pass to pass.
        request: the request's id.
    """

    __slots__ = ()

    @property
    def positions(self) -> torch.Tensor:
        """Absolute token positions of these rows, int64 [tokens of this pass]."""
        if self._positions is None:
            self._positions = torch.arange(self._first, self._first + self._n)
        return self._positions

    @property
    def tokens(self) -> int:
        """How many tokens of this request are in this pass."""
        return self._n

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._il.host.tokenizer

    def at(self, path: str) -> Module:
        """Any module by its path in the engine's model: `m.at("model.layers.3.mlp.down_proj").output`."""
        return Module(self, path)

    def weight(self, path: str) -> torch.Tensor:
        """A parameter by its path, as the engine holds it."""
        return self._il.host.weight(path)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        """Residual rows [n, d_model] -> logits [n, vocab]: final norm, head, scaling, soft cap as in the model.

        On taps, the requests of a batch that unembed at the same place share one product.
        """
        il = self._il
        if il.gathers and il.may_gather(self, x):
            return self._together(x)
        return il.aside(il.host.unembed, x)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """The model's final norm of residual rows [n, d_model]."""
        return self._il.aside(self._il.host.norm, x)

    def save(self, name: str, value: Any) -> None:
        """Keep a copy of `value` under `name`; every save of a name is kept, one entry each, in order."""
        live = self.live
        entries = live.saves.get(name)
        untouched = value is self._value and type(value) is torch.Tensor and value._version == self._version
        if untouched and not live.wrote:
            if entries is None:
                assert self._loc is not None
                live.as_read[name] = self._loc
        elif live.as_read:
            live.as_read.pop(name, None)
        if untouched and getrefcount(value) <= UNHELD_IN_SAVE and not self._il.grad:
            # It is a copy already and nobody can change it any more; who reads the point again is given another.
            kept: Any = value
            if self._back is lent:
                kept = value.clone()
            else:
                self._adopted, self._at, self._loc, self._value = self._loc, self._loc, None, None
        else:
            kept = copied(value)
        if entries is None:
            live.saves[name] = [kept]
        else:
            entries.append(kept)

    @property
    def saves(self) -> Mapping[str, list[Any]]:
        """What this request has saved so far, by name; where the body of a `trace` finds its own."""
        return self.live.saves

    def stop(self) -> None:
        """End this request's generation with this pass; the token that it samples is kept."""
        self.live.stopped = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        own = type(self).__dict__.get(name)
        if own is not None:  # an AttributeError inside of the property itself lands here: let it come out
            return own.__get__(self)
        self._points.at(name)
        raise UnknownPointError(at_user_line(f"a Pass has no {name!r}"))


for _name in PER_LAYER:
    setattr(Pass, _name, layered(_name))
for _name in (*BEFORE, *AFTER):
    setattr(Pass, _name, single(_name))
