"""harness.stats against full enumeration, the golden table of the cases, and scipy where scipy is right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from harness import stats, stats_drift, stats_power

# ------------------------------------------------------------------------------------------------ Mann-Whitney

GOLDEN = [
    ([1, 2, 3], [4, 5, 6], 0.10000),
    ([1, 2, 3, 4], [5, 6, 7, 8], 0.02857),
    ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 0.00794),
    ([1, 2, 3, 4, 5], [6, 7, 8, 9], 0.01587),
    ([6, 7, 8, 9], [1, 2, 3, 4, 5], 0.01587),
    ([1, 2, 3, 4, 5], [3, 4, 5, 6, 7], 0.12698),
    ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5], 0.01587),
    ([1] * 4, [2] * 4, 0.02857),
    ([115, 114, 115, 115, 115], [78.8] * 5, 0.00794),
    ([7] * 5, [7] * 5, 1.0),
    ([1], [2], 1.0),
]


@pytest.mark.parametrize(("a", "b", "p"), GOLDEN)
def test_golden_values_of_mann_whitney(a: list[float], b: list[float], p: float) -> None:
    assert round(stats.mann_whitney(a, b), 5) == p


def _u(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum((x > y) + (x == y) / 2 for x in a for y in b)


def _brute_mann_whitney(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The permutation law of U, split by split, from its definition."""
    pool, seen = a + b, _u(a, b)
    law = []
    for chosen in itertools.combinations(range(len(pool)), len(a)):
        left = tuple(pool[i] for i in chosen)
        law.append(_u(left, tuple(pool[i] for i in range(len(pool)) if i not in chosen)))
    below, above = sum(u <= seen for u in law), sum(u >= seen for u in law)
    return min(1.0, 2 * min(below, above) / len(law))


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("m", range(1, 7))
def test_mann_whitney_is_the_enumerated_law_without_ties(n: int, m: int) -> None:
    """Every p that n against m distinct values can give (case 73: an off-by-one in a table)."""
    splits = list(itertools.combinations(range(n + m), n))
    us = {s: _u(s, tuple(i for i in range(n + m) if i not in s)) for s in splits}
    for split in splits if len(splits) <= 70 else splits[:: len(splits) // 40]:
        tail = min(sum(u <= us[split] for u in us.values()), sum(u >= us[split] for u in us.values()))
        rest = [i for i in range(n + m) if i not in split]
        assert stats.mann_whitney(list(split), rest) == pytest.approx(min(1, 2 * tail / len(splits)), abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_mann_whitney_is_the_enumerated_law_with_ties(a: list[int], b: list[int]) -> None:
    p = stats.mann_whitney(a, b)
    assert p == pytest.approx(_brute_mann_whitney(tuple(a), tuple(b)), abs=1e-12)
    assert p == pytest.approx(stats.mann_whitney(b, a), abs=1e-12)


def test_mann_whitney_agrees_with_scipy_where_scipy_enumerates() -> None:
    a, b = [91.8, 92.0, 92.0, 91.7, 91.8], [92.0, 92.1, 91.8, 92.3, 92.1]
    method = scipy_stats.PermutationMethod(n_resamples=np.inf)
    assert stats.mann_whitney(a, b) == pytest.approx(scipy_stats.mannwhitneyu(a, b, method=method).pvalue)


@pytest.mark.parametrize("n", [9, 15, 40])
def test_mann_whitney_stays_exact_where_scipy_goes_asymptotic(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n), rng.normal(0.5, size=n)
    exact = scipy_stats.mannwhitneyu(a, b, method="exact").pvalue
    assert stats.mann_whitney(a, b) == pytest.approx(exact, rel=1e-9)
    assert stats.mann_whitney(a, b) != scipy_stats.mannwhitneyu(a, b, method="asymptotic").pvalue


def test_rounding_before_testing_changes_p_and_we_do_not_round() -> None:
    a, b = [91.81, 91.84, 91.83, 91.82], [91.85, 91.86, 91.88, 91.87]
    assert stats.mann_whitney(a, b) == pytest.approx(2 / 70)
    assert stats.mann_whitney([round(v, 1) for v in a], [round(v, 1) for v in b]) > 0.1


@pytest.mark.parametrize(("a", "b"), [([], [1]), ([1, math.nan], [2]), ([1], [math.inf])])
def test_values_that_are_no_measurement_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"value|needed"):
        stats.mann_whitney(a, b)


# ---------------------------------------------------------------------------------------------------- sign flip


def _brute_sign_flip(d: tuple[float, ...]) -> float:
    seen = abs(math.fsum(d))
    sums = [
        abs(math.fsum(s * v for s, v in zip(signs, d, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(d))
    ]
    return sum(s >= seen - 1e-12 for s in sums) / len(sums)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=6))
def test_sign_flip_is_the_enumerated_law(d: list[int]) -> None:
    assert stats.sign_flip([v / 100 for v in d]) == pytest.approx(_brute_sign_flip(tuple(v / 100 for v in d)))


def test_sign_flip_agrees_with_scipy_and_reaches_its_least_p() -> None:
    rng = np.random.default_rng(3)
    for n in (5, 9, 12):
        d = rng.normal(0.3, 1, n)
        other = scipy_stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert stats.sign_flip(d) == pytest.approx(other.pvalue)
    assert stats.sign_flip(np.arange(1, 31)) == 2 / 2**30
    assert stats.sign_flip([0.0] * 7) == 1
    with pytest.raises(ValueError, match="up to 40"):
        stats.sign_flip([1.0] * 41)


# ---------------------------------------------------------------------------------------------------- intervals


def test_paired_interval_is_the_t_interval() -> None:
    d = [0.01, 0.05, -0.02, 0.04, 0.03]
    other = scipy_stats.ttest_1samp(d, 0).confidence_interval(0.9)
    ours = stats.paired_interval(d, 0.9)
    assert (ours.low, ours.high) == pytest.approx((other.low, other.high))


def _walsh(d: np.ndarray) -> np.ndarray:
    i, j = np.triu_indices(len(d))
    return np.sort((d[i] + d[j]) / 2)


@pytest.mark.parametrize("n", range(4, 11))
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_hodges_lehmann_interval_inverts_the_signed_rank_test(n: int, level: float) -> None:
    """A shift is inside the interval exactly if scipy's exact signed-rank test does not reject it."""
    d = np.random.default_rng(n).normal(size=n)
    interval = stats.hodges_lehmann(d, level)
    assert interval.estimate == np.median(_walsh(d))
    ends = _walsh(d)
    for shift in [(a + b) / 2 for a, b in itertools.pairwise(ends)] + [ends[0] - 1, ends[-1] + 1]:
        kept = scipy_stats.wilcoxon(d - shift, method="exact").pvalue > 1 - level + 1e-12
        assert (interval.low <= shift <= interval.high) == kept


@pytest.mark.parametrize("n", [2, 5])
def test_too_few_pairs_have_no_signed_rank_interval(n: int) -> None:
    interval = stats.hodges_lehmann(list(range(n)))
    assert (interval.low, interval.high) == (-math.inf, math.inf)


def test_tost_is_two_one_sided_t_tests() -> None:
    d = np.random.default_rng(0).normal(0.005, 0.01, 8)
    low = scipy_stats.ttest_1samp(d, -0.03, alternative="greater").pvalue
    high = scipy_stats.ttest_1samp(d, 0.03, alternative="less").pvalue
    assert stats.tost(d, 0.03) == pytest.approx(max(low, high))
    assert (stats.tost([0.0] * 4, 0.03), stats.tost([0.04] * 4, 0.03)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="margin"):
        stats.tost(d, 0)


def test_tost_is_the_90_percent_interval_inside_the_margin() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        d = rng.normal(0.01, 0.02, 6)
        interval = stats.paired_interval(d, 0.9)
        assert (stats.tost(d, 0.03) < 0.05) == (interval.low > -0.03 and interval.high < 0.03)


# -------------------------------------------------------------------------------------------------- corrections


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_benjamini_hochberg_is_scipys(ps: list[float]) -> None:
    assert stats.benjamini_hochberg(ps) == pytest.approx(list(scipy_stats.false_discovery_control(ps)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.floats(0.01, 0.2))
def test_holm_is_the_closed_bonferroni_test(ps: list[float], alpha: float) -> None:
    """Holm rejects exactly what closure rejects: every subset that holds the hypothesis, by Bonferroni."""
    adjusted = stats.holm(ps)
    for i in range(len(ps)):
        subsets = [s for n in range(1, len(ps) + 1) for s in itertools.combinations(range(len(ps)), n) if i in s]
        closed = max(min(1.0, len(s) * min(ps[j] for j in s)) for s in subsets)
        assert adjusted[i] == pytest.approx(closed)


@pytest.mark.parametrize("rule", [stats.benjamini_hochberg, stats.holm])
def test_no_test_is_no_part_of_the_family(rule: object) -> None:
    """Case 72: a NaN p became 0 and led the ranking."""
    assert callable(rule)
    alone = rule([0.01, 0.2, 0.04])
    among = rule([math.nan, 0.01, None, 0.2, 0.04, math.nan])
    assert among == [None, alone[0], None, alone[1], alone[2], None]
    assert rule([]) == []
    assert rule([None]) == [None]
    with pytest.raises(ValueError, match="not a p-value"):
        rule([1.5])


def test_a_cells_own_p_does_not_depend_on_other_cells() -> None:
    """Case 26: one tied slice changed p of an untied slice in the same call."""
    a, b = [1, 2, 3, 4, 5], [3, 4, 5, 6, 7]
    assert stats.mann_whitney(a, b) == [stats.mann_whitney(x, y) for x, y in [([1] * 4, [2] * 4), (a, b)]][1]


def _brute_step_down(seen: np.ndarray, law: np.ndarray) -> list[float]:
    out, left, worst = [0.0] * len(seen), list(np.argsort(-seen)), 0.0
    while left:
        p = float((law[:, left].max(axis=1) >= seen[left[0]] * (1 - 1e-9)).mean())
        worst = max(worst, p)
        out[left.pop(0)] = worst
    return out


def test_max_t_over_sign_flips_is_the_enumerated_step_down() -> None:
    d = np.random.default_rng(5).normal([0.05, 0, 0.02], 0.03, (6, 3))
    law = np.array([np.abs(np.array(s) @ d) for s in itertools.product((1, -1), repeat=6)])
    assert stats.max_t_sign_flip(d) == pytest.approx(_brute_step_down(np.abs(d.sum(axis=0)), law))


def test_max_t_over_labellings_is_the_enumerated_step_down() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.normal(0, 1, (4, 3)), rng.normal([2, 0, 1], 1, (5, 3))
    pool, law = np.concatenate([a, b]), []
    for chosen in itertools.combinations(range(9), 4):
        x, y = pool[list(chosen)], pool[[i for i in range(9) if i not in chosen]]
        law.append(np.abs(scipy_stats.ttest_ind(x, y, equal_var=False).statistic))
    assert stats.max_t_permutation(a, b) == pytest.approx(_brute_step_down(law[0], np.array(law)))


def test_max_t_has_no_floor_from_the_number_of_cells_where_holm_has() -> None:
    """40 cells, 6 against 6 rounds, one changed beyond doubt."""
    rng = np.random.default_rng(7)
    a, b = rng.normal(0, 0.01, (6, 40)), rng.normal(0, 0.01, (6, 40))
    b[:, 3] += 1.0
    assert stats.holm([stats.minimum_p_unpaired(6)] + [1.0] * 39)[0] > 0.05  # type: ignore[operator]
    assert stats.max_t_permutation(a, b)[3] < 0.05


def test_max_t_leaves_out_what_a_round_lacks() -> None:
    a = np.array([[0.0, 0.0], [0.01, math.nan], [-0.01, 0.01], [0.0, -0.01]])
    p = stats.max_t_permutation(a, a + 0.3)
    assert p[0] == pytest.approx(2 / 70)
    assert p[1] < 0.2
    assert stats.max_t_permutation([[1.0], [1.0]], [[1.0], [1.0]]) == [1.0]


# ------------------------------------------------------------------------------------- what n can show at best


@pytest.mark.parametrize(
    ("n", "unpaired", "paired", "room"),
    [
        (3, 0.1, 0.25, 0),
        (4, 0.0286, 0.125, 1),
        (5, 0.00794, 0.0625, 6),
        (6, 0.00216, 0.0312, 23),
        (8, 0.000155, 0.00781, 321),
        (9, 4.1e-5, 0.00391, 1215),
        (10, 1.1e-5, 0.00195, 4618),
    ],
)
def test_least_p_is_the_notes_table_and_the_tests_reach_it(n: int, unpaired: float, paired: float, room: int) -> None:
    (row,) = stats.minimum_p_table([n])
    assert (row.unpaired, row.paired) == (pytest.approx(unpaired, rel=0.02), pytest.approx(paired, rel=0.02))
    assert row.room == room
    assert stats.mann_whitney(range(n), range(100, 100 + n)) == pytest.approx(row.unpaired)
    assert stats.sign_flip(range(1, n + 1)) == pytest.approx(row.paired)


def test_three_against_three_can_never_be_significant() -> None:
    values = [*itertools.permutations(range(6))]
    assert min(stats.mann_whitney(v[:3], v[3:]) for v in values[::7]) == pytest.approx(0.1)
    assert (stats.processes_for(0.05), stats.rounds_for(0.05), stats.rounds_for(0.05, tests=40)) == (4, 6, 11)


# ---------------------------------------------------------------------------------------------------- summaries


def test_geometric_mean_covers_matched_cells_only() -> None:
    """golang/go #57648: a geomean over different row sets compares nothing."""
    ours, theirs = {"a": 2.0, "b": 4.0, "new": 1e9}, {"a": 1.0, "b": 1.0, "gone": 1e-9}
    m = stats.matched_geometric_mean(ours, theirs)
    assert (m.n, m.only_ours, m.only_theirs) == (2, ("new",), ("gone",))
    assert m.ratio == pytest.approx(8**0.5)
    assert m.interval is not None
    assert m.interval.low < m.ratio < m.interval.high  # type: ignore[operator]
    assert stats.matched_geometric_mean({"a": 1.0}, {"b": 1.0}).ratio is None
    with pytest.raises(ValueError, match="no logarithm"):
        stats.geometric_mean([1, 0])


def test_published_rule_pools_runs_and_needs_both_halves() -> None:
    base = [100.0 + 0.1 * i for i in range(9)]
    assert stats.published_pooled_rule([v * 1.2 for v in base], base).bold
    close = stats.published_pooled_rule([v * 1.02 for v in base], base)
    assert close.p < 0.05
    assert not close.bold
    wild = stats.published_pooled_rule([50, 150, 60, 140, 70, 145, 110, 112, 114], base)
    assert (wild.p > 0.05, wild.bold) == (True, False)


# ------------------------------------------------------------------------------------------------ drift-adjusted


def _design(orders: list[str]) -> stats_drift.Design:
    slots = [(n, c) for n, order in enumerate(orders) for c in order]
    return stats_drift.Design(tuple(c for _, c in slots), tuple(n for n, _ in slots), tuple(range(len(slots))))


def test_two_columns_of_a_fit_without_drift_are_the_two_sample_estimate() -> None:
    design = _design(["abc", "bca", "cab"] * 3)
    y = np.random.default_rng(0).normal(size=27)
    means = {c: y[[x == c for x in design.columns]].mean() for c in "abc"}
    fit = stats_drift.Fit(y, design)
    assert fit.contrast("a", "b").estimate == pytest.approx(means["a"] - means["b"], abs=0.15)
    forth, back = fit.contrast("a", "b"), fit.contrast("b", "a")
    assert (forth.estimate, forth.se, forth.p) == pytest.approx((-back.estimate, back.se, back.p))


def test_a_fit_reads_a_linear_drift_off_the_other_columns() -> None:
    design = _design(["abcd", "bcda", "cdab", "dabc", "abcd", "bcda"])
    noise = np.random.default_rng(1).normal(0, 0.002, 24)
    y = 0.03 * np.arange(24) + noise + 0.05 * np.array([c == "b" for c in design.columns])
    fitted = stats_drift.Fit(y, design).contrast("b", "a")
    pairs = [y[design.columns.index("b", 4 * r)] - y[design.columns.index("a", 4 * r)] for r in range(6)]
    alone = stats_drift.paired(pairs)
    assert fitted.estimate == pytest.approx(0.05, abs=0.005)
    assert fitted.se < alone.se / 1.5
    assert abs(fitted.estimate - 0.05) < abs(alone.estimate - 0.05) / 3
    assert fitted.interval().low < 0.05 < fitted.interval().high


def test_a_noisy_column_does_not_lend_its_noise() -> None:
    design, rng = _design(["abcd", "bcda", "cdab", "dabc"] * 3), np.random.default_rng(2)
    y = rng.normal(0, 1, 48) * np.array([{"a": 0.01, "b": 0.01, "c": 0.1, "d": 0.1}[c] for c in design.columns])
    fit = stats_drift.Fit(y, design)
    assert fit.contrast("a", "b").se < 0.5 * fit.contrast("c", "d").se


def test_a_fit_refuses_what_it_cannot_fit() -> None:
    with pytest.raises(ValueError, match="'c' has 1 processes"):
        stats_drift.Fit([0.0] * 7, _design(["ab", "ba", "abc"]))
    with pytest.raises(ValueError, match="3 values for 9"):
        stats_drift.Fit([0.0] * 3, _design(["abc", "bca", "cab"]))


def test_no_noise_at_all_is_no_crash() -> None:
    design = _design(["abc", "bca", "cab"] * 2)
    contrast = stats_drift.Fit([0.3 if c == "a" else 0.0 for c in design.columns], design).contrast("a", "b")
    assert contrast.estimate == pytest.approx(0.3)
    assert stats_drift.Contrast(0.0, 0.0, 5, "t").p == 1


# --------------------------------------------------------------------------------------------------------- power


def test_power_is_what_simulation_finds() -> None:
    rng, margin = np.random.default_rng(0), math.log1p(0.03)
    d = rng.normal(0.05, 0.032, (20_000, 6))
    called = (scipy_stats.ttest_1samp(d, 0, axis=1).pvalue < 0.05) & (np.abs(d.mean(axis=1)) > margin)
    assert stats_power.power(0.05, 0.032 / 6**0.5, 5, margin=margin) == pytest.approx(called.mean(), abs=0.01)
    same = np.maximum(
        *(scipy_stats.ttest_1samp(d, v, axis=1, alternative=a).pvalue for v, a in ((-0.09, "greater"), (0.09, "less")))
    )
    assert stats_power.equivalence_power(0.05, 0.032 / 6**0.5, 5, 0.09) == pytest.approx((same < 0.05).mean(), abs=0.01)


@pytest.mark.parametrize("df", [2, 5, 9.3, 40])
def test_smallest_detectable_is_where_power_reaches_what_was_asked(df: float) -> None:
    found = stats_power.smallest_detectable(0.01, df, margin=0.0296)
    assert found is not None
    assert stats_power.power(math.log1p(found), 0.01, df, margin=0.0296) == pytest.approx(0.8, abs=0.01)
    assert found > 0.03
    assert stats_power.smallest_detectable(10.0, df) is None


def test_rounds_needed_falls_with_the_effect_and_rises_with_the_noise() -> None:
    margin = math.log1p(0.03)
    by_effect = [stats_power.rounds_needed(e, 0.04, margin) for e in (0.045, 0.06, 0.1)]
    by_noise = [stats_power.rounds_needed(0.06, sd, margin) for sd in (0.02, 0.05, 0.08)]
    assert by_effect == sorted(by_effect, reverse=True)  # type: ignore[type-var]
    assert by_noise == sorted(by_noise)  # type: ignore[type-var]
    assert by_effect[-1] == by_noise[0] == 6
    assert stats_power.rounds_needed(0.0, 0.02, margin, least=9) == 9
