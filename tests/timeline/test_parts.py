"""Parts of a step that are plain arithmetic, each worked out by hand from a machine's costs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import estimator as est
from estimator.cache import Cache
from estimator.kernels.contention import SlowdownCurve
from estimator.machines.profile import Contention, MachineProfile, UpdateCost
from estimator.placement.topology import (
    Cluster,
    Node,
    NodeNetwork,
    network_in_cluster,
    rates_by_ranks,
)
from estimator.timeline.plan import Ratios, after_s, breakdown_of
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.timeline.rank.program import LaneCosts, UpdateCosts
from estimator.timeline.rank.updates import Trained, accumulate_s, copies_s, unscale_s, update_lanes
from tests.synthetic import CHOSEN, Machine, perceptron

# A million float32 elements in ten tensors: a pass reads and writes 8 MB.
TRAINED = Trained(tensors=10, elements=10**6, size_bytes=4 * 10**6, words=10**6, idle=2e5)


def loaded(machine: Machine, points: tuple[tuple[float, float], ...]) -> MachineProfile:
    """The machine, whose work on memory two busy devices slow down so."""
    busy = Contention(bound="memory", devices_busy=2, points=points, provenance=CHOSEN)
    return replace(machine.profile(), contentions=(busy,))


def test_slowdowns_lie_on_lines_over_the_logarithm_of_bytes() -> None:
    curve = SlowdownCurve((math.log(1e4), math.log(1e8)), (2.0, 4.0))
    assert curve.at(1e6) == pytest.approx(3.0)
    assert curve.at(np.array([0.0, 1e4, 1e10])).tolist() == pytest.approx([2.0, 2.0, 4.0])
    # What stays in a cache of 100 bytes waits for nothing: from there on to 10⁴ bytes.
    assert curve.beyond(1e2).at(1e3) == pytest.approx(1.5)
    assert curve.beyond(1e5) == curve


def test_a_pass_beside_a_busy_neighbour_takes_its_slowdown() -> None:
    # Half-way between 10⁶ and 64·10⁶ bytes in the logarithm: 8·10⁶ bytes, a slow-down of 1.75.
    profile = loaded(Machine(), ((1e6, 1.0), (64e6, 2.5)))
    alone, busy = (copies_s(profile, [4 * 10**6], devices, Cache(1 << 20)) for devices in (1, 2))
    assert (busy / alone).tolist() == pytest.approx([1.75])


def test_gradients_are_added_in_passes_over_all_of_their_elements() -> None:
    # Reads two, writes one: 12 MB at the synthetic rate, and 1 µs to start.
    machine = Machine(memory_bytes_per_s=1e9)
    profile = machine.profile()
    assert accumulate_s(TRAINED, profile, 1, Cache(1 << 20)) == pytest.approx(
        0.012 + 1e-6, rel=0.01
    )
    none = replace(TRAINED, words=0)
    assert accumulate_s(none, profile, 1, Cache(1 << 20)) == 0.0


def test_a_gradient_scaler_unscales_all_gradients_and_issues_six_small_operators() -> None:
    machine = Machine(memory_bytes_per_s=1e9)
    profile, graph = machine.profile(), perceptron([8, 8], batch=1)
    scaled = replace(
        next(cost for cost in profile.kernels if cost.target == "aten.relu.default"),
        target="aten.mul.Scalar",
    )
    points = tuple(
        replace(point, call=replace(point.call, target="aten.mul.Scalar"))
        for point in scaled.points
    )
    profile = replace(profile, kernels=(*profile.kernels, replace(scaled, points=points)))
    # 8 MB at 1 GB/s, 1 µs to start; then six bare calls of 2 µs.
    found = unscale_s(TRAINED, graph, profile, 1, Cache(1 << 20))
    assert found == pytest.approx(0.008 + 1e-6 + 6 * 2e-6, rel=0.01)
    slow = replace(
        profile,
        contentions=(
            Contention(bound="memory", devices_busy=2, points=((8e6, 3.0),), provenance=CHOSEN),
        ),
    )
    host_s = 6 * 2e-6
    assert unscale_s(TRAINED, graph, slow, 2, Cache(1 << 20)) - host_s == pytest.approx(
        3 * (found - host_s)
    )


def test_an_update_whose_lanes_were_measured_has_a_host_and_a_device() -> None:
    cost = UpdateCost(
        optimizer="adamw",
        form="foreach",
        device="cuda",
        launch_s=1e-5,
        per_tensor_s=2e-6,
        per_parameter_s=3e-11,
        per_idle_parameter_s=1e-11,
        lanes=((1.0, 1.0, 1e-5, 1e-5),),
        provenance=CHOSEN,
    )
    profile = replace(Machine().profile(), updates=(cost,))
    graph = replace(perceptron([8, 8], batch=1, target="cuda"), optimizer="adamw")
    # 10 µs + 10 · 2 µs; 10⁶ · 30 ps + 2·10⁵ · 10 ps.
    assert update_lanes(TRAINED, graph, profile) == pytest.approx((3e-5, 3.2e-5))
    halves = replace(TRAINED, size_bytes=2 * 10**6)
    assert update_lanes(halves, graph, profile) == pytest.approx((3e-5, 1.7e-5))


def test_operators_wait_for_arithmetic_and_memory_by_their_shares() -> None:
    graph = perceptron([512] * 3, batch=64)

    def forward_s(compute: float, memory: float) -> float:
        contentions = tuple(
            Contention(bound=bound, devices_busy=2, points=((1.0, ratio),), provenance=CHOSEN)
            for bound, ratio in (("compute", compute), ("memory", memory))
        )
        profile = replace(Machine().profile(), contentions=contentions, memory=None)
        return est.estimate(graph, "1x2:synthetic", profile=profile).breakdown.forward_s

    calm = forward_s(1.0, 1.0)
    # Two matmuls of 2 · 64 · 512 · 512 flops at 50 Gflop/s, a relu of 64 KiB in and out.
    assert calm == pytest.approx(2 * 2 * 64 * 512**2 / 5e10 + 2 * 4 * 64 * 512 / 1e10, rel=0.1)
    assert forward_s(3.0, 3.0) == pytest.approx(3 * calm)
    # Whatever the share s of arithmetic: (1 + 2s) + (3 − 2s) = 4.
    both = forward_s(3.0, 1.0), forward_s(1.0, 3.0)
    assert sum(both) == pytest.approx(4 * calm)
    assert min(both) > calm


def test_units_are_reduced_with_their_last_pass() -> None:
    passes = ShardedPasses(
        gathered_bytes=np.zeros(4),
        gradient_bytes=np.zeros(4),
        reduced_bytes=np.zeros(4),
        forward=(1, 2, 3),
        backward=(3, 2, 3, 1),
        forward_ends=(),
        backward_ends=(),
    )
    # Unit 3 is passed twice; its gradients leave after the second time.
    assert passes.reduced == (2, 3, 1)
    assert passes.gathered == (0, 1, 2, 3, 3, 2, 3, 1)
    assert replace(passes, regathers=False).gathered == (0, 1, 2, 3)


def test_rates_by_ranks_are_those_of_their_cards() -> None:
    eight = NodeNetwork(bytes_per_s=3e9, card_bytes_per_s=1e9, cards=8, devices=8)
    inf = math.inf
    assert rates_by_ranks([None, eight], 4).tolist() == [
        [inf] * 5,
        [inf, 1e9, 2e9, 3e9, 3e9],
        [inf] * 5,
    ]


@pytest.mark.parametrize(
    ("hardware", "gbits"),
    [
        ({"nic_count": 4, "nic_bit_per_s": 1e11}, 100.0),  # the card; a quarter would be 50
        ({"nic_count": 4, "nic_bit_per_s": None}, 200.0),  # not known: all of the uplink
        ({"nic_count": "4", "nic_bit_per_s": 1e9}, 200.0),
    ],
)
def test_an_unknown_number_of_cards_is_one(
    hardware: dict[str, int | float | str | None], gbits: float
) -> None:
    profile = replace(Machine(devices=4).profile(), hardware=hardware)
    nodes = {name: Node(machine="m", uplink_bytes_per_s=2e11 / 8) for name in ("a", "b")}
    network = network_in_cluster(profile, Cluster(nodes=nodes), "a")
    payload = 1448 / 1514
    assert network.sent_bytes_per_s(1) == pytest.approx(gbits * 1e9 / 8 * payload)


def test_the_parts_of_a_step_are_scaled_by_what_calibration_learnt() -> None:
    zero = dict.fromkeys(LaneCosts._fields, 0.0)
    lane = LaneCosts(
        **(zero | {"lane_s": 8.0, "forward_s": 2.0, "backward_s": 5.0, "host_s": 1.0})
    )._replace(copies_s=0.25)
    update = UpdateCosts(copy_back_s=0.5, launch_s=1.0, shared_s=4.0)
    ratios = Ratios(compute=2.0, update=3.0)
    # A lane of 10 s has 2 s that are sharded; ranks vary by 10 %, and the later of two is
    # 1/√π standard deviations late.
    found = breakdown_of(
        lane,
        update,
        lane_s=10.0,
        ranks=2,
        share=0.5,
        jitter_ratio=0.1,
        waiting_s=7.0,
        ratios=ratios,
    )
    assert (found.forward_s, found.backward_s, found.host_exposed_s) == (4.0, 10.0, 2.0)
    assert found.communication_exposed_s == 7.0
    assert found.straggler_s == pytest.approx(10.0 * 2.0 * 0.1 / math.sqrt(math.pi), rel=0.05)
    assert found.update_s == 3.0 * (1.0 + 4.0 * 0.5)
    assert found.copies_exposed_s == 2.0 * (0.25 + 2.0 + 0.5)
    assert after_s(update, 0.5, ratios) == 2.0 * 0.5 + 9.0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("machine", "precision", "said"),
    [
        # Volta is 7.0; AMD's names are no numbers; without half precision nothing is flash.
        ("v100-p3", "fp16-amp", True),
        ("a100-sxm-80gb", "fp16-amp", False),
        ("mi250x", "fp16-amp", False),
        ("v100-p3", "fp32", False),
    ],
)
def test_a_machine_without_flash_attention_is_said_to_run_another_kernel(
    machine: str, precision: str, said: bool
) -> None:
    graph = est.trace_model(Attention(), torch.randn(2, 6, 8), precision=precision, target="cuda")
    assumptions = est.estimate(graph, f"1x1:{machine}").assumptions
    assert any("has no flash attention" in text for text in assumptions) == said
