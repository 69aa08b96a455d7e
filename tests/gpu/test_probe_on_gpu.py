"""What the probe measures on a real GPU; physical sense is asked for, speeds are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from estimator.machines.profile import MachineProfile, Provenance
from estimator.machines.typical import device_memory
from estimator.probe.devices.accelerator import device_facts, half_attention, sustained_facts
from estimator.probe.devices.backend import CudaBackend
from estimator.probe.devices.calls import GridCall, TensorSource, grid_call
from estimator.probe.devices.host import measure_host
from estimator.probe.devices.inventory import read_gpus
from estimator.probe.devices.jobs import canary_s
from estimator.probe.devices.updates import measure_updates
from estimator.probe.grid.kernels import kernel_grid, measure_call
from estimator.probe.machine import probe_machine
from estimator.tensors import TensorSpec


def test_the_driver_lists_the_gpu_that_torch_uses() -> None:
    (first, *_) = read_gpus()
    assert first.kind == "cuda"
    assert first.name == torch.cuda.get_device_name(0)
    assert str(first.details["driver_version"])
    assert first.memory_bytes >= torch.cuda.get_device_properties(0).total_memory


def test_what_a_device_is_and_runs_at_is_known(backend: CudaBackend) -> None:
    facts = device_facts(torch, 0)
    assert facts["sm_count"] == torch.cuda.get_device_properties(0).multi_processor_count
    at_work = sustained_facts(torch, backend, seconds=0.3)
    assert isinstance(at_work["sm_clock_mhz_at_work"], int)
    assert isinstance(at_work["power_draw_w_at_work"], float)
    assert at_work["sm_clock_mhz_at_work"] > 0
    assert at_work["power_draw_w_at_work"] > 0


def test_eight_times_the_work_takes_longer_but_not_for_free(backend: CudaBackend) -> None:
    source = TensorSource(backend)
    sides = (1024, 4096)
    small, large = (
        measure_call(backend, source, grid_call("mm.default", *[TensorSpec((n, n))] * 2)).warm_s
        for n in sides
    )
    # 64 times the flops; a small product fills the device less.
    assert 2 * small < large < 128 * small


def test_tiny_kernels_back_to_back_take_no_more_than_their_launch(backend: CudaBackend) -> None:
    tiny = torch.ones(16, device=backend.device)
    seconds = sorted(backend.time_calls(lambda _: torch.neg(tiny), repeats=64))[32]
    # Launched from the host one by one they would take 3 µs and more each.
    assert 1e-7 <= seconds < 1e-5


def test_host_costs_are_measured_with_nccl_at_one_rank(backend: CudaBackend) -> None:
    emitted: list[dict[str, Any]] = []
    measure_host(backend, emitted.append, budget_s=30.0)
    found = emitted[-1]
    assert 5e-7 < found["bare_op_s"] < 1e-4
    assert found["backward_op_s"] < 1e-4
    assert found["ddp_bucket_s"] > 0
    # Hooks of FSDP and DTensor's dispatch are Python on any device: tens of microseconds.
    for name in ("shard_unit_s", "dtensor_forward_s", "dtensor_backward_s", "dtensor_exchange_s"):
        assert 1e-5 < found[name] < 1e-2, name
    assert "dtensor_update_tensor_s" not in found


def test_updates_on_cuda_know_host_and_device_apart(backend: CudaBackend) -> None:
    emitted: list[dict[str, Any]] = []
    measure_updates(backend, emitted.append, budget_s=5.0)
    first = emitted[0]
    assert (first["optimizer"], first["form"], first["device"]) == ("adamw", "foreach", "cuda")
    largest = max(first["lanes"], key=lambda row: row[1])
    most = max(first["lanes"], key=lambda row: row[0])
    # 300 million parameters are the device's work, 400 small tensors the host's.
    assert largest[3] > largest[2]
    assert most[2] > most[3]


def test_a_short_probe_gives_a_whole_profile() -> None:
    profile = probe_machine(name="gpu", budget_s=20.0, kind="cuda", devices=1)
    assert profile.kind == "cuda"
    assert profile.host is not None
    assert profile.memory.shared_cache_bytes > 1 << 20
    assert {link.kind for link in profile.links} >= {"h2d", "d2h"}
    assert "bfloat16" in profile.devices[0].peak_flops_per_s
    assert profile.devices[0].details["half_attention"]
    # Products on tensor cores do not count as those of float32.
    peaks = profile.devices[0].peak_flops_per_s
    assert peaks["float32"] < peaks.get("tfloat32", peaks["bfloat16"])
    assert ("adamw", "fused") in {(update.optimizer, update.form) for update in profile.updates}
    assert profile.kernels_timed_ratio is not None
    assert profile.kernels_timed_ratio > 0.1
    assert MachineProfile.from_dict(profile.to_dict()) == profile


def test_the_traced_attention_is_the_one_that_runs_here(backend: CudaBackend) -> None:
    from estimator.graph.trace.trace import trace_graph

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(256, 768)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)

    graph = trace_graph(Attention(), torch.randn(2, 128, 256), precision="bf16-amp", target="cuda")
    traced = [op.call.target for op in graph.ops if "dot_product" in op.call.target]
    assert traced[0] == half_attention(torch, backend.device)


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_a_graph_replays_and_its_peak_is_what_torch_allocates(
    backend: CudaBackend, precision: str
) -> None:
    from estimator.graph.memory.step import memory_alone
    from estimator.graph.trace.trace import trace_graph
    from estimator.probe.ops import distinct_calls, replay, replay_plan

    def build() -> torch.nn.Module:
        layers = [torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)]
        return torch.nn.Sequential(*layers)

    graph = trace_graph(
        build(), torch.randn(4096, 1024), precision=precision, target="cuda", optimizer="adamw"
    )
    bound, emitted = graph.at(), []
    replay(backend, emitted.append, budget_s=5.0, plan=replay_plan(bound))
    assert emitted[-1]["skipped"] == []
    assert len(emitted[-1]["timings"]) == len(distinct_calls(bound))
    emitted.clear()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, x = build().cuda(), torch.randn(4096, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision != "fp32"):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        del loss
    measured = torch.cuda.max_memory_allocated() - before
    predicted = memory_alone(bound).peaks().total_bytes(1)
    # What cuBLAS and cuBLASLt keep for their own is beside live tensors: all of it on an H100 in
    # bfloat16 (64 MiB, torch 2.11), half of it where only one of them runs.
    kept = device_memory(profile_here(), communicators=0).workspaces_bytes
    assert 0.97 * predicted <= measured <= 1.03 * predicted + kept


def profile_here() -> MachineProfile:
    """A profile that says no more than which GPU this is."""
    (first, *_) = read_gpus()
    first = replace(first, details={**first.details, **device_facts(torch, 0)})
    return MachineProfile(name="here", devices=(first,), provenance=Provenance(source="measured"))


# Last: a call that breaks the device's context breaks it for all that follow in this process.
def smallest_of_each_operator() -> Iterator[GridCall]:
    smallest: dict[tuple[str, str], GridCall] = {}
    for each in kernel_grid("cuda"):
        key = (each.call.target, each.call.dtype)
        known = smallest.get(key)
        if known is None or each.read_bytes < known.read_bytes:
            smallest[key] = each
    yield from smallest.values()


def test_a_library_that_refuses_a_call_does_not_lose_the_device(backend: CudaBackend) -> None:
    with pytest.raises(RuntimeError):
        torch.empty(1 << 50, device=backend.device)
    with pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 3, device=backend.device), torch.ones(2, 3, device=backend.device))
    assert not backend.is_lost()


def test_the_canary_fills_the_device(backend: CudaBackend) -> None:
    # A millisecond at the peak of its architecture, and most of that is reached.
    assert 1e-3 < canary_s(backend, repeats=5) < 1e-2


def test_every_operator_of_the_cuda_grid_runs(backend: CudaBackend) -> None:
    source, failed = TensorSource(backend), []
    for each in smallest_of_each_operator():
        try:
            point = measure_call(backend, source, each)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            failed.append(f"{each.call.target} {each.call.dtype}: {str(error).splitlines()[0]}")
        else:
            assert point.warm_s > 0
    assert failed == []
