"""Two columns of a session compared with the host's drift taken out: what a verdict's p comes from.

The processes of a session stand one after another like plots in a field, and the host's speed wanders under them like
the fertility of the soil. So this is the classical analysis of field trials (a neighbour analysis: Gilmour, Cullis and
Verbyla 1997, in one dimension). For one row, over all columns that ran it:

    log speed of a process = its column + what its round has in common + the drift at its slot + its own noise

The drift is an autoregressive process over slots. Its strength and range, and the rounds' share, are chosen from a
short fixed list by restricted likelihood, columns are estimated by generalized least squares, and the error of a
difference is a heteroscedasticity-robust one (HC3, with Bell-McCaffrey degrees of freedom): a noisy column does not
lend its noise to a quiet one, nor the reverse. With two columns there is nothing to learn the drift from, and it is the
paired t test.

Why not the exact sign flip alone: with 6 rounds its least p is .031, reached only if all six agree, so a true 5 % under
the drifting host of the notes (drift sd 5 %, rho .9 a slot; process sd 1.5 %; run sd .8 %, 3 runs) is found in fewer
than 70 % of sessions, and in none once most cells of the report are null. How often a column that is 5 % slower is
found, in 3000 sessions of 4 rows each, Benjamini-Hochberg and the 3 % margin included (standard error .008), on the
orders of `plan.rounds_of`; in brackets, and for the two older tests, with each order followed by its mirror image:

                                     6 rounds                           10 rounds
    columns, others          sign flip  paired t  this          sign flip  paired t  this
    2                           .68       .83     .83              .98       .98     .98
    3, the other differs        .64       .79     .86 (.86)        .97       .97     .98 (.97)
    4, the others differ        .54       .68     .86 (.80)        .93       .93     .96 (.95)
    6, the others differ        .51       .66     .84 (.84)        .93       .93     .95 (.96)
    3, the other is null        .56       .70     .82 (.79)        .95       .95     .98 (.97)
    4, the others are null      .01       .45     .73 (.63)        .83       .85     .95 (.94)
    6, the others are null      .00       .30     .61 (.61)        .69       .75     .93 (.94)

Where nothing differs, one cell's p is below .05 in .038 to .052 of sessions on that host, and in at most .061 on quiet
ones, with heavy tails, steady slopes, jumps, shifts by round or one noisy column (.067 where that is six times as noisy
as plain, or plain the noisy one). Any p_adjusted is below .05 in .020 to .037 of sessions there and in at most .050
anywhere; any cell is called FASTER or SLOWER in at most .021 there, and in at most .045 of those three times as noisy.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from harness.stats import Array, Interval, equivalence

# A column seen less often has no residual to speak of.
LEAST = 3
# (range as correlation from slot to slot, drift variance, round variance), variances in units of a process's own.
_MENU = [(0.0, 0.0, r) for r in (0.0, 0.5, 2.0, 8.0)] + [
    (rho, q, r) for rho in (0.6, 0.9, 0.98) for q in (0.5, 2.0, 8.0, 32.0, 128.0, 512.0) for r in (0.0, 2.0)
]


@dataclass(frozen=True)
class Contrast:
    """One column's log speed less another's: how much, how sure, and by which test."""

    estimate: float
    se: float
    df: float
    test: str

    @property
    def p(self) -> float:
        """Two-sided p of "no difference"."""
        if self.se == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return float(2 * special.stdtr(self.df, -abs(self.estimate) / self.se))

    def interval(self, level: float = 0.95) -> Interval:
        half = float(special.stdtrit(self.df, (1 + level) / 2)) * self.se
        return Interval(self.estimate, self.estimate - half, self.estimate + half, level)

    def equivalence(self, margin: float) -> float:
        """p of "they differ by the margin or more"."""
        return equivalence(self.estimate, self.se, self.df, margin)


@dataclass(frozen=True)
class Design:
    """Where the processes stood: one entry a process, in any order."""

    columns: tuple[Hashable, ...]
    rounds: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class _Model:
    """One covariance of the list, made ready: whitening, estimator, leverages and its part of the likelihood."""

    whiten: Array
    design: Array
    estimator: Array
    leverage: Array
    penalty: float


def paired(differences: Sequence[float] | Array) -> Contrast:
    """The paired t test of in-round differences.

    >>> paired([0.1, 0.2, 0.3]).df
    2
    """
    d = np.asarray(differences, dtype=float)
    return Contrast(float(d.mean()), float(d.std(ddof=1)) / len(d) ** 0.5, len(d) - 1, "paired t")


class Fit:
    """One row's processes, fitted; `contrast(a, b)` compares two of its columns.

    >>> slots = tuple(range(18))
    >>> design = Design(("vanilla", "a", "b", "b", "a", "vanilla") * 3, tuple(s // 3 for s in slots), slots)
    >>> drift = [0.01 * s for s in slots]
    >>> fit = Fit([d - 0.3 * (c == "a") for c, d in zip(design.columns, drift)], design)
    >>> round(fit.contrast("a", "vanilla").estimate, 3)
    -0.3
    """

    def __init__(self, values: Sequence[float] | Array, design: Design) -> None:
        self._names, models = _models(design)
        y = np.asarray(values, dtype=float)
        if len(y) != len(design.columns):
            raise ValueError(f"{len(y)} values for {len(design.columns)} processes")
        y = y - y.mean()
        best = None
        for model in models:
            white = model.whiten @ y
            rest = white - model.design @ (model.estimator @ white)
            spare = len(y) - len(self._names)
            # A session without any noise (made by hand) has no likelihood; the floor keeps it finite.
            score = spare * np.log(max(float(rest @ rest), 1e-28)) + model.penalty
            if best is None or score < best[0]:
                best = score, model, white, rest
        assert best is not None
        _, self._model, self._white, self._rest = best

    @property
    def columns(self) -> tuple[Hashable, ...]:
        return tuple(self._names)

    def contrast(self, a: Hashable, b: Hashable) -> Contrast:
        """Column a less column b."""
        m = self._model
        weights = m.estimator[self._names[a]] - m.estimator[self._names[b]]
        spared = np.maximum(1 - m.leverage, 1e-9)
        se = float(np.sqrt(((weights * self._rest / spared) ** 2).sum()))
        return Contrast(float(weights @ self._white), se, self._df(weights**2 / spared), "drift-adjusted t")

    def _df(self, weights: Array) -> float:
        """Bell and McCaffrey: as many degrees of freedom as the variance estimate has under equal variances."""
        m = self._model
        residual = np.eye(len(weights)) - m.design @ m.estimator
        form = np.sqrt(weights)[:, None] * residual
        spread = form @ form.T
        return float(np.trace(spread) ** 2 / (spread**2).sum())


@functools.lru_cache(maxsize=8)
def _models(design: Design) -> tuple[dict[Hashable, int], list[_Model]]:
    names = {c: i for i, c in enumerate(dict.fromkeys(design.columns))}
    for name in names:
        if design.columns.count(name) < LEAST:
            raise ValueError(f"column {name!r} has {design.columns.count(name)} processes, a fit needs {LEAST} of each")
    where = np.eye(len(names))[[names[c] for c in design.columns]]
    slots, rounds = np.array(design.slots, dtype=float), np.array(design.rounds)
    apart = np.abs(slots[:, None] - slots[None, :])
    together = (rounds[:, None] == rounds[None, :]).astype(float)
    return names, [_model(where, apart, together, *choice) for choice in _MENU]


def _model(where: Array, apart: Array, together: Array, rho: float, drift: float, shared: float) -> _Model:
    covariance = np.eye(len(where)) + drift * rho**apart + shared * together
    root = np.linalg.cholesky(covariance)
    whiten = np.linalg.inv(root)
    x = whiten @ where
    inverse = np.linalg.inv(x.T @ x)
    estimator = inverse @ x.T
    penalty = 2 * float(np.log(np.diag(root)).sum()) - float(np.linalg.slogdet(inverse)[1])
    return _Model(whiten, x, estimator, np.einsum("ij,ji->i", x, estimator), penalty)
