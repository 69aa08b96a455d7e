"""Jobs of one process share its time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from estimator.probe.devices import jobs, ranks

given: list[float] = []
now = [0.0]


def takes_six_seconds(_backend: Any, _emit: Any, *, budget_s: float) -> None:
    """A job that does not look at the clock."""
    given.append(budget_s)
    now[0] += 6.0


def test_a_job_that_takes_too_long_leaves_the_others_less_and_none_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given.clear()
    now[0] = 101.0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ranks, "report", lambda _: None)
    job = {"function": f"{__name__}:takes_six_seconds", "arguments": {}, "in_pieces": False}
    planned = [("host", 2.0), ("updates", 2.0), ("kernels", 8.0)]
    jobs.work(
        0,
        1,
        {
            "kind": "cpu",
            "index": 0,
            "begun": 100.0,
            "watching": None,
            "jobs": [{**job, "part": part, "budget_s": seconds} for part, seconds in planned],
        },
    )
    # 11 of 12 s are left for 12 s of plans, 5 for the last 10, then none: a quarter of 8.
    assert given == pytest.approx([11 * 2 / 12, 5 * 2 / 10, 8 / 4])
