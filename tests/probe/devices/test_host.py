"""What mixing kinds of operators costs the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from estimator.probe.devices import host
from estimator.probe.devices.backend import CpuBackend


def test_ops_of_many_kinds_are_compared_with_each_kind_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loops:
        """A call takes 1 s, and half a second more for each further kind beside it."""

        def __init__(self, _backend: Any, *, cools: bool) -> None:
            self.more_s = 2.0 if cools else 0.5

        def forward_s(self, calls: Sequence[Any]) -> float:
            return len(calls) * (1.0 + self.more_s * (len(set(calls)) - 1))

        backward_s = forward_s

    monkeypatch.setattr(host, "_Loops", Loops)
    backend = CpuBackend()
    # Eight kinds of ops and nodes, two of views.
    assert host.mixing_costs(backend, cools=False) == (3.5, 0.5, 3.5)
    assert host.mixing_costs(backend, cools=True) == (14.0, 2.0, 14.0)


def test_mixing_costs_of_this_machine_are_microseconds() -> None:
    costs = host.mixing_costs(CpuBackend(), cools=True)
    assert all(0.0 <= seconds < 1e-3 for seconds in costs)
