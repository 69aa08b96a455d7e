"""What operators, their host and the update take, on a synthetic machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import estimator as est
from estimator.cache import Cache
from estimator.estimates.estimate import Estimate
from estimator.graph.compile.fusion import compile_graph
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.graph.memory.sizes import update_call
from estimator.kernels.durations import op_durations, structure_of
from estimator.kernels.host import awaited_ops, compiled_host_seconds
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import (
    Contention,
    HostCost,
    KernelCost,
    KernelPoint,
    MachineProfile,
    Provenance,
    UpdateCost,
)
from estimator.machines.typical import with_typical_costs
from estimator.tensors import OpCall, TensorSpec
from tests.conftest import make_small_profile
from tests.synthetic import CHOSEN, Machine, perceptron


def test_what_fits_into_a_devices_cache_does_not_wait_for_busy_memory() -> None:
    # 16 MiB of cache for 9 devices; busy neighbours were measured at 100 MB alone, twice as slow.
    calm = Machine(memory_contention=1.0).profile()
    busy = Contention(bound="memory", devices_busy=2, points=((1e8, 2.0),), provenance=CHOSEN)
    loaded = replace(calm, contentions=(busy,))

    def forward_s(profile: MachineProfile, width: int) -> float:
        graph = perceptron([width] * 3, batch=4)
        return est.estimate(graph, "1x2:synthetic", profile=profile).breakdown.forward_s

    assert forward_s(loaded, 64) == pytest.approx(forward_s(calm, 64))
    assert forward_s(loaded, 4096) > forward_s(calm, 4096)


def test_ops_take_as_much_longer_as_reads_do_after_what_lies_between() -> None:
    plain = make_small_profile()
    # A product of 256 KiB tensors: 100 µs repeated, 300 µs from main memory.
    graph = perceptron([256, 256], batch=256)
    call = graph.at().calls[0]
    points = (KernelPoint(call=call, warm_s=1e-4, cold_s=3e-4),)
    kernel = KernelCost(target="aten.mm.default", dtype="float32", points=points, provenance=CHOSEN)

    def first_s(*reuse_points: tuple[float, float]) -> float:
        memory = replace(plain.memory, reuse_points=reuse_points)
        profile = replace(plain, kernels=(*plain.kernels[1:], kernel), memory=memory)
        found = op_durations(graph.at(), profile, cache=Cache(limit_bytes=0))
        assert found.sources[0] == "measured"
        return float(found.device_s[0])

    # Its own three tensors and two of them again were touched since, or many more.
    assert first_s((1e12, 1.0)) == pytest.approx(1e-4, rel=1e-3)
    assert first_s((1e6, 0.0), (1.1e6, 0.25), (1e12, 0.25)) == pytest.approx(1.5e-4)
    assert first_s((1.0, 1.0)) == pytest.approx(3e-4)


def test_the_host_waits_for_its_own_code_after_a_kernel_that_fills_the_private_caches() -> None:
    plain = Machine().profile()
    cached = dict.fromkeys(_CACHED, 1e-6)
    profile = replace(
        plain,
        host=replace(plain.host, **cached),
        memory=replace(plain.memory, private_cache_bytes=1 << 20),
    )

    def host_s(machine: MachineProfile, width: int) -> list[float]:
        bound = perceptron([width] * 3, batch=4).at()
        found = op_durations(bound, machine, cache=Cache(limit_bytes=0)).host_s
        ready = {p.ready_after for p in bound.graph.parameters}
        return [s for n, s in enumerate(found.tolist()) if n and n not in ready]

    # A matmul with 64 x 64 weights moves 20 kB; one with 4096 x 4096 moves 67 MB.
    assert all(seconds <= 1e-6 for seconds in host_s(profile, 64))
    assert max(host_s(profile, 4096)) == pytest.approx(4e-6)
    assert host_s(plain, 64) == host_s(plain, 4096)


class Block(nn.Module):
    """A product and a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class TwiceDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Doubled.apply(Doubled.apply(x * self.weight))
        return found


def host_us(model: nn.Module, checkpoint: str | None = None, **costs: float) -> float:
    """Microseconds of the host in a step where nothing but some costs takes any."""
    graph = est.trace_model(model, torch.ones(4, 8), checkpoint=checkpoint, target="cuda")
    nothing = dict.fromkeys(("forward_op_s", "forward_view_s", "backward_op_s", "bare_op_s"), 0.0)
    own = {**nothing, "module_call_s": 0.0, "step_s": 0.0, **costs}
    profile = replace(Machine().profile(), host=HostCost(**own, provenance=CHOSEN))
    return 1e6 * float(op_durations(graph.at(), profile, cache=Cache(limit_bytes=0)).host_s.sum())


def test_what_a_checkpoint_runs_again_is_issued_by_python() -> None:
    once, again = (host_us(Blocks(), form, forward_op_s=1e-6) for form in (None, "full"))
    # A product and a sigmoid in each of two blocks.
    assert again - once == pytest.approx(4)


def test_a_checkpoint_itself_takes_the_host_some_calls() -> None:
    once, again = (host_us(Blocks(), form, module_call_s=1e-6) for form in (None, "full"))
    # Blocks, two of Block and of Linear; the second run calls each Linear.
    assert once == pytest.approx(5)
    assert again - once == pytest.approx(2 * 120 + 2)


def test_forward_work_that_a_gradient_does_itself_is_no_checkpoint() -> None:
    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight) ** 3

    # Its gradient computes a square of what the forward pass has saved.
    assert host_us(Cube(), module_call_s=1e-6) == pytest.approx(1)


def test_functions_of_autograd_call_python_both_ways() -> None:
    # One call of a module; 5 calls' worth forward and 9 backward for each of two functions.
    assert host_us(TwiceDoubled(), module_call_s=1e-6) == pytest.approx(1 + 2 * (5 + 9))


_CACHED = ("cached_forward_op_s", "cached_forward_view_s", "cached_backward_op_s")


def test_an_update_that_was_timed_takes_its_time_on_that_machine() -> None:
    graph = perceptron([64] * 3, batch=4)
    timed = replace(
        graph, timings={update_call(graph): OpTiming(seconds=0.25)}, timed_on="synthetic"
    )
    profile = Machine().profile()

    def update_s(asked: OpGraph, machine: MachineProfile) -> float:
        name = f"1x1:{machine.name}"
        return est.estimate(asked, name, profile=machine).breakdown.update_s

    assert update_s(timed, profile) == pytest.approx(0.25)
    other = replace(profile, name="other")
    assert update_s(timed, other) == pytest.approx(update_s(graph, profile))


def timed_graph() -> OpGraph:
    """The step of a perceptron, each of whose calls took a second on the synthetic machine."""
    graph = perceptron([64] * 3, batch=4)
    calls = dict.fromkeys([op.call for op in graph.ops], OpTiming(seconds=1.0))
    return replace(graph, timings=calls, timed_on="synthetic")


@pytest.mark.parametrize(
    "of", [lambda graph: graph, lambda graph: compile_graph(graph, "compiled")]
)
def test_calls_that_were_timed_on_one_machine_are_not_measured_on_another(
    of: Callable[[OpGraph], OpGraph],
) -> None:
    timed = of(timed_graph())
    untimed = replace(timed, timings={}, timed_on=None)
    here = Machine().profile()
    other = replace(here, name="other")

    def answer(graph: OpGraph, machine: MachineProfile, batch: int) -> Estimate:
        name = f"1x1:{machine.name}"
        return est.estimate(graph, name, profile=machine, batch_per_gpu=batch)

    # Some of the calls of a compiled step are those that were timed.
    assert answer(timed, here, 4).step_time_s > 1
    for batch in (4, 8):
        there, plain = answer(timed, other, batch), answer(untimed, other, batch)
        assert there.step_time_s == plain.step_time_s
        assert there.provenance == plain.provenance
        (said,) = set(there.assumptions) - set(plain.assumptions)
        assert "timed on 'synthetic'" in said


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_a_part_of_a_timed_graph_has_no_timings_of_another_machine_either(layout: str) -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
    graph = est.trace_model(layers, torch.ones(4, 64), target="cuda")
    calls = dict.fromkeys([op.call for op in graph.ops], OpTiming(seconds=1.0))
    timed = replace(graph, timings=calls, timed_on="timed")
    other = load_profile("h100-sxm")

    def step_s(asked: OpGraph, machine: MachineProfile) -> float:
        name = f"1x2:{machine.name}"
        return est.estimate(asked, name, profile=machine, layout=layout).step_time_s

    assert step_s(timed, replace(other, name="timed")) > 1
    assert step_s(timed, other) == step_s(graph, other)


def test_a_gpus_host_looks_up_algorithms_of_convolutions_and_batch_norms() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(8, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    )
    images = torch.randn(2, 8, 9, 9)
    graph = est.trace_model(layers, images, target="cuda", precision="fp32")
    typical = with_typical_costs(load_profile("h100-sxm"))
    # Calls of modules come between the operators; here they take nothing.
    profile = replace(typical, host=replace(typical.host, module_call_s=0.0))
    host_s = op_durations(graph.at(), profile, cache=Cache(limit_bytes=0)).host_s
    found = {
        kind: s
        for n, (op, s) in enumerate(zip(graph.ops, host_s.tolist(), strict=True))
        if op.phase == "forward" and n
        for kind in ("batch_norm", "relu")
        if kind in op.call.target
    }
    # 8.5 µs from Python and 7.5 µs for the launch.
    assert found == pytest.approx({"batch_norm": 3 * 1.6e-5, "relu": 1.6e-5})


def test_a_gpus_host_issues_an_operator_as_its_probe_has_seen_it_do() -> None:
    graph = est.trace_model(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()),
        torch.randn(4, 8),
        target="cuda",
        precision="fp32",
    )
    typical = with_typical_costs(load_profile("h100-sxm"))
    host = replace(typical.host, module_call_s=0.0, forward_op_s=2e-6, bare_op_s=8e-6)

    def timed(target: str, arguments: int, *host_s: float | None) -> KernelCost:
        square = TensorSpec((8, 8))
        call = OpCall(target, (square,) * arguments, (), (square,))
        points = [KernelPoint(call=call, warm_s=1e-6, host_s=s) for s in host_s]
        return KernelCost(
            target=target, dtype="float32", points=tuple(points), provenance=typical.provenance
        )

    kernels = (
        timed("aten.addmm.default", 3, 21e-6, 20e-6, None, 30e-6),
        timed("aten.gelu.default", 1, 9e-6),
    )
    profile = replace(typical, host=host, kernels=kernels)
    host_s = op_durations(graph.at(), profile, cache=Cache(limit_bytes=0)).host_s
    found = {
        op.call.target: s
        for op, s in zip(graph.ops, host_s.tolist(), strict=True)
        if op.phase == "forward" and op.call.target.split(".")[1] in ("addmm", "gelu", "tanh")
    }
    # tanh was not timed: as the operators of its family were, of which there is one.
    expected = {"addmm": 2e-6 + 21e-6, "gelu": 2e-6 + 9e-6, "tanh": 2e-6 + 9e-6}
    assert found == pytest.approx({f"aten.{name}.default": s for name, s in expected.items()})


def test_a_gpus_update_in_a_loop_is_issued_while_the_device_works() -> None:
    graph = perceptron([4096] * 5, batch=4096)
    slow = replace(graph, target="cuda", optimizer="adamw-loop")
    found = est.estimate(slow, "1x1:h100-sxm")
    profile = with_typical_costs(load_profile("h100-sxm"))
    loop = "adamw", "loop", "cuda"
    (cost,) = [u for u in profile.updates if (u.optimizer, u.form, u.device) == loop]
    trained = [p.spec.numel for p in graph.parameters if p.gradient is not None]
    # Nothing but the device's part is left of it.
    assert found.breakdown.update_s == pytest.approx(sum(trained) * cost.per_parameter_s, rel=0.01)
    assert len(trained) * cost.per_tensor_s > 0.1 * found.breakdown.update_s


GRAPH = perceptron([256, 256], target="cuda")


@pytest.mark.parametrize("execution", ["compiled", "cuda-graphs"])
@pytest.mark.parametrize(
    # Compute capabilities 3.7, 6.0, 6.1 and 6.1 (NVIDIA's list of CUDA GPUs).
    "machine",
    ["k80", "p100-sxm", "p4", "gtx-1080-roce"],
)
def test_chips_below_capability_7_cannot_run_compiled_steps(machine: str, execution: str) -> None:
    graph = replace(GRAPH, execution=execution)
    said = f"'{machine}' has compute capability .*, and torch.compile needs 7.0"
    with pytest.raises(est.EstimatorError, match=said):
        est.estimate(graph, f"1x1:{machine}")
    with pytest.raises(est.EstimatorError, match=f"row 1: {said}"):
        est.estimate_many(graph, ["1x1:t4", f"1x1:{machine}"], strict=True)
    assert est.estimate(GRAPH, f"1x1:{machine}").mode == "fp32"


@pytest.mark.parametrize("machine", ["v100-sxm", "mi250x", "h100-sxm"])
def test_chips_that_torch_compile_serves_run_compiled_steps(machine: str) -> None:
    graph = replace(GRAPH, execution="compiled")
    assert est.estimate(graph, f"1x1:{machine}").mode == "fp32, compiled"


def test_a_module_is_traced_for_the_devices_of_its_allocation() -> None:
    model, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    answer = est.estimate(model, "1x2:h100-sxm", batch=batch)
    assert answer.plan.members.table.graph.target == "cuda"


HOST = HostCost(
    forward_op_s=5e-6,
    forward_view_s=3e-6,
    backward_op_s=2e-6,
    bare_op_s=4e-6,
    module_call_s=3e-6,
    step_s=1e-4,
    provenance=Provenance(source="measured"),
)


def traced(compiled: Any, **options: Any) -> OpGraph:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return est.trace_model(
        layer, torch.randn(4, 6, 16), compiled=compiled, **{"target": "cuda", **options}
    )


def test_a_compiled_step_pays_two_calls_and_a_launch_for_each_kernel() -> None:
    graph = traced(True)
    # Two calls of 40 µs, an empty step, launches of 1.5 bare operators, a hand-over per gradient.
    expected_s = 2 * 4e-5 + 1e-4 + len(graph.ops) * 1.5 * 4e-6 + len(graph.parameters) * 2e-6
    assert compiled_host_seconds(graph, HOST).sum() == pytest.approx(expected_s)


def test_cuda_graphs_pay_two_replays_whatever_the_number_of_kernels() -> None:
    graph = traced("cuda-graphs")
    # 170 µs for each replay come on top of the two calls.
    expected_s = 2 * (4e-5 + 1.7e-4) + 1e-4 + len(graph.parameters) * 2e-6
    assert compiled_host_seconds(graph, HOST).sum() == pytest.approx(expected_s)


def test_on_a_cpu_calling_a_kernel_is_part_of_its_own_time() -> None:
    graph = traced(True, target="cpu")
    expected_s = 2 * 4e-5 + 1e-4 + len(graph.parameters) * 2e-6
    assert compiled_host_seconds(graph, HOST).sum() == pytest.approx(expected_s)


def test_a_step_of_small_kernels_gets_faster_when_compiled_and_its_parts_still_sum() -> None:
    answers = [
        est.estimate(traced(compiled), "1x2:a100-sxm-80gb")
        for compiled in (False, True, "cuda-graphs")
    ]
    assert answers[1].step_time_s < answers[0].step_time_s
    for answer in answers:
        end_s = max(span.start_s + span.duration_s for span in answer.timeline.spans)
        assert answer.breakdown.total_s == pytest.approx(end_s)
    assert [answer.mode for answer in answers] == ["fp32", "fp32, compiled", "fp32, cuda-graphs"]


def test_a_sharded_update_of_a_small_model_takes_no_longer_than_a_whole_one() -> None:
    # To issue it takes the host 1 ms, which is ahead by more; the device updates within a few µs.
    profile = load_profile("a100-sxm-80gb")
    cost = UpdateCost(
        optimizer="adamw",
        form="foreach",
        device="cuda",
        launch_s=1e-3,
        per_tensor_s=0.0,
        per_parameter_s=1e-11,
        lanes=((1.0, 64.0, 1e-3, 1e-6),),
        provenance=Provenance(source="measured"),
    )
    measured = replace(profile, updates=(cost,), host=HOST)
    graph = est.trace_model(nn.Linear(1024, 1024), torch.randn(4, 1024), target="cuda")
    whole, sharded = (
        est.estimate(
            graph, "1x2:a100-sxm-80gb", batch_per_gpu=65536, strategy=strategy, profile=measured
        )
        for strategy in ("ddp", "zero1")
    )
    assert whole.breakdown.update_s == pytest.approx(1e-11 * graph.parameter_count)
    assert sharded.breakdown.update_s <= whole.breakdown.update_s


def test_a_gradient_scaler_reads_and_writes_every_gradient_before_the_update() -> None:
    plain = traced(False, precision="fp16-amp")
    scaled = replace(plain, grad_scaler=True)
    one, two = (est.estimate(graph, "1x1:a100-sxm-80gb") for graph in (plain, scaled))
    added_s = two.breakdown.update_s - one.breakdown.update_s
    # A100 80 GB: 2039 GB/s at most; the host's six small operators take at least a µs each.
    assert added_s > plain.parameter_count * 8 / 2.039e12 + 6e-6
    assert two.step_time_s - one.step_time_s == pytest.approx(added_s)
    assert two.mode == "fp16-amp, gradient scaler"


class Selecting(nn.Module):
    """A linear layer whose results are selected in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way

    def forward(self, rows: Tensor) -> Tensor:
        mask = rows > 0
        if self.way == "number":
            return self.layer(rows) * int(mask.sum())
        made: Tensor = self.layer(rows)
        if self.way == "mask":
            return made[mask]
        if self.way == "index":
            return made[torch.arange(4)]
        if self.way == "repeated":
            return made.repeat_interleave(torch.full((len(rows),), 2), dim=0)
        if self.way == "filled":
            made = made.clone()
            made[mask] = 0.0
        return made


def waiting(way: str, target: str = "cuda") -> list[str]:
    graph = est.trace_model(Selecting(way), torch.randn(4, 8), target=target)  # type: ignore[arg-type]
    structure = structure_of(graph, Cache(1 << 20))
    return [graph.ops[op].call.target for op in awaited_ops(structure)]


@pytest.mark.parametrize(
    ("way", "found"),
    [
        ("number", ["aten._local_scalar_dense.default"]),
        # autograd finds the places of the mask once more to put gradients there
        ("mask", ["aten.index.Tensor", "aten.index_put.default"]),
        ("repeated", ["aten.repeat_interleave.Tensor"]),
        ("index", []),
        ("filled", []),
        ("not at all", []),
    ],
)
def test_a_value_in_python_or_a_shape_by_values_is_waited_for(way: str, found: list[str]) -> None:
    assert waiting(way) == found


def test_on_cpus_nothing_is_waited_for() -> None:
    assert waiting("number", "cpu") == []


def test_an_estimate_says_what_waiting_costs() -> None:
    graphs = [
        est.trace_model(Selecting(way), torch.randn(4, 8), target="cuda")
        for way in ("not at all", "number")
    ]
    plain, waits = (est.estimate(graph, "1x1:a100-sxm-80gb") for graph in graphs)
    found = [line for line in waits.assumptions if "waits for the device once" in line]
    assert len(found) == 1
    assert "aten._local_scalar_dense" in found[0]
    assert not [line for line in plain.assumptions if "waits for the device" in line]
    assert waits.step_time_s > plain.step_time_s


class Counting(nn.Module):
    """Asks how many numbers are positive, then computes for long."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.zeros(16384, 2048))
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    def forward(self, rows: Tensor) -> Tensor:
        count = int((rows > 0).sum())
        made: Tensor = self.layers(self.state * count) * rows.sum()
        return made


def test_waiting_that_costs_next_to_nothing_is_not_said() -> None:
    graph = est.trace_model(Counting(), torch.randn(4, 8), target="cuda")
    found = est.estimate(graph, "1x1:a100-sxm-80gb")
    assert not [line for line in found.assumptions if "waits for the device" in line]
