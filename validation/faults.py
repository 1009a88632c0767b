"""Faults on purpose: an adapter wrapped so that it hands back wrong values, as a broken one would.

    adapter = wrap(TapgridHF(), "shifted-token")      # boots, refuses and runs like the one inside
    catch_table(lambda a: validator.check_reads(a, requests), TapgridHF())

A validator that does not fail these is no validator; CI runs them all. Each is a bug that some engine has had:
`../shared/cases` tells which. Corrupting what came back, not the model, keeps the tokens right, so that it is
the values that must give the fault away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapters.work import AblateHead, Adapter, Capture, ForceToken, Nothing, Outcome, Request, Steer, Work, split
from validation.finding import Finding

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """One way of being wrong. `corrupt(point, all requests' values, which request)` gives the wrong value;
    `needs` names the other points that it is made from; `at` are the points it can happen to (empty: all)."""

    about: str
    corrupt: Callable[[str, Sequence[Values], int], Any] | None = None
    needs: Callable[[str], tuple[str, ...]] = lambda point: ()
    at: tuple[str, ...] = ()
    rewrite: Callable[[Work], Work] | None = None

    def happens_to(self, point: str) -> bool:
        return (
            self.corrupt is not None and (not self.at or split(point)[0] in self.at) and self.needs(point) is not None
        )


def _scaled(by: float) -> Callable[[str, Sequence[Values], int], Any]:
    return lambda point, values, k: values[k][point] * by


def _shifted(point: str, values: Sequence[Values], k: int) -> Any:
    n = len(values[k][point])
    return values[k][point][[0, *range(n - 1)]]


def _stale(point: str, values: Sequence[Values], k: int) -> Any:
    n = len(values[k][point])
    return values[k][point][[*range(n - 1), max(n - 2, 0)]]


def _neighbours(point: str, values: Sequence[Values], k: int) -> Any:
    other = values[(k + 1) % len(values)][point]
    return other[[min(n, len(other) - 1) for n in range(len(values[k][point]))]]


def _half(point: str, values: Sequence[Values], k: int) -> Any:
    value = values[k][point] * 1  # a copy, of an array or a tensor alike
    value[..., value.shape[-1] // 2 :] = 0
    return value


def _swapped(point: str, values: Sequence[Values], k: int) -> Any:
    heads = values[k][point].shape[1]
    return values[k][point][:, [1, 0, *range(2, heads)]]


def _other_layer(point: str) -> tuple[str, ...]:
    name, layer = split(point)
    return (f"{name}.{layer - 1 if layer else 1}",)


def _wrong_layer(point: str, values: Sequence[Values], k: int) -> Any:
    return values[k][_other_layer(point)[0]]


def _without(name: str) -> tuple[Callable[[str, Sequence[Values], int], Any], Callable[[str], tuple[str, ...]]]:
    def needs(point: str) -> tuple[str, ...]:
        return (f"{name}.{split(point)[1]}",)

    return lambda point, values, k: values[k][point] - values[k][needs(point)[0]], needs


def _unwritten(work: Work) -> Work:
    if isinstance(work, Steer | AblateHead):
        return Capture(work.watch) if work.watch else Nothing()
    return Nothing() if isinstance(work, ForceToken) else work


def _half_written(work: Work) -> Work:
    return replace(work, vector=work.vector * work.vector.dtype.type(0.5)) if isinstance(work, Steer) else work


def _written_elsewhere(work: Work) -> Work:
    if isinstance(work, AblateHead):
        return replace(work, head=work.head - 1 if work.head else 1)
    if isinstance(work, Steer):
        name, layer = split(work.point)
        return replace(work, point=f"{name}.{layer - 1 if layer else 1}")
    return work


_NO_MLP, _NO_ATTN = _without("mlp_out"), _without("attn_out")
FAULTS: dict[str, Fault] = {
    "shifted-token": Fault("every row is the one before it", _shifted),
    "scaled-1.05": Fault("5 % too large", _scaled(1.05)),
    "scaled-1.01": Fault("1 % too large", _scaled(1.01)),
    "neighbours-rows": Fault("the rows of another request of the batch", _neighbours),
    "wrong-layer": Fault("the layer before", _wrong_layer, _other_layer, at=("resid_post",)),
    "missing-mlp": Fault("the residual before the MLP was added", _NO_MLP[0], _NO_MLP[1], at=("resid_post",)),
    "missing-attn": Fault("the residual without this layer's attention", _NO_ATTN[0], _NO_ATTN[1], at=("resid_post",)),
    "stale-step": Fault("the last step's row is the step's before", _stale),
    "half-rank": Fault("half of the channels are zero", _half),
    "swapped-heads": Fault("two heads have changed places", _swapped, at=("z",)),
    "write-dropped": Fault("the write does not happen", rewrite=_unwritten),
    "write-halved": Fault("half of the vector is added", rewrite=_half_written),
    "write-elsewhere": Fault("written at the layer before, or to the head before", rewrite=_written_elsewhere),
}

READS = tuple(name for name, fault in FAULTS.items() if fault.corrupt)
WRITES = tuple(name for name, fault in FAULTS.items() if fault.rewrite)


class Faulty:
    """An adapter with a fault in it; everything else is the adapter's own."""

    def __init__(self, adapter: Adapter, fault: str) -> None:
        if fault not in FAULTS:
            raise ValueError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
        self._adapter, self._fault = adapter, FAULTS[fault]
        self._installed: Work | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def install(self, work: Work) -> None:
        self._adapter.install(self._wider(work))
        self._installed = work

    def remove(self) -> None:
        self._adapter.remove()
        self._installed = None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        """The adapter's outcomes, spoilt."""
        outcomes = self._adapter.run(requests, self._wider(work))
        asked = self._installed or work
        values = [o.values for o in outcomes]
        return [Outcome(o.token_ids, self._spoil(asked, values, k)) for k, o in enumerate(outcomes)]

    def _wider(self, work: Work) -> Work:
        if self._fault.rewrite is not None:
            return self._fault.rewrite(work)
        more = [p for point in _watched(work) if self._fault.happens_to(point) for p in self._fault.needs(point)]
        if not more:
            return work
        points = tuple(dict.fromkeys([*_watched(work), *more]))
        points = tuple(sorted(points, key=_model_order))
        if isinstance(work, Steer | AblateHead):
            return replace(work, watch=points)
        return Capture(points)

    def _spoil(self, work: Work, values: Sequence[Values], k: int) -> dict[str, Any]:
        asked = _watched(work) or tuple(values[k])
        corrupt = self._fault.corrupt
        return {
            p: corrupt(p, values, k) if corrupt and self._fault.happens_to(p) else values[k][p]
            for p in asked
            if p in values[k]
        }


def _watched(work: Work) -> tuple[str, ...]:
    if isinstance(work, Capture):
        return work.points
    return work.watch if isinstance(work, Steer | AblateHead) else ()


def _model_order(point: str) -> tuple[int, int]:
    order = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")
    name, layer = split(point)
    return (10**6 if layer is None else layer, order.index(name) if name in order else 0)


def wrap(adapter: Adapter, fault: str) -> Adapter:
    """`adapter` with one of `FAULTS` in it.

    >>> wrap(object(), "late")
    Traceback (most recent call last):
        ...
    ValueError: no fault 'late'; there are shifted-token, scaled-1.05, scaled-1.01, neighbours-rows, wrong-layer, \
missing-mlp, missing-attn, stale-step, half-rank, swapped-heads, write-dropped, write-halved, write-elsewhere
    """
    faulty: Any = Faulty(adapter, fault)
    return faulty  # type: ignore[no-any-return]


Check = Callable[[Adapter], Sequence[Finding]]


def catch_table(check: Check, adapter: Adapter, faults: Sequence[str] = READS) -> list[Caught]:
    """Each fault, and what `check` finds on the adapter that has it.

    catch_table(lambda a: validator.check_reads(a, requests), adapter)
    """
    return [count(fault, check(wrap(adapter, fault))) for fault in faults]


@dataclass(frozen=True)
class Caught:
    """How one fault came out: of so many points that it happened to, how many failed and how many warned."""

    fault: str
    points: int
    failed: int
    warned: int

    @property
    def caught(self) -> bool:
        """Whether the process would have been declared invalid."""
        return self.failed > 0


def count(fault: str, findings: Sequence[Finding]) -> Caught:
    """The outcome of a fault from the findings at the points that it happened to.

    >>> count("half-rank", []).caught
    False
    """
    happened = FAULTS[fault].at
    here = [f for f in findings if f.point != "tokens" and (not happened or f.point in happened)]
    words = [f.verdict for f in here]
    return Caught(fault, len(here), words.count("FAIL"), words.count("WARN"))
