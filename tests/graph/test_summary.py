"""A job known only by summary is answered like any other, and impossible summaries are refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estimator.api import estimate
from estimator.errors import EstimatorError, ProfileError, StrategyError
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.summary import WorkloadSummary
from estimator.machines.profile import Contention, MachineProfile
from tests.conftest import Command
from tests.synthetic import CHOSEN, Machine, perceptron

FLOPS = {"parameter_bytes": 4_000_000, "tensors": 10, "flops_per_sample": 6e9}
# Steps of 0.1 s + 0.02 s a sample.
TIMES: dict[str, Any] = {
    "parameter_bytes": 4_000_000,
    "tensors": 10,
    "step_times": [(5, 0.2), (20, 0.5)],
    "machine": "synthetic",
}


@pytest.fixture
def machine() -> MachineProfile:
    return Machine().profile()


def timed(profile: MachineProfile, **changes: Any) -> OpGraph:
    return OpGraph.from_summary(**TIMES | changes, profile=profile)


def faster(profile: MachineProfile, times: float) -> MachineProfile:
    """A machine of another name whose devices have a higher peak."""
    peak = {"float32": times * profile.devices[0].peak_flops_per_s["float32"]}
    devices = tuple(replace(device, peak_flops_per_s=peak) for device in profile.devices)
    return replace(profile, name="other", devices=devices)


def test_parameters_are_spread_evenly_to_the_last_one() -> None:
    graph = OpGraph.from_summary(parameter_bytes=44, tensors=4, flops_per_sample=1e9)
    # 11 float32 parameters in 4 tensors.
    assert sorted(p.spec.numel for p in graph.parameters) == [2, 3, 3, 3]
    assert graph.parameter_bytes == 44


def test_sizes_of_tensors_are_worked_out_as_often_for_many_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Once for each operator took an hour for the 100,000 tensors that a summary may have.
    counted = []
    sizes = WorkloadSummary.numels.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        WorkloadSummary, "numels", property(lambda self: counted.append(0) or sizes(self))
    )
    for tensors in (2, 200):
        counted.append(1)
        OpGraph.from_summary(parameter_bytes=4000, tensors=tensors, flops_per_sample=1e9)
    few, many = "".join(map(str, counted)).split("1")[1:]
    assert few == many


def test_given_sizes_stand_in_the_order_in_which_gradients_are_ready() -> None:
    graph = OpGraph.from_summary(tensor_bytes=[400, 40, 4], flops_per_sample=1e9)
    assert [p.spec.nbytes for p in graph.parameters] == [4, 40, 400]


def test_gradients_are_ready_after_the_given_shares_of_the_backward_pass(
    machine: MachineProfile,
) -> None:
    graph = timed(
        machine, tensors=None, parameter_bytes=None, tensor_bytes=[40, 80], ready_ratios=[0.9, 0.25]
    )
    assert [p.spec.nbytes for p in graph.parameters] == [80, 40]
    program = estimate(graph, "1x1:synthetic", profile=machine).plan.kinds[0].program
    last_s = program.lanes.ends_s(0)
    ends_s = [last_s[p.ready_after] for p in graph.parameters if p.ready_after is not None]
    shares = [(end_s - program.lane.forward_s) / program.lane.backward_s for end_s in ends_s]
    assert shares == pytest.approx([0.25, 0.9])


@pytest.mark.parametrize("batch", [3, 5, 10, 20, 50])
def test_a_step_timed_alone_is_estimated_as_it_was_measured(
    machine: MachineProfile, batch: int
) -> None:
    answer = estimate(timed(machine), "1x1:synthetic", batch_per_gpu=batch, profile=machine)
    assert answer.step_time_s == pytest.approx(0.1 + 0.02 * batch)
    assert answer.breakdown.backward_s == pytest.approx(2 * answer.breakdown.forward_s)


def test_times_that_fall_with_the_batch_are_fitted_by_a_constant(machine: MachineProfile) -> None:
    graph = timed(machine, step_times=[(1, 0.5), (2, 0.4), (4, 0.4)])
    seconds = [
        estimate(graph, "1x1:synthetic", batch_per_gpu=batch, profile=machine).step_time_s
        for batch in (1, 64)
    ]
    # Least squares of 1 − c/t over t = 0.5, 0.4, 0.4: c = Σ(1/t) / Σ(1/t²) = 7 / 16.5.
    assert seconds == pytest.approx([7 / 16.5, 7 / 16.5])


def test_of_one_step_time_a_fifth_does_not_depend_on_the_batch(machine: MachineProfile) -> None:
    graph = timed(machine, step_times=[(8, 0.4)])
    assert graph.batch == 8
    answer = estimate(graph, "1x1:synthetic", batch_per_gpu=16, profile=machine)
    assert answer.step_time_s == pytest.approx(0.2 * 0.4 + 0.8 * 0.4 * 2)
    assert any("at batch 8 alone" in text for text in answer.assumptions)


def test_intervals_widen_away_from_the_batches_that_were_timed(machine: MachineProfile) -> None:
    graph = timed(machine)
    widths = [
        math.log(answer.high_s / answer.low_s)
        for answer in (
            estimate(graph, "1x1:synthetic", batch_per_gpu=batch, profile=machine)
            for batch in (10, 40, 160)
        )
    ]
    assert widths == sorted(widths)
    assert len(set(widths)) == 3


def test_another_machine_takes_as_much_less_time_as_its_peak_is_higher(
    machine: MachineProfile,
) -> None:
    other = faster(machine, 4)
    graph = timed(machine)
    answer = estimate(graph, "1x1:other", batch_per_gpu=5, profile=other)
    assert answer.step_time_s == pytest.approx(0.2 / 4)
    assert any("0.25 times as long on 'other'" in text for text in answer.assumptions)
    assert answer.provenance[0][:2] == ("step", "datasheet")


def test_busy_neighbours_slow_half_of_a_step_as_they_slow_memory(machine: MachineProfile) -> None:
    slowed = Contention(
        bound="memory", devices_busy=2, points=((1.0, 1.5), (1e9, 1.5)), provenance=CHOSEN
    )
    shared = replace(machine, contentions=(slowed,))
    graph = timed(shared)
    alone, beside = (
        estimate(graph, text, batch_per_gpu=20, profile=shared).breakdown.forward_s
        for text in ("1x1:synthetic", "1x2:synthetic")
    )
    assert beside == pytest.approx((1 + 1.5) / 2 * alone)


def test_an_unknown_peak_is_named(machine: MachineProfile) -> None:
    devices = tuple(replace(device, peak_flops_per_s={}) for device in machine.devices)
    blank = replace(machine, name="blank", devices=devices)
    with pytest.raises(ProfileError, match="the peak of 'blank' is not known"):
        estimate(timed(machine), "1x1:blank", profile=blank)


def test_step_times_need_no_kernel_probe(machine: MachineProfile) -> None:
    bare = replace(machine, kernels=(), host=None, contentions=())
    answer = estimate(timed(bare), "1x1:synthetic", batch_per_gpu=5, profile=bare)
    assert answer.step_time_s == pytest.approx(0.2)


def test_several_ranks_cost_as_much_as_with_the_traced_graph(machine: MachineProfile) -> None:
    traced = perceptron([512] * 9)
    alone_s = {
        batch: estimate(traced, "1x1:synthetic", batch_per_gpu=batch, profile=machine).step_time_s
        for batch in (16, 64)
    }
    graph = timed(
        machine, parameter_bytes=traced.parameter_bytes, tensors=8, step_times=[*alone_s.items()]
    )
    for allocation in ("1x2:synthetic", "1x8:synthetic"):
        found, wanted = (
            estimate(each, allocation, batch_per_gpu=32, profile=machine)
            for each in (graph, traced)
        )
        assert found.step_time_s == pytest.approx(wanted.step_time_s, rel=0.03)


def test_flops_are_charged_at_the_rate_of_matrix_products(machine: MachineProfile) -> None:
    graph = OpGraph.from_summary(**FLOPS)
    answer = estimate(graph, "1x1:synthetic", batch_per_gpu=4, profile=machine)
    compute_s = answer.breakdown.forward_s + answer.breakdown.backward_s
    # The machine multiplies matrices at 5e10 FLOP/s, less some microseconds a call.
    assert compute_s == pytest.approx(4 * 6e9 / 5e10, rel=0.02)
    assert answer.breakdown.backward_s == pytest.approx(2 * answer.breakdown.forward_s)
    assert answer.mfu_ratio == pytest.approx(4 * 6e9 / 5e10 / answer.step_time_s, rel=0.01)
    # FLOPs alone predict by 44 %: the interval says so.
    assert answer.high_s / answer.step_time_s > 1.44


def test_mfu_is_known_where_flops_are(machine: MachineProfile) -> None:
    without = timed(machine)
    knowing = timed(machine, flops_per_sample=1e9)
    assert estimate(without, "1x1:synthetic", profile=machine).mfu_ratio is None
    table = estimate_many(without, ["1x1:synthetic"], profile=machine)
    assert math.isnan(table.mfu_ratio[0])
    answer = estimate(knowing, "1x1:synthetic", batch_per_gpu=20, profile=machine)
    assert answer.mfu_ratio == pytest.approx(20 * 1e9 / 5e10 / 0.5)


def test_memory_has_the_usual_parts_and_the_given_activations(machine: MachineProfile) -> None:
    graph = OpGraph.from_summary(**FLOPS, activation_bytes_per_sample=1_000_003)
    answer = estimate(graph, "1x1:synthetic", batch_per_gpu=4, profile=machine)
    memory = answer.memory
    assert memory.parameters_bytes == memory.gradients_bytes == 4_000_000
    assert memory.optimizer_state_bytes == 8_000_000  # AdamW: two moments
    assert memory.activations_bytes == 4 * 1_000_003
    assert answer.fits == "yes"


def test_without_activations_a_job_may_fit_or_surely_does_not(machine: MachineProfile) -> None:
    graph = OpGraph.from_summary(**FLOPS)
    allocations = ["1x1:synthetic", "1x4:synthetic"]
    assert estimate(graph, allocations[0], profile=machine).fits == "uncertain"
    table = estimate_many(graph, allocations, profile=machine)
    assert table.fits.tolist() == ["uncertain", "uncertain"]
    assert any("activations" in text for text in table.row(0).assumptions)
    # 64 GiB devices; AdamW holds four times the parameters.
    large = OpGraph.from_summary(parameter_bytes=40 << 30, tensors=10, flops_per_sample=6e9)
    assert estimate(large, "1x1:synthetic", profile=machine).fits == "no"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "ddp:unbucketed"])
@pytest.mark.parametrize("known", [FLOPS, TIMES])
def test_a_table_row_equals_the_estimate(
    machine: MachineProfile, known: dict[str, Any], strategy: str
) -> None:
    graph = OpGraph.from_summary(**known, profile=machine)
    allocations = ["1x1:synthetic", "1x4:synthetic", "2x2:synthetic"]
    table = estimate_many(graph, allocations, batch_per_gpu=7, strategy=strategy, profile=machine)
    singles = [
        estimate(graph, text, batch_per_gpu=7, strategy=strategy, profile=machine)
        for text in allocations
    ]
    assert table.step_time_s == pytest.approx([answer.step_time_s for answer in singles])
    assert table.low_s == pytest.approx([answer.low_s for answer in singles])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flops_per_sample": None}, "neither flops_per_sample nor step_times"),
        ({"flops_per_sample": math.nan}, "flops_per_sample: must be greater than 0, found nan"),
        ({"flops_per_sample": math.inf}, "found inf"),
        ({"flops_per_sample": True}, "found True"),
        ({"parameter_bytes": 0}, "parameter_bytes: must be greater than 0, found 0"),
        ({"parameter_bytes": 10.5}, "parameter_bytes: must be a whole number, found 10.5"),
        ({"parameter_bytes": None}, "give parameter_bytes and tensors"),
        ({"parameter_bytes": 36}, "tensors is 10 but parameter_bytes hold 9 parameters"),
        ({"tensors": -1}, "tensors: must be greater than 0, found -1"),
        ({"tensors": 100_001}, "tensors: must be less than or equal to 100000"),
        ({"tensor_bytes": [400] * 9}, "parameter_bytes is 4000000 but tensor_bytes make 3600"),
        ({"tensor_bytes": "4k"}, "tensor_bytes: must be a list"),
        ({"ready_ratios": [0.5]}, "1 entries for 10 tensors"),
        (
            {"ready_ratios": [0.5] * 9 + [1.5]},
            "ready_ratios.9: must be less than",
        ),
        ({"activation_bytes_per_sample": 0}, "activation_bytes_per_sample: must be"),
        ({"step_times": [(8, 0.1)]}, "without the machine"),
        ({"step_times": [(8, math.nan)], "machine": "x"}, "step_times.0.1: must be greater than"),
        ({"step_times": [(0, 0.1)], "machine": "x"}, "step_times.0.0: must be greater than 0"),
        ({"step_times": [8, 0.1], "machine": "x"}, "step_times.0: must be a list, found 8"),
        ({"machine": 7}, "machine: must be a text, found 7"),
        ({"name": ""}, "name: String should have at least 1 character"),
        ({"batch": "8"}, "batch: must be a number, found '8'"),
    ],
)
def test_an_impossible_summary_is_refused_in_one_sentence(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        OpGraph.from_summary(**FLOPS | changes)
    assert isinstance(caught.value, EstimatorError)
    assert "\n" not in str(caught.value)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(StrategyError, match="adamw"):
        OpGraph.from_summary(**FLOPS, optimizer="lion")


@pytest.fixture
def job(tmp_path: Path, store: Path) -> Callable[..., str]:
    """Write a summary file that holds FLOPS with changes."""

    def write(**changes: Any) -> str:
        path = tmp_path / "job.json"
        path.write_text(json.dumps(FLOPS | changes))
        return str(path)

    return write


def test_a_summary_file_stands_for_a_model(job: Callable[..., str], command: Command) -> None:
    path = job(step_times=[[8, 0.5]], machine="local")
    found = command("estimate", path, "--on", "1x1:local", "--batch", "8", "--json")
    answer = json.loads(found.out)
    assert answer["step_time_s"] == pytest.approx(0.5)
    assert answer["model"] == "job"
    assert answer["fits"] == "uncertain"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("estimate", "--measure"), "operators are not known; leave out --measure"),
        (("estimate", "--seq-len", "64"), "leave out --seq-len"),
        (("estimate", "--optimizer", "sgd"), "step times of adamw in fp32"),
        (("validate",), "is a summary, which cannot be trained"),
    ],
)
def test_what_a_summary_cannot_answer_is_said(
    job: Callable[..., str], command: Command, words: tuple[str, ...], said: str
) -> None:
    path = job(step_times=[[8, 0.5]], machine="local")
    assert said in command(*words, path, "--on", "1x1:local").sentence


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        ('{"flops": 1}', "has 'flops', which is no part of a summary"),
        ('{"flops_per_sample": NaN}', "job.json: flops_per_sample: must be greater than 0"),
        ('{"optimizer": []}', "job.json: optimizer: must be a text"),
    ],
)
def test_a_wrong_summary_file_is_refused(
    tmp_path: Path, store: Path, command: Command, content: str, said: str
) -> None:
    (tmp_path / "job.json").write_text(content)
    assert said in command("estimate", tmp_path / "job.json", "--on", "1x1:local").sentence


def test_a_missing_summary_file_is_named(store: Path, command: Command) -> None:
    found = command("estimate", "gone.json", "--on", "1x1:local")
    assert "there is no file gone.json" in found.sentence
