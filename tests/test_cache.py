"""What is kept: each thing made once, the least recently used forgotten first."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from estimator.cache import Cache
from estimator.estimates.engine import Engine
from estimator.estimates.request import EstimateRequest
from tests.synthetic import Machine, perceptron


class Owner:
    """Something that values are made of."""


def test_a_value_is_made_once_for_the_same_objects_and_details() -> None:
    cache, one, other = Cache(1 << 20), Owner(), Owner()
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    for _ in range(2):
        assert cache.get("kind", (one,), lambda: make("one"), 8) == "one"
        assert cache.get("kind", (other,), lambda: make("other"), 8) == "other"
        assert cache.get("kind", (one,), lambda: make("larger"), 16) == "larger"
    assert made == ["one", "other", "larger"]


def test_the_least_recently_used_leave_first() -> None:
    # Each holds 10 kB and what an entry costs; the limit is room for three of them.
    cache, owner = Cache(3 * 11_500), Owner()

    def value(number: int) -> np.ndarray:
        return cache.get("array", (owner,), lambda: np.zeros(1250), number)

    first, second, third = value(1), value(2), value(3)
    assert value(1) is first
    value(4)
    assert cache.size_bytes <= cache.limit_bytes
    assert value(1) is first
    assert value(2) is not second
    del third


def test_bytes_that_a_value_takes_up_later_count() -> None:
    cache, owner = Cache(10_000), Owner()
    cache.get("small", (owner,), lambda: 1, "a")
    cache.get("small", (owner,), lambda: 2, "b")
    cache.grown(np.zeros(1125), "small", (owner,), "b")
    assert len(cache) == 1


def test_an_object_that_stands_in_many_places_counts_as_one() -> None:
    def size_bytes(values: list[tuple[float, ...]]) -> int:
        cache, owner = Cache(1 << 30), Owner()
        cache.get("values", (owner,), lambda: values)
        return cache.size_bytes

    numbers = (1.0,) * 100
    empty, places = size_bytes([]), 8 * 10_000
    assert size_bytes([numbers] * 10_000) == pytest.approx(empty + places, rel=0.2)
    # A tuple of 100 places, and one number that stands in all.
    each = 8 * 100
    others = [(float(first),) * 100 for first in range(10_000)]
    assert size_bytes(others) == pytest.approx(empty + places + 10_000 * each, rel=0.2)


def test_programs_that_tables_keep_count_however_often_the_tables_are_used() -> None:
    graph, profile = perceptron([64, 64, 64], batch=8), Machine().profile()
    trial = Engine()

    def program(engine: Engine, batch: int) -> None:
        engine.estimate(EstimateRequest.of(graph, "1x2:m", batch_per_gpu=batch, profile=profile))

    room, sizes = 20, []
    for batch in range(1, 3 * room + 1):
        program(trial, batch)
        sizes.append(trial.cache.size_bytes)
    limit_bytes = sizes[room - 1]
    assert sizes[-1] > 2.5 * limit_bytes
    del trial
    gc.collect()
    tracemalloc.start()
    try:
        engine = Engine(cache_bytes=limit_bytes)
        for most in range(1, 3 * room, 2):
            for batch in range(1, most + 1):
                program(engine, batch)
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What Python adds to objects is half as much at most as what is counted.
    assert held_bytes <= 1.5 * limit_bytes


def test_what_fails_is_raised_and_not_kept() -> None:
    cache, owner = Cache(1 << 20), Owner()

    def fail() -> int:
        raise LookupError("no such thing")

    with pytest.raises(LookupError):
        cache.get("kind", (owner,), fail)
    assert len(cache) == 0
    assert cache.get("kind", (owner,), lambda: 3) == 3


def test_threads_that_ask_at_once_wait_for_one_that_makes_it() -> None:
    cache, owner, begun = Cache(1 << 20), Owner(), threading.Event()
    made: list[int] = []

    def make() -> object:
        begun.wait(5)
        made.append(1)
        return object()

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(cache.get, "kind", (owner,), make) for _ in range(8)]
        begun.set()
        assert len({id(each.result()) for each in found}) == 1
    assert len(made) == 1


@dataclass(frozen=True)
class Held:
    """A value that others may hold."""

    data: np.ndarray


def test_what_another_value_holds_counts_once_and_leaves_after_it() -> None:
    # An array of 10 kB that two others hold, and room for no more.
    cache, owner = Cache(14_000), Owner()
    part = cache.get("part", (owner,), lambda: Held(np.zeros(1250)))
    for number in (1, 2):
        cache.get("whole", (owner,), lambda: (part,), number)
    assert cache.size_bytes < 14_000
    # It is the least recently used, but its memory is not free while they hold it.
    cache.grown(2_000, "whole", (owner,), 2)
    assert cache.get("part", (owner,), lambda: Held(np.zeros(1))) is part


def test_garbage_is_collected_again_once_a_value_is_made() -> None:
    cache, owner = Cache(1 << 20), Owner()
    collects: list[bool] = []

    def part() -> int:
        collects.append(gc.isenabled())
        return 1

    def whole() -> int:
        found = cache.get("part", (owner,), part)
        collects.append(gc.isenabled())
        return found

    def failing() -> int:
        raise ValueError("not made")

    cache.get("whole", (owner,), whole)
    with pytest.raises(ValueError, match="not made"):
        cache.get("failing", (owner,), failing)
    assert collects == [False, False]
    assert gc.isenabled()
