"""Convert between the base units used inside the package and the units people read and type.

Inside: seconds, bytes, bytes per second, flops (a count), flops per second, ratios from 0 to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from estimator.errors import quoted

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SIZE_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
# Digits enough for any quantity, and few enough that it stays finite.
_NUMBER = r"([0-9]{1,24}(?:\.[0-9]{1,24})?)"
_SIZE_PATTERN = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*")
# As many digits as a whole number that people write has; Python itself reads at most 4,300.
_MOST_DIGITS = 18


def parse_whole(text: str, *, least: int = 0, most: int = 10**15) -> int:
    """Read a whole number of ASCII digits from `least` to `most`; raises ValueError.

    >>> parse_whole("25")
    25
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{quoted(text)} is no whole number; write one such as {max(least, 4)}")
    if len(text) > _MOST_DIGITS or not least <= int(text) <= most:
        raise ValueError(f"{quoted(text)} is not from {least} to {most:g}; write one that is")
    return int(text)


def parse_number(text: str) -> float:
    """Read a number, also an infinite one; raises ValueError.

    >>> parse_number("0.5")
    0.5
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{quoted(text)} is no number; write one such as 0.5") from None


def parse_knobs(text: str) -> dict[str, str]:
    """Read ``view,bucket=5MiB``, each name once; a name alone has no value. Raises ValueError.

    >>> parse_knobs("view, bucket=5MiB")
    {'view': '', 'bucket': '5MiB'}
    """
    knobs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip()
        if equals and not value.strip():
            raise ValueError(f"{quoted(part)} has no value; write one after the =")
        if name in knobs:
            raise ValueError(f"{quoted(name)} stands twice; write it once")
        knobs[name] = value.strip()
    return knobs


def parse_size_bytes(text: str) -> int:
    """Read a size such as ``25MiB`` or ``1 GB`` (GB = 10^9, GiB = 2^30); raises ValueError.

    >>> parse_size_bytes("25MiB")
    26214400
    """
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None or match.group(2).lower() not in _SIZE_FACTORS:
        raise ValueError(f"{quoted(text)} is not a size; write a number and a unit such as 25MiB")
    return round(float(match.group(1)) * _SIZE_FACTORS[match.group(2).lower()])


_RATE_FACTORS = {
    "bit/s": 1 / 8,
    "kbit/s": 1e3 / 8,
    "mbit/s": 1e6 / 8,
    "gbit/s": 1e9 / 8,
    "tbit/s": 1e12 / 8,
    "b/s": 1.0,
    "kb/s": 1e3,
    "mb/s": 1e6,
    "gb/s": 1e9,
}
_RATE_PATTERN = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]+/s)\s*")


def parse_bandwidth_bytes_per_s(text: str) -> float:
    """Read a rate such as ``10 Gbit/s`` or ``12.5 GB/s``; raises ValueError.

    >>> parse_bandwidth_bytes_per_s("10 Gbit/s")
    1250000000.0
    """
    match = _RATE_PATTERN.fullmatch(text)
    if match is None or match.group(2).lower() not in _RATE_FACTORS:
        raise ValueError(
            f"{quoted(text)} is not a rate; write a number and a unit such as 10 Gbit/s"
        )
    return float(match.group(1)) * _RATE_FACTORS[match.group(2).lower()]


_SECOND_FACTORS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}


def parse_seconds(text: str) -> float:
    """Read a duration such as ``8ms``, ``12h`` or ``2w``; raises ValueError.

    >>> parse_seconds("8ms"), parse_seconds("14d") == parse_seconds("2w")
    (0.008, True)
    """
    match = _SIZE_PATTERN.fullmatch(text.replace("µ", "u"))
    if match is None or match.group(2) not in _SECOND_FACTORS:
        units = ", ".join(_SECOND_FACTORS)
        raise ValueError(f"{quoted(text)} is not a duration; write a number and one of {units}")
    return float(match.group(1)) * _SECOND_FACTORS[match.group(2)]


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")  # first, so that 9.999 becomes 10.0, not 10.00
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{digits}f}"


def format_seconds(seconds: float) -> str:
    """Three significant digits with the unit that keeps the number between 1 and 1000.

    >>> format_seconds(0.4123)
    '412 ms'
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds == 0:
        return "0 s"
    unit_s, unit = time_unit(seconds)
    return f"{_three_digits(seconds / unit_s)} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit that people say such a time in: its seconds and its name.

    >>> time_unit(0.4123), time_unit(300)
    ((0.001, 'ms'), (60.0, 'min'))
    """
    if abs(seconds) >= 7200:
        return 3600.0, "h"
    if abs(seconds) >= 120:
        return 60.0, "min"
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit_s * 0.9995:
            return unit_s, unit
    return 1e-9, "ns"


def format_interval(seconds: float, low_s: float, high_s: float) -> str:
    """A time and its interval: what is off by as much both ways as a percentage, else its ends.

    >>> format_interval(0.4123, 0.3876, 0.4370), format_interval(0.179, 0.109, 0.293)
    ('412 ms ± 6.0 %', '179 ms (109–293)')
    """
    seconds_text = format_seconds(seconds)
    if seconds == 0 or not all(map(math.isfinite, (seconds, low_s, high_s))):
        return seconds_text
    below, above = format_ratio(1 - low_s / seconds), format_ratio(high_s / seconds - 1)
    if below == above:
        return f"{seconds_text} ± {above}"
    unit_s, _ = time_unit(seconds)
    return f"{seconds_text} ({_three_digits(low_s / unit_s)}–{_three_digits(high_s / unit_s)})"


def format_bytes(size_bytes: float) -> str:
    """Memory as people read it, in binary units.

    >>> format_bytes(3 * 2**30)
    '3.00 GiB'
    """
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= factor:
            return f"{_three_digits(size_bytes / factor)} {unit}"
    return f"{size_bytes:.0f} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """Bandwidth in decimal GB/s.

    >>> format_bandwidth(12.5e9)
    '12.5 GB/s'
    """
    return f"{_three_digits(bytes_per_s / 1e9)} GB/s"


def format_ratio(ratio: float) -> str:
    """A ratio from 0 to 1 as a percentage.

    >>> format_ratio(0.0612), format_ratio(-1e-9)
    ('6.1 %', '0.0 %')
    """
    return f"{100 * ratio:z.1f} %" if abs(ratio) < 0.1 else f"{100 * ratio:.0f} %"


def format_error(ratio: float | None) -> str:
    """A relative error, as a factor where a percentage would reach below zero; '?' for none.

    >>> format_error(0.0612), format_error(2.34)
    ('± 6.1 %', 'factor 3.3')
    """
    if ratio is None:
        return "?"
    return f"± {format_ratio(ratio)}" if ratio < 1 else f"factor {1 + ratio:.1f}"


def format_split(batches: Sequence[int]) -> str:
    """Batches of groups of devices in their order, or one number if all are equal.

    >>> format_split((24, 8)), format_split((8, 8))
    ('24 + 8', '8')
    """
    return str(batches[0]) if len(set(batches)) == 1 else " + ".join(map(str, batches))


def format_count(value: float) -> str:
    """A count or rate with three significant digits and an SI prefix.

    >>> format_count(95_200_000_000)
    '95.2 G'
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {prefix}"
    return f"{_three_digits(value)} "
