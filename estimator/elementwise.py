"""Functions of floats or arrays alike, so that a formula stands once for one case and for many.

A formula written with these and with operators gives floats for floats, in the time that plain
Python takes, and arrays (a row per case) as soon as one argument is an array::

    def exposed_s(lane_s: Values, ready_s: Values) -> Values:
        return maximum(ready_s - lane_s, 0.0)

`Values` are floats, arrays or a mixture.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, TypeAlias, overload

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.intp]
Sizes: TypeAlias = NDArray[np.int64]
Integers: TypeAlias = NDArray[np.integer]
Values: TypeAlias = float | Array


@overload
def maximum(first: float, second: float, /) -> float: ...
@overload
def maximum(first: Array, second: Values, /) -> Array: ...
@overload
def maximum(first: Values, second: Array, /) -> Array: ...
def maximum(first: Any, second: Any, /) -> Any:
    """The larger of two, element by element, NaN where one is no number.

    >>> maximum(1.0, 2.0)
    2.0
    >>> maximum(np.array([1.0, 3.0]), 2.0)
    array([2., 3.])
    """
    if type(first) is ndarray or type(second) is ndarray:
        return np.maximum(first, second)
    # Only what is no number differs from itself; comparisons with it are false.
    return first if first >= second or first != first else second


@overload
def minimum(first: float, second: float, /) -> float: ...
@overload
def minimum(first: Array, second: Values, /) -> Array: ...
@overload
def minimum(first: Values, second: Array, /) -> Array: ...
def minimum(first: Any, second: Any, /) -> Any:
    """The smaller of two, element by element, NaN where one is no number."""
    if type(first) is ndarray or type(second) is ndarray:
        return np.minimum(first, second)
    return first if first <= second or first != first else second


@overload
def where(condition: bool, yes: float, no: float, /) -> float: ...
@overload
def where(condition: Flags, yes: Values, no: Values, /) -> Array: ...
@overload
def where(condition: bool | Flags, yes: Array, no: Array, /) -> Array: ...
@overload
def where(condition: bool | Flags, yes: Values, no: Values, /) -> Values: ...
def where(condition: Any, yes: Any, no: Any, /) -> Any:
    """`yes` where the condition holds, else `no`; both are worked out by the caller.

    One condition for all rows gives `yes` or `no` itself, not a copy.

    >>> where(False, 1.0, 2.0)
    2.0
    >>> where(np.array([True, False]), 1.0, 2.0)
    array([1., 2.])
    """
    if type(condition) is ndarray:
        return np.where(condition, yes, no)
    return yes if condition else no


def taken(value: Any, rows: Indices, /) -> Any:
    """What some rows have of a value that is each row's own, or that of all."""
    return value.take(rows) if type(value) is ndarray else value


def uniform(condition: Any, /) -> Any:
    """A condition, as one flag where all rows agree: `where` then copies none.

    >>> uniform(np.array([True, True])), uniform(np.array([True, False]))
    (True, array([ True, False]))
    """
    if type(condition) is not ndarray or not condition.size:
        return condition
    first = bool(condition[0])
    return first if (condition == first).all() else condition


# The last power of e that surely is no infinity.
_LARGEST_EXPONENT = 709.0


def _same(function: np.ufunc, value: Any, may_warn: bool) -> Any:
    """NumPy's function of an array or a float.

    Those of `math` differ from it in the last bit wherever NumPy has vector instructions for it.
    """
    if may_warn:
        with np.errstate(all="ignore"):
            result = function(value)
    else:
        result = function(value)
    return result if type(result) is ndarray else float(result)


@overload
def exp(value: float, /) -> float: ...
@overload
def exp(value: Array, /) -> Array: ...
def exp(value: Any, /) -> Any:
    """e to the power of `value`, inf where no float holds it."""
    return _same(np.exp, value, type(value) is ndarray or not value < _LARGEST_EXPONENT)


@overload
def log(value: float, /) -> float: ...
@overload
def log(value: Array, /) -> Array: ...
def log(value: Any, /) -> Any:
    """The natural logarithm, -inf of 0, NaN below.

    >>> log(0.0)
    -inf
    """
    return _same(np.log, value, type(value) is ndarray or not value > 0)


@overload
def log1p(value: float, /) -> float: ...
@overload
def log1p(value: Array, /) -> Array: ...
def log1p(value: Any, /) -> Any:
    """The natural logarithm of 1 + `value`, -inf of -1, NaN below."""
    return _same(np.log1p, value, type(value) is ndarray or not value > -1)


@overload
def sqrt(value: float, /) -> float: ...
@overload
def sqrt(value: Array, /) -> Array: ...
def sqrt(value: Any, /) -> Any:
    """The square root, NaN below 0."""
    return _same(np.sqrt, value, type(value) is ndarray or not value >= 0)


@overload
def logaddexp(first: float, second: float, /) -> float: ...
@overload
def logaddexp(first: Array, second: Values, /) -> Array: ...
@overload
def logaddexp(first: Values, second: Array, /) -> Array: ...
def logaddexp(first: Any, second: Any, /) -> Any:
    """log(e^first + e^second), also where either is far below or above what e^x can hold.

    >>> round(logaddexp(1000.0, 1000.0), 3)
    1000.693
    """
    if type(first) is ndarray or type(second) is ndarray:
        return np.logaddexp(first, second)
    if first == second:  # infinite ones, too, whose difference is no number
        return first + _LOG_2
    larger, smaller = (first, second) if first >= second else (second, first)
    return larger + math.log1p(math.exp(smaller - larger))


@overload
def expected_maximum(count: float, /) -> float: ...
@overload
def expected_maximum(count: NDArray[Any], /) -> Array: ...
def expected_maximum(count: Any, /) -> Any:
    """Expected largest of `count` standard normal draws, 0 of one (Blom 1958 approximation).

    Counts are whole: fractions are cut off.

    >>> expected_maximum(1)
    0.0
    >>> round(expected_maximum(100), 2)  # 2.51 in tables
    2.5
    """
    if type(count) is ndarray:
        whole = count.astype(np.intp)
        if int(whole.max(initial=0)) < _MOST_TABLED:
            return _tabled()[whole]
        # Few numbers stand in many rows: each is worked out once.
        known = np.zeros(int(whole.max(initial=0)) + 1)
        present = np.flatnonzero(np.bincount(whole.ravel()))
        known[present] = [_largest_of(number) for number in present.tolist()]
        return known[whole]
    return _largest_of(int(count))


_LOG_2 = math.log(2.0)
# Blom, Statistical Estimates and Transformed Beta-Variables, 1958: quantile (n − a) / (n + 1 − 2a).
_BLOM = 0.375
# Counts of which all are worked out together, in some milliseconds.
_MOST_TABLED = 1 << 14


@lru_cache(maxsize=1)
def _tabled() -> Array:
    return np.array([_largest_of(count) for count in range(_MOST_TABLED)])


@lru_cache(maxsize=1 << 16)
def _largest_of(count: int) -> float:
    return _STANDARD_NORMAL.inv_cdf((count - _BLOM) / (count + 1 - 2 * _BLOM)) if count > 1 else 0.0


_STANDARD_NORMAL = NormalDist()
