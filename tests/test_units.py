"""Numbers are read and printed as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from estimator.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_error,
    format_interval,
    format_ratio,
    format_seconds,
    parse_knobs,
    parse_size_bytes,
    parse_whole,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("25MiB", 25 * 1024 * 1024),
        ("1 GB", 10**9),
        ("1.5kib", 1536),
        ("512", 512),
        (" 7 b ", 7),
        ("2TiB", 2 * 1024**4),
    ],
)
def test_a_size_is_binary_with_an_i_and_decimal_without(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1e3", "1 parsec", "nan", "1..2kB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4123, "412 ms"),
        (0.0, "0 s"),
        (1.5, "1.50 s"),
        (119.0, "119 s"),
        (600.0, "10.0 min"),
        (36_000.0, "10.0 h"),
        (2.5e-6, "2.50 µs"),
        (3e-9, "3.00 ns"),
        (0.99999, "1.00 s"),
        (9.999e-4, "1.00 ms"),
        (0.0999999, "100 ms"),
        (9.9999, "10.0 s"),
    ],
)
def test_a_time_has_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(some.floats(1e-9, 1e6))
def test_a_printed_time_is_within_half_a_percent_of_the_time(seconds: float) -> None:
    factors = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    number, unit = format_seconds(seconds).split()
    assert float(number) * factors[unit] == pytest.approx(seconds, rel=0.0051)
    assert len(number.replace(".", "")) <= 4 or unit == "h"


def test_memory_is_printed_in_binary_and_bandwidth_in_decimal_units() -> None:
    assert format_bytes(3 * 2**30) == "3.00 GiB"
    assert format_bytes(1000) == "1000 B"
    assert format_bandwidth(12.5e9) == "12.5 GB/s"
    assert f"{format_count(95.2e9)}FLOP/s" == "95.2 GFLOP/s"


def test_a_ratio_is_printed_as_a_percentage() -> None:
    assert [format_ratio(ratio) for ratio in (0.0612, 0.5, 1.0)] == ["6.1 %", "50 %", "100 %"]


@pytest.mark.parametrize("text", ["", "²", "٣", "--1", "+1", "1.0", "1_000", " 1", "0x1", "one"])
def test_a_whole_number_is_ascii_digits_alone(text: str) -> None:
    with pytest.raises(ValueError, match="is no whole number; write one such as 4"):
        parse_whole(text)


@pytest.mark.parametrize("text", ["9" * 5000, "0" * 5000, "17", "0", "-1", "-0"])
def test_a_whole_number_stays_within_its_bounds(text: str) -> None:
    with pytest.raises(ValueError, match="is not from 1 to 16; write one that is") as refused:
        parse_whole(text, least=1, most=16)
    assert len(str(refused.value)) < 200


def test_a_knob_has_one_value() -> None:
    assert parse_knobs(" view, bucket = 5MiB,,") == {"view": "", "bucket": "5MiB"}
    with pytest.raises(ValueError, match="'bucket' stands twice; write it once"):
        parse_knobs("bucket=1MiB,view,bucket=2MiB")
    with pytest.raises(ValueError, match="'bucket=' has no value; write one after the ="):
        parse_knobs("bucket=")


@pytest.mark.parametrize(
    ("seconds", "low_s", "high_s", "text"),
    [
        # 39 % below and 64 % above.
        (0.179, 0.109, 0.293, "179 ms (109–293)"),
        # Ends of other units are said in that of the time.
        (1.69, 0.3296, 8.668, "1.69 s (0.330–8.67)"),
        (0.198, 0.04, 1.0, "198 ms (40.0–1000)"),
        (600.0, 540.0, 661.0, "10.0 min (9.00–11.0)"),
        # 5.96 % below and 6.04 % above are alike once rounded, 4.9 and 5.1 % are not.
        (1.0, 0.9404, 1.0604, "1.00 s ± 6.0 %"),
        (1.0, 0.951, 1.051, "1.00 s (0.951–1.05)"),
        (0.0, 0.0, 0.0, "0 s"),
        (math.inf, math.inf, math.inf, "inf"),
    ],
)
def test_an_interval_is_a_percentage_only_where_it_is_symmetric(
    seconds: float, low_s: float, high_s: float, text: str
) -> None:
    assert format_interval(seconds, low_s, high_s) == text


@given(some.floats(1e-6, 1e5), some.floats(1e-3, 5.0))
def test_no_interval_reaches_below_zero(seconds: float, error: float) -> None:
    text = format_interval(seconds, seconds / math.exp(error), seconds * math.exp(error))
    _, mark, percentage = text.partition(" ± ")
    assert not mark or float(percentage.removesuffix(" %")) < 100


def test_an_error_of_the_whole_and_more_is_a_factor() -> None:
    assert [format_error(ratio) for ratio in (None, 0.99, 2.34)] == ["?", "± 99 %", "factor 3.3"]
