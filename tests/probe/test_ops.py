"""Timing a graph's own operators by replaying it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.errors import ProbeError, StoreError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op, OpTiming, Parameter, Value
from estimator.graph.memory.sizes import update_call
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile, Provenance
from estimator.probe import ops as ops_module
from estimator.probe import ops as replay_module
from estimator.probe.devices.backend import CpuBackend
from estimator.probe.devices.calls import real_arguments
from estimator.probe.devices.inventory import core_groups, read_cpu
from estimator.probe.ops import (
    distinct_calls,
    index_bounds,
    keep_timings,
    make_tensor,
    measure_ops,
    quiet_passes,
    read_timings,
    replay,
    replay_plan,
)
from estimator.tensors import OpCall, TensorSpec

SQUARE = TensorSpec((8, 8))


def here(**hardware: str) -> MachineProfile:
    cpu = read_cpu()
    return MachineProfile(
        name="local",
        devices=core_groups(cpu, 1),
        hardware={"cpu": cpu.model, **hardware},
        provenance=Provenance(source="measured"),
    )


def step(*rows: tuple[str, tuple[int, ...], tuple[int, ...]], values: int) -> OpGraph:
    """Ops (target, inputs, outputs) over 8 × 8 matrices; value 0 is the only parameter."""
    ops = tuple(
        Op(
            name=f"op{number}",
            call=(call := OpCall(target, (SQUARE,) * len(inputs), (), (SQUARE,) * len(outputs))),
            other_call=call,
            phase="forward",
            module="",
            inputs=inputs,
            outputs=outputs,
            is_view=target == "aten.t.default",
        )
        for number, (target, inputs, outputs) in enumerate(rows)
    )
    return OpGraph(
        name="step",
        target="cpu",
        precision="fp32",
        optimizer="sgd",
        batch=None,
        other_batch=None,
        ops=ops,
        values=tuple(
            Value(spec=SQUARE, other_spec=SQUARE, kind="activation" if number else "parameter")
            for number in range(values)
        ),
        parameters=(Parameter(name="w", spec=SQUARE, gradient=3, ready_after=2),),
    )


CHAIN = step(
    ("aten.mm.default", (0, 0), (1,)),
    ("aten.t.default", (1,), (2,)),
    ("aten.mm.default", (2, 0), (3,)),
    ("aten.relu.default", (2,), (4,)),
    values=5,
)


def test_equal_calls_are_timed_once_and_views_never() -> None:
    assert [call.target for call in distinct_calls(CHAIN.at())] == [
        "aten.mm.default",
        "aten.relu.default",
    ]


def test_values_are_freed_at_their_last_use_but_parameters_and_gradients_stay() -> None:
    freed = [row[4] for row in replay_plan(CHAIN.at())["ops"]]
    # 1 is last read by the view, 2 and 4 by the last op; 0 is the parameter, 3 its gradient.
    assert [sorted(values) for values in freed] == [[], [1], [], [2, 4]]


def test_an_integer_buffer_is_bounded_by_the_tables_it_indexes() -> None:
    positions, narrow = TensorSpec((1, 6), "int64"), TensorSpec((6,), "int64")
    view = OpCall("aten.view.default", (positions, (6,)), (), (narrow,))
    lookups = [
        OpCall("aten.embedding.default", (TensorSpec((rows, 4)), narrow), (), (TensorSpec((6, 4)),))
        for rows in (50, 30)
    ]
    ops = [
        Op(
            name=f"op{number}",
            call=call,
            other_call=call,
            phase="forward",
            module="",
            inputs=inputs,
            outputs=outputs,
            is_view=number == 0,
        )
        for number, (call, inputs, outputs) in enumerate(
            [(view, (2,), (3,)), (lookups[0], (0, 3), (4,)), (lookups[1], (1, 3), (5,))]
        )
    ]
    specs = [TensorSpec((50, 4)), TensorSpec((30, 4)), positions, narrow, *[TensorSpec((6, 4))] * 2]
    graph = OpGraph(
        name="lookups",
        target="cpu",
        precision="fp32",
        optimizer="sgd",
        batch=None,
        other_batch=None,
        ops=tuple(ops),
        values=tuple(Value(spec=spec, other_spec=spec, kind="buffer") for spec in specs),
        parameters=(),
    )
    assert index_bounds(graph.at()) == {2: 30}


def test_a_replay_times_every_call_and_names_what_it_cannot_run() -> None:
    torch.set_num_threads(1)
    broken = step(
        ("aten.mm.default", (0, 0), (1,)),
        ("aten.no_such_operator.default", (1,), (2,)),
        ("aten.relu.default", (2,), (3,)),
        values=4,
    )
    emitted: list[dict[str, object]] = []
    replay(CpuBackend(), emitted.append, budget_s=5.0, plan=replay_plan(broken.at()))
    last = emitted[-1]
    assert [row[0] for row in last["timings"]] == [0, 2]  # type: ignore[attr-defined]
    assert all(row[1] > 0 for row in last["timings"])  # type: ignore[attr-defined]
    ((number, reason),) = last["skipped"]  # type: ignore[misc]
    assert number == 1
    assert "no_such_operator" in reason


def test_what_python_does_for_a_call_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return real_arguments(*given, **named)

    torch.set_num_threads(1)
    monkeypatch.setattr(replay_module, "real_arguments", slowly)
    emitted: list[dict[str, Any]] = []
    replay(CpuBackend(), emitted.append, budget_s=5.0, plan=replay_plan(CHAIN.at()))
    assert all(seconds < 0.005 for _, seconds, _ in emitted[-1]["timings"])


def test_passes_beside_a_slow_canary_are_left_out() -> None:
    assert quiet_passes([1.0, 1.1, 1.4, 1.05], None) == [0, 1, 3]
    assert quiet_passes([1.0, 1.1, 1.4, 1.05], 0.9) == [0]  # 1.15 · 0.9 = 1.035
    assert quiet_passes([1.0, 1.1], 2.0) == [0, 1]
    assert quiet_passes([], 1.0) == []


@pytest.mark.parametrize(
    ("beside", "median_s"),
    [
        # Two warm-ups; one of six passes is slower than 1.15 · 1.0 and left out.
        ([9.0, 9.0, 1.0, 1.1, 1.12, 2.0, 1.13, 1.14], 1.12),
        # Four quiet passes are too few: all six count.
        ([9.0, 9.0, 1.0, 1.1, 2.0, 3.0, 1.12, 1.14], 1.13),
    ],
)
def test_a_replay_tells_the_canary_beside_the_passes_that_count(
    beside: list[float], median_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    seen = iter(beside)
    monkeypatch.setattr(replay_module, "canary_s", lambda _, repeats: next(seen))
    monkeypatch.setattr(replay_module, "_is_enough", lambda passes, *_: passes == 6)
    emitted: list[dict[str, Any]] = []
    replay(CpuBackend(), emitted.append, budget_s=60.0, plan=replay_plan(CHAIN.at()))
    assert emitted[-1]["canary_s"] == pytest.approx(median_s)


def test_measured_calls_are_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    canaries: list[float] = []
    first = measure_ops(CHAIN, here(), budget_s=2.0, on_canary=canaries.append)
    assert len(canaries) == 1
    assert canaries[0] > 0
    assert set(first) == {*distinct_calls(CHAIN.at()), update_call(CHAIN)}
    assert all(timing.seconds > 0 for timing in first.values())

    def refuse(*_: object) -> None:
        raise AssertionError("it ran again")

    monkeypatch.setattr(ops_module, "run_job", refuse)
    assert measure_ops(CHAIN, here()) == first


def test_another_machine_is_refused() -> None:
    with pytest.raises(ProbeError, match="describes a machine with Some Other CPU"):
        measure_ops(CHAIN, here(cpu="Some Other CPU"))


def test_a_gpu_is_not_timed_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_module, "torch_sees_cuda", lambda: False)
    with pytest.raises(ProbeError, match=r"describes a .*A100.*, and torch finds no GPU here"):
        measure_ops(replace(CHAIN, target="cuda"), load_profile("a100-sxm-80gb"))


def test_timings_of_one_machine_are_not_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    keep_timings("one", {"relu": OpTiming(seconds=1.5, noise_ratio=0.1)})
    assert read_timings("one") == {"relu": OpTiming(seconds=1.5, noise_ratio=0.1)}
    assert read_timings("other") == {}
    # Another process has timed another model since this one read.
    keep_timings("one", {"add": OpTiming(seconds=0.5, noise_ratio=0.1)})
    assert read_timings("one").keys() == {"relu", "add"}


@pytest.mark.parametrize("text", ["{", "[1]", '{"relu": [1.5]}', '{"relu": ["fast", 0.1]}'])
def test_damaged_timings_are_named_with_what_to_do(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    keep_timings("one", {})
    (path,) = (tmp_path / "timings").iterdir()
    path.write_text(text)
    with pytest.raises(StoreError, match=r"cannot read the timings in .*; delete the file"):
        read_timings("one")


def test_made_tensors_have_the_strides_and_values_that_the_step_needs() -> None:
    turned = make_tensor(TensorSpec((4, 6), "float32", (1, 4)), "activation", None, None, "cpu")
    indices = make_tensor(TensorSpec((1000,), "int64"), "input", 3, 7, "cpu")
    variance = make_tensor(TensorSpec((100,)), "buffer", None, None, "cpu")
    unknown = make_tensor(TensorSpec((), "int64"), "constant", None, None, "cpu")
    assert turned.stride() == (1, 4)
    assert (int(indices.min()), int(indices.max())) == (3, 7)
    assert float(variance.min()) > 0
    assert int(unknown) == 1
