"""The run on a GPU: its cases, its report, and what another memory makes of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_accuracy import assemble, figures, gpu_cases
from gpu_steps import Case
from records import Records

from estimator.machines.profile import Device, KernelCost, KernelPoint, MachineProfile, Provenance
from estimator.tensors import OpCall, TensorSpec

MEASURED = Provenance(source="measured")


def test_the_cases_are_those_of_the_issue() -> None:
    cases = gpu_cases()
    assert len({case.key for case in cases}) == len(cases) <= 75
    assert len({case.workload for case in cases}) >= 16
    eager = [case for case in cases if case.execution == "eager" and case.precision != "tf32"]
    for workload in {case.workload for case in cases}:
        own = {(case.batch, case.precision) for case in eager if case.workload == workload}
        assert len(own) == 4  # two batch sizes, two precisions
    compiled = [case for case in cases if case.execution == "compiled"]
    assert [case.precision for case in compiled] == ["bf16-amp"] * 4
    assert sum(case.precision == "tf32" for case in cases) == 3


def test_cases_without_measurement_or_prediction_stay_with_their_reason(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    done, lost, later = (Case(workload=w, batch=2, precision="fp32") for w in "abc")
    said = {"low_s": 0.9, "high_s": 1.1, "bottleneck": "the host", "op_time_in_grid_ratio": 0.0}
    for case in (done, lost):
        records.add(
            {"kind": "prediction", "key": case.key, "method": "probe", "predicted_s": 1.0, **said}
            | {"peak_memory_bytes": 90 << 20}
        )
    records.add(
        {"kind": "measurement", "key": done.key, "step_s": 1.25, "steps_s": [1.25] * 15}
        | {"host_s": 1.2, "peak_bytes": 110 << 20, "allocated_before_bytes": 10 << 20}
    )
    records.add({"kind": "failure", "key": lost.key, "reason": "OutOfMemoryError: no"})
    line = TensorSpec((8,))
    call = OpCall("aten.relu.default", (line,), outputs=(line,))
    kernel = KernelCost(
        target=call.target,
        dtype="float32",
        points=(KernelPoint(call=call.encode(), warm_s=1e-6, cold_s=1e-6),),
        provenance=MEASURED,
    )
    card = Device(kind="cuda", index=0, name="NVIDIA H100", memory_bytes=80 << 30)
    profile = MachineProfile(name="m", devices=(card,), kernels=(kernel,), provenance=MEASURED)
    found = {case["id"]: case for case in assemble([done, lost, later], profile, records)}
    assert found[f"{done.key}-probe"]["status"] == "ok"
    assert found[f"{done.key}-probe"]["peak_measured_bytes"] == 100 << 20
    assert found[f"{done.key}-measured"]["status"] == "no_prediction"
    assert found[f"{lost.key}-probe"]["reason"] == "OutOfMemoryError: no"
    assert found[f"{later.key}-probe"]["status"] == "not_measured"
    (figure,) = figures(list(found.values()))
    # 90 of 100 MiB.
    assert figure["value"] == pytest.approx(0.1)
