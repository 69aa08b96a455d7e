"""The shared summary, on cases small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from summary import Bound, format_rows, interval_score, is_beyond, noise_ratio, summarise


def make_case(predicted_s: float | None, measured_s: float | None, **others: Any) -> dict[str, Any]:
    fields = {"method": "probe", "ranks": 1, "model": "m", "source": "s", "global_batch": 8}
    return {**fields, "predicted_s": predicted_s, "measured_s": measured_s, **others}


def test_median_p90_and_worst_of_four_known_errors() -> None:
    cases = [make_case(value, 100.0) for value in (90.0, 120.0, 103.0, 100.0)]
    (row,) = summarise(cases)
    # Errors 0, 3, 10, 20 %: median 6.5 %, 90 % quantile 10 + 0.7 · 10 = 17 %.
    assert row.median_ratio == pytest.approx(0.065)
    assert row.p90_ratio == pytest.approx(0.17)
    assert row.worst_ratio == pytest.approx(0.20)
    # Signed: −10, +20, +3, 0 %: median 1.5 %.
    assert row.bias_ratio == pytest.approx(0.015)


def test_a_failed_case_counts_as_an_error_of_100_percent() -> None:
    cases = [make_case(1.0, 1.0), make_case(None, 1.0), make_case(1.0, None)]
    (row,) = summarise(cases, bounds={"probe": Bound(median_ratio=0.08, worst_ratio=0.25)})
    assert (row.cases, row.failed, row.worst_ratio, row.median_ratio) == (3, 2, 1.0, 1.0)
    assert row.beyond_bound == 2


def test_twice_the_noise_of_a_case_excuses_it_from_the_worst_bound() -> None:
    # Error 30 %, bound 25 %: excused at noise 16 % (2 · 16 = 32), not at noise 14 %.
    assert not is_beyond(make_case(1.3, 1.0, noise_ratio=0.16), 0.25)
    assert is_beyond(make_case(1.3, 1.0, noise_ratio=0.14), 0.25)


def test_groups_are_kept_apart_by_method_and_rank_count() -> None:
    cases = [make_case(1.1, 1.0, ranks=ranks, method=method) for ranks, method in
             ((1, "probe"), (2, "probe"), (1, "measured"), (1, "probe"))]  # fmt: skip
    rows = summarise(cases, bounds={"measured": Bound(median_ratio=0.05, worst_ratio=0.05)})
    assert [(*row.group.values(), row.cases) for row in rows] == [
        ("probe", 1, 2), ("probe", 2, 1), ("measured", 1, 1)]  # fmt: skip
    assert [row.beyond_bound for row in rows] == [None, None, 1]


def test_order_is_judged_on_samples_per_second_not_on_step_time() -> None:
    # 8 samples in 1 s against 16 in 1.5 s: the longer step is the faster training.
    cases = [make_case(1.0, 1.0), make_case(1.4, 1.5, global_batch=16)]
    (row,) = summarise(cases)
    assert (row.pairs, row.pairs_right_ratio, row.rank_correlation) == (1, 1.0, pytest.approx(1.0))


def test_pairs_closer_than_the_gap_or_of_unlike_models_are_not_judged() -> None:
    near = [make_case(1.0, 1.0), make_case(0.9, 1.05)]
    unlike = [make_case(1.0, 1.0), make_case(0.9, 2.0, model="other")]
    assert summarise(near)[0].pairs == 0
    assert summarise(unlike)[0].pairs == 0
    (row,) = summarise(near, pair_gap_ratio=0.04)
    assert (row.pairs, row.pairs_right_ratio) == (1, 0.0)


def test_rank_correlation_of_one_swapped_neighbour() -> None:
    # Rank differences 0, 1, 1, 0: Spearman = 1 − 6 · 2 / (4 · 15) = 0.8.
    cases = [make_case(p, m) for p, m in ((1.0, 1.0), (3.0, 2.0), (2.0, 3.0), (4.0, 4.0))]
    assert summarise(cases)[0].rank_correlation == pytest.approx(0.8)


def test_coverage_and_interval_score_of_one_hit_and_one_miss() -> None:
    cases = [
        make_case(10.0, 10.0, low_s=9.0, high_s=11.0),
        make_case(10.0, 12.0, low_s=9.0, high_s=11.0),
    ]
    (row,) = summarise(cases)
    # Scores 2 and 2 + (2 / 0.2) · 1 = 12, relative to 10 and 12: 0.2 and 1.0.
    assert interval_score(9.0, 11.0, 12.0) == pytest.approx(12.0)
    assert (row.coverage_ratio, row.interval_score_ratio) == (0.5, pytest.approx(0.6))


def test_noise_is_half_the_ten_to_ninety_percent_range_over_the_median() -> None:
    # 0, 1, …, 10 shifted by 95: the 10 % and 90 % quantiles are 96 and 104, the median 100.
    assert noise_ratio([95.0 + step for step in range(11)]) == pytest.approx(4 / 100)


def test_the_table_has_one_line_per_row_under_its_header() -> None:
    text = format_rows(summarise([make_case(1.1, 1.0), make_case(1.1, 1.0, ranks=2)]))
    assert [line.split()[:2] for line in text.splitlines()] == [
        ["method", "ranks"], ["probe", "1"], ["probe", "2"]]  # fmt: skip
