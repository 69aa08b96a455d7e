"""Read what a table is indexed with."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import RowError, quoted


def row_number(row: Any, rows: int) -> int:
    """One row of a table of so many, from 0 on; raises RowError where there is none."""
    chosen = chosen_rows(row, rows)
    if not isinstance(chosen, int):
        raise _no_such(row, rows)
    return chosen


def chosen_rows(asked: Any, rows: int) -> int | slice | NDArray[np.intp]:
    """A row of so many from 0 on, a slice, or rows of several or a mask; raises RowError."""
    try:
        if isinstance(asked, slice):
            asked.indices(rows)
            return asked
        if np.ndim(asked) == 0 and not isinstance(asked, bool):
            return range(rows)[operator.index(asked)]
        several = np.asarray(asked)
        if several.ndim == 1:
            kept = several if len(several) else several.astype(np.intp)
            return np.asarray(np.arange(rows)[kept])
    except (IndexError, TypeError, ValueError):
        pass
    raise _no_such(asked, rows)


def _no_such(asked: Any, rows: int) -> RowError:
    return RowError(
        f"the table has {rows:,} rows, found row {quoted(asked)}; give numbers below {rows:,}, a "
        "mask of that length or a slice"
    )
