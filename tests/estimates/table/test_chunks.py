"""Tables in pieces, worked out on an executor's workers, are those that are worked out here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import estimator as est
from estimator import estimate
from estimator.advise.scaling import sweep
from estimator.errors import AllocationError, StrategyError, WorkloadError
from estimator.estimates.table import COLUMNS, EstimateTable, estimate_chunks, estimate_many
from estimator.placement.columns import AllocationGrid
from tests.graph.partition.test_stages import traced
from tests.synthetic import Machine, perceptron, with_every_collective

GRAPH = perceptron([64, 64], target="cuda")
TEXTS = [f"{nodes}x{devices}:t4-g4dn" for nodes in range(1, 60) for devices in (1, 2, 4)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    # A fork of a process with torch's threads may hang.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        yield executor


def check(tables: list[EstimateTable], texts: list[str] = TEXTS, **asked: Any) -> None:
    """The pieces are the whole, in order."""
    whole = estimate_many(GRAPH, texts, **asked)
    assert [str(t.allocation(row)) for t in tables for row in range(len(t))] == texts
    for name in COLUMNS:
        joined = np.concatenate([getattr(table, name) for table in tables])
        np.testing.assert_array_equal(joined, getattr(whole, name), err_msg=name)


def test_a_pool_of_processes_gives_the_same_columns(pool: Executor) -> None:
    asked = {"strategy": "zero1", "batch_per_gpu": 8}
    check(list(estimate_chunks(GRAPH, TEXTS, rows=7, executor=pool, **asked)), **asked)
    # The workers have the graph by now; another question is another.
    check(list(estimate_chunks(GRAPH, TEXTS, rows=7, executor=pool)))


def quickest(table: EstimateTable) -> tuple[str, float]:
    row = int(np.argmax(table.samples_per_s))
    return str(table.allocation(row)), float(table.samples_per_s[row])


def test_workers_make_of_a_grid_what_is_asked_of_each_piece(pool: Executor) -> None:
    grid = AllocationGrid("1..59x1,2,4:t4-g4dn")
    assert [grid.text(row) for row in range(len(grid))] == TEXTS
    whole = quickest(estimate_many(GRAPH, TEXTS))
    found = list(estimate_chunks(GRAPH, grid, rows=10, executor=pool, reduce=quickest))
    assert len(found) == 18  # 177 rows
    assert max(found, key=lambda each: each[1]) == whole
    assert found == list(estimate_chunks(GRAPH, grid, rows=10, reduce=quickest))
    assert found == list(map(quickest, estimate_chunks(GRAPH, TEXTS, rows=10)))
    check(list(estimate_chunks(GRAPH, grid, rows=10)))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rows": 0}, "rows is .?0.?; write a number of rows from 1"),
        ({"rows": 2.5}, "rows is .?2.5"),
        ({"reduce": "sum"}, "reduce is 'sum'; give a function"),
    ],
)
def test_bad_pieces_are_refused_at_once(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        estimate_chunks(GRAPH, TEXTS, **asked)


def test_threads_give_the_same_columns() -> None:
    with ThreadPoolExecutor(3) as executor:
        check(list(estimate_chunks(GRAPH, TEXTS, rows=5, executor=executor)))


def test_the_graph_is_sent_once_to_each_worker() -> None:
    class Counted(ThreadPoolExecutor):
        sent = 0

        def submit(self, *words: Any, **more: Any) -> Future[Any]:
            Counted.sent += any(isinstance(word, bytes) for word in words)
            return super().submit(*words, **more)

    with Counted(1) as executor:
        check(list(estimate_chunks(GRAPH, TEXTS * 10, rows=10, executor=executor)), TEXTS * 10)
        # Those sent ahead before the first was answered, at most; none of the other 145 pieces.
        assert 1 <= Counted.sent <= 32


def test_a_worker_that_dies_loses_nothing() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        tables = estimate_chunks(GRAPH, TEXTS * 20, rows=30, executor=executor)
        found = [next(tables)]
        os.kill(next(iter(executor._processes)), signal.SIGKILL)
        check([*found, *tables], TEXTS * 20)


def test_an_error_of_a_worker_is_that_of_its_row(pool: Executor) -> None:
    texts = [*TEXTS[:9], "1x9:t4-g4dn"]
    with pytest.raises(AllocationError, match=r"row 9: .* asks for 9 devices"):
        list(estimate_chunks(GRAPH, texts, rows=5, executor=pool, strict=True))


def test_what_cannot_be_sent_is_told(pool: Executor) -> None:
    class Local:
        def coefficients_for(self, *_: Any) -> None: ...

    with pytest.raises(WorkloadError, match="cannot be sent to other processes"):
        list(estimate_chunks(GRAPH, TEXTS, executor=pool, calibration=Local()))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_gives_the_same_columns_though_a_worker_is_killed() -> None:
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        tables = estimate_chunks(GRAPH, TEXTS * 20, rows=30, executor=client.get_executor())
        found = [next(tables)]
        pids = client.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        check([*found, *tables], TEXTS * 20)


def test_ray_gives_the_same_columns() -> None:
    ray = pytest.importorskip("ray", reason="needs ray")
    from estimator.integrations.schedulers.launchers import RayExecutor

    ray.init(num_cpus=2, include_dashboard=False)
    try:
        check(list(estimate_chunks(GRAPH, TEXTS, rows=30, executor=RayExecutor())))
    finally:
        ray.shutdown()


def test_without_ray_its_executor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from estimator.integrations.schedulers.launchers import RayExecutor

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkloadError, match="RayExecutor needs Ray"):
        RayExecutor()


def test_a_sweep_on_a_pool_of_processes_is_that_made_here(pool: Executor) -> None:
    answer_of = partial(estimate, GRAPH)
    patterns = ["1..3x1..2:t4-g4dn", "1x9:t4-g4dn"]
    found = sweep(patterns, answer_of, executor=pool)
    assert [row.to_dict() for row in found] == [row.to_dict() for row in sweep(patterns, answer_of)]
    assert "asks for 9 devices" in found[-1].refusal


def test_mpi_gives_the_same_columns(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    mpiexec = shutil.which(
        "mpiexec", path=os.pathsep.join([sys.prefix + "/bin", os.environ["PATH"]])
    )
    if mpiexec is None:
        pytest.skip("needs mpiexec")
    script = tmp_path / "asked.py"
    script.write_text(
        "from mpi4py.futures import MPIPoolExecutor\n"
        "from estimator import estimate_chunks\n"
        "from tests.estimates.table.test_chunks import GRAPH, TEXTS, check\n"
        "if __name__ == '__main__':\n"
        "    with MPIPoolExecutor() as executor:\n"
        "        check(list(estimate_chunks(GRAPH, TEXTS, rows=30, executor=executor)))\n"
    )
    words = [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures", str(script)]
    root = Path(__file__).resolve().parents[3]
    subprocess.run(words, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(root)})


PROFILE = with_every_collective(Machine(rank_jitter_ratio=0.0).profile())
TABLE_GRAPH = traced(4)
ALLOCATIONS = ["1x4:m", "1x2:m", "2x2:m", "1x3:m", "1x1:m"]
LAYOUTS = ["pp=2,dp=*", None, "pp=4,schedule=gpipe,dp=1", "pp=2,dp=*", "dp=*"]


def test_each_row_has_its_layout() -> None:
    table = est.estimate_many(
        TABLE_GRAPH, ALLOCATIONS, layout=LAYOUTS, accumulation_steps=4, profile=PROFILE
    )
    assert table.answered.tolist() == [True, True, True, False, True]
    assert "takes a multiple of 2 ranks, found 3" in table.errors[3]
    for row in (0, 1, 2, 4):
        answer = est.estimate(
            TABLE_GRAPH,
            ALLOCATIONS[row],
            layout=LAYOUTS[row],
            accumulation_steps=4,
            profile=PROFILE,
        )
        assert table.step_time_s[row] == pytest.approx(answer.step_time_s, rel=1e-9)
        assert table.idle_s[row] == pytest.approx(answer.breakdown.idle_s, rel=1e-9)
        assert table.peak_memory_bytes[row] == answer.peak_memory_bytes
        assert table.global_batch[row] == answer.global_batch
        assert table.nodes[row] == (2 if row == 2 else 1)
        assert table[row].layout == answer.layout
    assert (table[2:].idle_s == table.idle_s[2:])[[0, 2]].all()
    assert table[2:][0].layout == "pp=4,schedule=gpipe,dp=1"


def test_one_layout_is_that_of_all_rows_and_batches_go_with_it() -> None:
    batches = np.array([16, 32])
    table = est.estimate_many(
        TABLE_GRAPH,
        ["1x4:m", "1x8:m"],
        layout="pp=2,dp=*",
        global_batch=batches,
        accumulation_steps=2,
        profile=PROFILE,
    )
    assert table.global_batch.tolist() == [16, 32]
    assert table.batch_per_gpu.tolist() == [4, 4]
    assert (table.idle_s > 0).all()


def test_a_column_of_another_length_is_refused_in_one_sentence() -> None:
    with pytest.raises(StrategyError, match="one for each of 2 allocations, found"):
        est.estimate_many(TABLE_GRAPH, ["1x2:m", "1x4:m"], layout=["pp=2"], profile=PROFILE)
    with pytest.raises(StrategyError, match=r"row 1: layout 'pp=2.*' takes a multiple of 2 ranks"):
        est.estimate_many(
            TABLE_GRAPH,
            ["1x2:m", "1x3:m"],
            layout="pp=2",
            accumulation_steps=2,
            profile=PROFILE,
            strict=True,
        )
