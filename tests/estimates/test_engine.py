"""What an engine keeps: the same answers from many threads as from one, everything made once."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import estimator.machines.catalogue
import estimator.timeline.rank.program as program
from estimator.api import estimate, prepare
from estimator.coefficients import Coefficients
from estimator.errors import UnknownMachineError, WorkloadError
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.estimate import FITS, Estimate, fits_code, interval_ratio
from estimator.estimates.request import EstimateRequest
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.timeline import assumptions
from estimator.timeline.collectives import costs
from estimator.timeline.strategies.ddp import BucketedNetwork
from tests.synthetic import Machine, in_blocks, perceptron, with_every_collective

THREADS = 16
GRAPHS = (perceptron([96] * 13, batch=8), in_blocks(perceptron([64] * 9, batch=4)))


class Question(NamedTuple):
    graph: OpGraph
    allocation: str
    batch: int
    strategy: str


QUESTIONS = [
    Question(graph, f"{nodes}x{devices}:{machine}", batch, strategy)
    for graph in GRAPHS
    for batch in (4, 8, 12)
    for strategy in ("ddp", "fsdp", "zero2:bucket=64KiB")
    for nodes, devices in ((1, 1), (2, 2), (1, 4))
    for machine in ("slow", "fast")
]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two machines that no thread has read yet."""
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    monkeypatch.setattr(
        estimator.machines.catalogue, "_loaded", type(estimator.machines.catalogue._loaded)()
    )
    for name, shape in (
        ("slow", Machine(memory_contention=1.4)),
        ("fast", Machine(flops_per_s=3e11, memory_bytes_per_s=6e10)),
    ):
        profile = with_every_collective(shape.profile())
        replace(profile, name=name).save(tmp_path / "machines" / f"{name}.json")
    return tmp_path


def ask(engine: Engine, question: Question) -> tuple[float, int]:
    answer = engine.estimate(
        EstimateRequest.of(
            question.graph,
            question.allocation,
            batch_per_gpu=question.batch,
            strategy=question.strategy,
        )
    )
    return answer.step_time_s, answer.peak_memory_bytes


def ask_at_once(engine: Engine) -> list[tuple[float, int]]:
    """Every question by one of many threads, all of which begin together."""
    together = threading.Barrier(THREADS)

    def some(first: int) -> list[tuple[int, tuple[float, int]]]:
        together.wait(10)
        return [(n, ask(engine, QUESTIONS[n])) for n in range(first, len(QUESTIONS), THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(pair for part in pool.map(some, range(THREADS)) for pair in part)
    return [found[number] for number in range(len(QUESTIONS))]


def test_threads_that_ask_at_once_get_the_answers_of_one(machines: Path) -> None:
    at_once = ask_at_once(Engine())
    one = Engine()
    assert at_once == [ask(one, question) for question in QUESTIONS]


def test_programs_are_compiled_once_however_many_threads_ask(
    machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: Counter[tuple[Any, ...]] = Counter()
    real = program._compile

    def counted(asked: Any, rules: Any, *more: Any) -> Any:
        of = id(asked.graph), asked.bound.batch, asked.profile.name, asked.devices_busy
        compiled[*of, asked.merging, rules.strategy] += 1
        return real(asked, rules, *more)

    monkeypatch.setattr(program, "_compile", counted)
    ask_at_once(Engine())
    # Per graph, batch, strategy and machine: one device alone, two busy ones, four busy ones.
    assert len(compiled) == 2 * 3 * 3 * 2 * 3
    assert set(compiled.values()) == {1}


def test_one_file_is_read_once_however_many_threads_ask(machines: Path) -> None:
    together = threading.Barrier(THREADS)

    def load(_: int) -> int:
        together.wait(10)
        return id(estimator.machines.catalogue.load_profile("fast"))

    with ThreadPoolExecutor(THREADS) as pool:
        assert len(set(pool.map(load, range(THREADS)))) == 1


def test_what_was_prepared_is_not_compiled_when_asked(
    machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    real = program._compile

    def counted(*arguments: Any, **named: Any) -> Any:
        compiled.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(program, "_compile", counted)
    engine = Engine()
    engine.prepare(GRAPHS[0], ["slow", "fast"], batch_per_gpu=(4, 12))
    # Two machines, two batches: alone, and beside others with 1 to 9 devices in use.
    prepared = len(compiled)
    assert prepared == 2 * 2 * (1 + 9)
    asked = [
        f"{nodes}x{devices}:{machine}"
        for machine in ("slow", "fast")
        for nodes in (1, 2)
        for devices in (1, 2, 3, 4)
    ]
    for batch in (4, 12):
        for text in (*asked, "1x2:slow+1x3:fast"):
            engine.estimate(EstimateRequest.of(GRAPHS[0], text, batch_per_gpu=batch))
        estimate_many(GRAPHS[0], asked, batch_per_gpu=batch, engine=engine)
    assert len(compiled) == prepared
    engine.estimate(EstimateRequest.of(GRAPHS[0], "1x1:slow", batch_per_gpu=5))
    assert len(compiled) == prepared + 1


def test_only_a_graph_is_prepared() -> None:
    with pytest.raises(WorkloadError, match="found str; make one with trace_model"):
        prepare("hf:gpt2", ["t4"])  # type: ignore[arg-type]


def test_a_graph_is_prepared_for_names_paths_and_profiles_alone(tmp_path: Path) -> None:
    profile = Machine(devices=2).profile()
    profile.save(tmp_path / "m.json")
    prepare(GRAPHS[0], [profile, tmp_path / "m.json"])  # type: ignore[list-item]
    with pytest.raises(UnknownMachineError, match="found 3; write one such as h100-sxm"):
        prepare(GRAPHS[0], [3])  # type: ignore[list-item]


def test_what_an_engine_keeps_takes_no_more_memory_than_it_may() -> None:
    limit_bytes = 1 << 18
    profile = Machine(devices=4).profile()
    graphs = [perceptron([64 + n, *(96 for _ in range(10)), 8], batch=4) for n in range(4)]

    def held_bytes(engine: Engine) -> int:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for batch in range(2, 6):
            for graph in graphs:
                engine.estimate(
                    EstimateRequest.of(graph, "1x4:m", batch_per_gpu=batch, profile=profile)
                )
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    held_bytes(Engine())  # what is read once, by whichever engine
    tracemalloc.start()
    try:
        unbounded, bounded = Engine(), Engine(cache_bytes=limit_bytes)
        assert held_bytes(unbounded) > 2 * limit_bytes
        # Sizes are estimates.
        assert held_bytes(bounded) < 1.2 * limit_bytes
    finally:
        tracemalloc.stop()
    assert bounded.cache.size_bytes <= limit_bytes


def test_the_same_question_has_the_same_answer_until_what_it_was_made_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    path, graph = tmp_path / "machines" / "m.json", perceptron([64] * 3, batch=8)
    replace(Machine().profile(), name="m").save(path)
    first = estimate(graph, "1x2:m")
    assert estimate(graph, "1x2:m") is first
    assert estimate(graph, "1x2:m", batch_per_gpu=4) is not first
    # 8.0 == 8, and is no number of samples.
    estimate(graph, "1x2:m", batch_per_gpu=8)
    with pytest.raises(WorkloadError):
        estimate(graph, "1x2:m", batch_per_gpu=8.0)  # type: ignore[arg-type]
    replace(Machine(flops_per_s=1e9).profile(), name="m").save(path)
    slower = estimate(graph, "1x2:m")
    assert slower.step_time_s > 1.5 * first.step_time_s
    DEFAULT.cache.clear()
    again = estimate(graph, "1x2:m")
    assert again is not slower
    assert again.step_time_s == slower.step_time_s


def test_the_same_question_is_asked_anew_once_its_calibration_has_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    replace(Machine().profile(), name="m").save(tmp_path / "machines" / "m.json")
    graph, learnt = perceptron([64] * 3, batch=8), _Learnt()
    cold = estimate(graph, "1x2:m", calibration=learnt)
    assert estimate(graph, "1x2:m", calibration=learnt) is cold
    # What is asked without it meanwhile is another question.
    assert estimate(graph, "1x2:m") is estimate(graph, "1x2:m")
    assert estimate(graph, "1x2:m", calibration=learnt) is cold
    learnt.state = Coefficients(compute_ratio=2.0)
    assert estimate(graph, "1x2:m", calibration=learnt).step_time_s > cold.step_time_s


class _Learnt:
    """A calibration whose state is what it answers."""

    def __init__(self) -> None:
        self.state = Coefficients()

    def coefficients_for(self, questions: Any, _allocations: Any, _engine: Any) -> Any:
        return [self.state] * len(questions)


def test_an_interval_of_80_percent_is_1_28_standard_deviations_of_the_logarithm() -> None:
    # A tenth of a normal distribution lies above 1.2816 standard deviations: e^(1.2816 · 0.2).
    assert interval_ratio(0.2) == pytest.approx(1.2922, rel=1e-4)
    assert interval_ratio(0.0) == 1.0


@pytest.mark.parametrize(
    ("used_ratio", "knows_all", "fits"),
    [
        # A tenth must be left to be sure, and a twentieth too much is forgiven.
        (0.90, True, "yes"),
        (0.91, True, "uncertain"),
        (1.05, True, "uncertain"),
        (1.06, True, "no"),
        (0.10, False, "uncertain"),
        (1.06, False, "no"),
    ],
)
def test_a_model_fits_surely_perhaps_or_not(used_ratio: float, knows_all: bool, fits: str) -> None:
    assert FITS[int(fits_code(np.float64(used_ratio), knows_all))] == fits


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "ps:1"])
def test_an_estimate_from_another_process_is_equal(strategy: str) -> None:
    graph = perceptron([64] * 4, batch=8, target="cuda")
    found = estimate(graph, "2x2:dgx-a100", strategy=strategy)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert hash(again) == hash(found)
    assert again != estimate(graph, "1x1:dgx-a100")


PROFILE = Machine(devices=4).profile()


def test_a_pickled_graph_is_small_and_equal_and_has_the_same_hash() -> None:
    graph = perceptron([64] * 300, batch=8)
    pickled = pickle.dumps(graph)
    again = pickle.loads(pickled)
    assert again == graph
    assert hash(again) == hash(graph)
    assert {graph: "known"}[again] == "known"
    # The operators of so many equal layers are alike: a hundred bytes are left of each.
    assert len(pickled) < 100 * len(graph.ops)


@pytest.mark.parametrize("loader", [None, "prep=80ms,workers=2"])
def test_an_estimate_is_pickled_without_its_plan_and_says_the_same(loader: str | None) -> None:
    graph = perceptron([64] * 300, batch=8)
    answer = estimate(graph, "1x2:m", profile=PROFILE, loader=loader)
    assert bool(answer.input_remedy) == (loader is not None)
    pickled = pickle.dumps(answer)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled)
    assert again.to_dict() == answer.to_dict()
    assert repr(again) == repr(answer)
    assert hash(again) == hash(answer)
    assert pickle.loads(pickle.dumps(again)).to_dict() == answer.to_dict()
    with pytest.raises(WorkloadError, match="pickled has no timeline"):
        _ = again.timeline


def test_an_estimate_is_pickled_small_where_python_replaces_getstate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What CPython before 3.11.4 does with every frozen dataclass that has slots.
    replacement = dataclasses._dataclass_getstate  # type: ignore[attr-defined]
    monkeypatch.setattr(Estimate, "__getstate__", replacement)
    answer = estimate(perceptron([64] * 300, batch=8), "1x2:m", profile=PROFILE)
    pickled = pickle.dumps(answer)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled).to_dict() == answer.to_dict()


def test_a_warm_answer_and_its_reasons_look_at_no_collective_or_operator_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def counted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            asked.append(name)
            return of(*words, **named)

        return call

    for of, name in (
        (costs, "lines_of"),
        (assumptions, "_class_assumptions"),
        (BucketedNetwork, "communication"),
    ):
        monkeypatch.setattr(of, name, counted(name, getattr(of, name)))
    graph = perceptron([64] * 4, batch=8, target="cuda")
    for _ in ("cold", "warm"):
        asked.clear()
        DEFAULT.estimate(EstimateRequest.of(graph, "2x2:dgx-a100")).to_dict()
    # What reduces gradients is kept for the kinds of ranks and the group's shape.
    assert not asked
