"""What an allocation waits for its devices and its nodes, predicted without a run."""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import profiler
from torch.utils.data import DataLoader, Dataset, IterableDataset

import estimator
import estimator as est
from estimator.cli.console import rendered
from estimator.errors import ModelError, StrategyError
from estimator.estimates.request import EstimateRequest
from estimator.machines.profile import InputCost, MachineProfile, Provenance
from estimator.report.plans import predicted_sections
from estimator.report.sections import Section
from estimator.units import format_ratio
from estimator.waits.hooks import ScriptEndsError, Watched, copied, covered
from estimator.waits.predicted import (
    CACHED_RATIOS,
    InputAnswers,
    PredictedStalls,
    input_answers,
    predict_stalls,
)
from estimator.workload.loader import Loader
from tests.conftest import Command
from tests.synthetic import Machine, perceptron

GRAPH = perceptron([512, 1024, 512], batch=64)
PLAIN = Machine(devices=4, rank_jitter_ratio=0.0)


def predicted(
    text: str, profile: MachineProfile, *, against: str | None = None, strategy: str = "ddp"
) -> PredictedStalls:
    request = EstimateRequest.of(GRAPH, text, strategy=strategy, profile=profile)
    return predict_stalls(request, against=against)


def printed(sections: list[Section]) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(rendered(sections))
    return console.export_text()


def step_s(text: str, profile: MachineProfile) -> float:
    return est.estimate(GRAPH, text, profile=profile).step_time_s


def test_stalls_are_differences_of_steps_over_the_step_of_a_node() -> None:
    profile = PLAIN.profile()
    found = predicted("3x2:m", profile)
    device_s, node_s, all_s = (step_s(text, profile) for text in ("1x1:m", "1x2:m", "3x2:m"))
    assert (found.one_device, found.one_node) == ("1x1:m", "1x2:m")
    assert found.interconnect.stall_s == pytest.approx(node_s - device_s)
    assert found.interconnect.ratio == pytest.approx((node_s - device_s) / node_s)
    assert found.network.stall_s == pytest.approx(all_s - node_s)
    # Six times as long is a stall of 500 %.
    assert found.network.ratio == pytest.approx(all_s / node_s - 1)
    assert found.network.low_s < found.network.stall_s < found.network.high_s
    # Shares of stalls are of the step they lengthen and beside it of the step of a node.
    lines = printed(predicted_sections(predicted("3x2:m", profile))).splitlines()
    inside, across = (node_s - device_s) / node_s, (all_s - node_s) / node_s
    shares = {line.split()[1]: re.findall(r"[-0-9.]+ %", line) for line in lines if ":m  " in line}
    assert len(shares["host"]) == 1, "a node's step is not what one device waits in"
    assert shares["interconnect"] == [format_ratio(inside)] * 2
    assert shares["network"] == [format_ratio((all_s - node_s) / all_s), format_ratio(across)]
    assert any("of its step" in line and "of a node's step" in line for line in lines)


def test_a_step_may_wait_for_nothing_but_not_for_less() -> None:
    # The links of a node are the slow ones: of 1.75 sizes of the gradients that eight ranks wait
    # for (2 (n - 1) / n), 1.5 are those of four, and their error is larger than the rest.
    slow = replace(PLAIN, bandwidth_bytes_per_s=1e8, latency_s=2e-4, network_bytes_per_s=1e9)
    network = predicted("2x4:m", slow.profile()).network
    assert network.low_s == 0.0
    assert network.high_s > 2 * network.stall_s > 0.0


def test_the_host_stall_is_what_one_device_waits_for_its_host() -> None:
    host = predicted("3x2:m", PLAIN.profile()).host
    alone = est.estimate(GRAPH, "1x1:m", profile=PLAIN.profile())
    assert host.stall_s == alone.breakdown.host_exposed_s
    assert host.ratio == pytest.approx(host.stall_s / alone.step_time_s)


def test_a_delay_of_every_byte_on_the_network_is_the_stall() -> None:
    # Where computing cannot go on beside a collective, all of it is waited for: over two nodes of
    # one device a ring sends each byte once, so that 1 ns a byte more is 1 ns a byte of gradients.
    gradient_bytes = sum(parameter.spec.nbytes for parameter in GRAPH.parameters)
    found = []
    for rate in (1e8, 1 / (1 / 1e8 + 1e-9)):
        machine = replace(PLAIN, exposed_ratio=1.0, slowdown_ratio=1.0, network_bytes_per_s=rate)
        network = predicted("2x1:m", machine.profile()).network
        found.append(network.stall_s)
    assert found[1] - found[0] == pytest.approx(gradient_bytes * 1e-9, rel=1e-6)


def test_one_device_waits_for_none_and_one_node_for_no_other() -> None:
    alone = predicted("1x1:m", PLAIN.profile())
    assert (alone.interconnect, alone.network) == (None, None)
    node = predicted("1x4:m", PLAIN.profile())
    assert node.interconnect is not None
    assert node.network is None
    assert node.node_s == node.step_s


def test_two_small_nodes_are_measured_against_one_large_one() -> None:
    profile = PLAIN.profile()
    found = predicted("2x2:m", profile, against="1x4:m")
    assert found.one_node == "1x4:m"
    assert found.network.stall_s == pytest.approx(
        step_s("2x2:m", profile) - step_s("1x4:m", profile)
    )


def test_a_strategy_that_a_node_cannot_divide_is_refused() -> None:
    with pytest.raises(StrategyError, match="shards over 4 ranks"):
        predicted("2x2:m", PLAIN.profile(), strategy="fsdp:shard=4")


SMALL = """
import torch

def mlp(batch=4):
    return torch.nn.Linear(512, 512), torch.randn(batch, 512)
"""


def test_the_command_prints_stalls_and_gives_them_as_json(tmp_path: Path, command: Command) -> None:
    (tmp_path / "models.py").write_text(SMALL)
    asked = ("stalls", f"{tmp_path}/models.py:mlp", "--on", "2x4:v100-p3-8xlarge")
    answer = command(*asked)
    assert (answer.code, answer.err) == (0, "")
    for word in ("interconnect", "network", "1x4:v100-p3-8xlarge", "times as long"):
        assert word in answer.out
    found = command(*asked, "--json", "--strategy", "fsdp").content
    assert found["step_s"] == pytest.approx(found["node_s"] + found["network"]["stall_s"])
    assert found["one_device"] == "1x1:v100-p3-8xlarge"


PROFILE = Machine(devices=4).profile()


def answers(loader: Loader, on: str = "1x1:m") -> InputAnswers:
    return input_answers(EstimateRequest.of(GRAPH, on, profile=PROFILE, loader=loader))


STEP_S = est.estimate(GRAPH, "1x1:m", profile=PROFILE).step_time_s


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 16])
def test_as_many_workers_are_needed_as_make_a_batch_in_a_step(needed: int) -> None:
    # A batch takes a worker a little less than `needed` steps.
    loader = Loader(prep_s=(needed - 0.02) * STEP_S / 64, cpu_ratio=0.0, workers=1)
    found = answers(loader)
    assert found.workers_needed == needed
    assert found.as_it_is.input_stall_s == pytest.approx(max((needed - 1.02) * STEP_S, 0), rel=1e-6)


def test_cached_shares_give_what_is_left_to_the_disk() -> None:
    # All from the disk a batch takes four steps, so that a quarter from the disk is just hidden.
    loader = Loader(
        sample_bytes=1e6, cached_ratio=0.0, disk_bytes_per_s=64e6 / (4 * STEP_S), workers=4
    )
    found = answers(loader)
    by_share = {each.change: each for each in found.changes}
    for share in CACHED_RATIOS:
        text = format_ratio(share)
        step_s = max(4 * (1 - share), 1.0) * STEP_S
        assert by_share[f"{text} cached"].samples_per_s == pytest.approx(64 / step_s)
        # Without waiting on workers and cores, the least of three rates says the same.
        assert by_share[f"{text} cached"].baseline_samples_per_s == pytest.approx(64 / step_s)
    assert found.cached_needed == pytest.approx(0.75, abs=0.005)
    twice = next(each for each in found.changes if each.change.startswith("a disk of"))
    assert twice.samples_per_s == pytest.approx(64 / (2 * STEP_S))


def test_shares_are_answered_by_the_disk_that_the_probe_measured() -> None:
    cost = InputCost(
        disk_bytes_per_s=64e6 / (4 * STEP_S), provenance=Provenance(source="measured", at="2026")
    )
    loader, profile = Loader(sample_bytes=1e6, workers=4), replace(PROFILE, input=cost)
    found = input_answers(EstimateRequest.of(GRAPH, "1x1:m", profile=profile, loader=loader))
    assert found.cached_needed == pytest.approx(0.75, abs=0.005)
    by_share = {each.change: each for each in found.changes}
    assert by_share["0.0 % cached"].samples_per_s == pytest.approx(64 / (4 * STEP_S))


def test_reading_then_preparing_in_one_worker_is_slower_than_the_least_of_the_rates() -> None:
    loader = Loader(
        sample_bytes=1e6,
        cached_ratio=0.0,
        disk_bytes_per_s=64e6 / (2 * STEP_S),
        prep_s=2 * STEP_S / 64,
        cpu_ratio=0.0,
        workers=1,
    )
    found = answers(loader)
    # Two steps of reading and two of preparing, one after the other; each rate alone is two.
    assert found.as_it_is.samples_per_s == pytest.approx(64 / (4 * STEP_S))
    assert found.as_it_is.baseline_samples_per_s == pytest.approx(64 / (2 * STEP_S))
    assert (found.without_samples_per_s, found.prep_samples_per_s) == (
        pytest.approx(64 / STEP_S),
        pytest.approx(64 / (2 * STEP_S)),
    )


def test_workers_that_only_take_the_cores_of_the_step_cannot_hide_their_work() -> None:
    found = answers(Loader(prep_s=0.5 * STEP_S / 64, workers=0))
    # One core: half a step of preparing is half a step more, with workers or without.
    assert found.as_it_is.samples_per_s == pytest.approx(64 / (1.5 * STEP_S))
    assert found.workers_needed is None


def test_limited_cores_are_asked_for_twice() -> None:
    loader = Loader(prep_s=4 * STEP_S / 64, workers=16, cores=1, cpu_ratio=1.0)
    changes = {each.change for each in answers(replace(loader, cpu_ratio=0.5)).changes}
    assert "2 cores" in changes


def test_the_command_answers_what_ifs_of_a_loader(tiny: str, command: Command) -> None:
    asked = ("stalls", tiny, "--batch", 8, "--on", "1x2:a100-sxm-40gb")
    loader = ("--loader", "sample=600kB,prep=10ms,workers=2,disk=1GB/s,cached=0.9")
    answer = command(*asked, *loader)
    assert (answer.code, answer.err) == (0, "")
    for word in ("as it is", "4 workers", "35 % cached", "workers would hide"):
        assert word in answer.out
    found = command(*asked, *loader, "--json").content
    assert found["input"]["as_it_is"]["input_stall_s"] > 0.03
    assert found["interconnect"]["stall_s"] < 0.01


class Files(Dataset[Any]):
    """Samples of 400 bytes, read from files of 5000, that sleep 3 ms."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sample"
        self.path.write_bytes(bytes(5000))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.path.read_bytes()
        time.sleep(0.003)
        return torch.rand(98), torch.tensor(random.random())


class Stream(IterableDataset[Any]):
    """Ten samples without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(10):
            time.sleep(0.002)
            yield torch.ones(25, 2)


def test_bytes_seconds_and_workers_of_a_loader_are_measured(tmp_path: Path) -> None:
    loader = DataLoader(Files(tmp_path), batch_size=8, num_workers=1, prefetch_factor=3)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    found = estimator.measure_loader(loader, batches=3)
    # 98 + 1 numbers of 4 bytes; a file is read whole, and little else.
    assert found.sample_bytes == 396.0
    assert found.stored_bytes == pytest.approx(5000, abs=200)
    assert found.prep_s >= 0.003
    assert found.cpu_ratio < 0.9
    assert (found.workers, found.source) == (1, "measured")
    assert found.take_s > 0
    # Random numbers are as they would have been.
    assert torch.equal(torch.rand(1), expected)


def test_a_stream_without_a_length_is_measured() -> None:
    found = estimator.measure_loader(DataLoader(Stream(), batch_size=4))
    assert (found.sample_bytes, found.workers) == (200.0, 0)
    assert found.prep_s >= 0.002


def test_a_loader_without_samples_is_refused() -> None:
    with pytest.raises(ModelError, match="gave no batch of tensors"):
        estimator.measure_loader(DataLoader([], batch_size=2))  # type: ignore[arg-type]


def test_what_is_watched_is_as_given_where_nothing_watches() -> None:
    watched = estimator.watch_loader([1, 2, 3])
    assert (list(watched), len(watched)) == ([1, 2, 3], 3)
    with pytest.raises(TypeError, match="has no length"):
        len(estimator.watch_loader(iter([1])))


def test_copies_of_batches_share_no_memory() -> None:
    batch = {"x": torch.ones(2), "more": (torch.zeros(1), [torch.ones(3)]), "name": "a"}
    twin = copied(batch)
    twin["x"] += 1
    twin["more"][1][0] += 1
    assert batch["x"].tolist() == [1, 1]
    assert batch["more"][1][0].tolist() == [1, 1, 1]  # type: ignore[index]
    assert twin["name"] == "a"


def test_hooks_take_less_than_a_hundredth_of_a_step_of_50_ms() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    watched = Watched(steps=10**9, warmup=1, is_synthetic=False, out=1)
    batches = [torch.ones(8, 4)] * 1000
    begun_s = time.process_time()
    for _ in watched.batches(batches, iter(batches)):
        watched.stepped(optimizer)
    hooked_s = time.process_time() - begun_s
    assert hooked_s / 1000 < 0.01 * 0.050
    assert len(watched.record.ended_s) == watched.record.batches == 1000


class Profiler:
    """Kernels of 2 s each second step, one of them inside another, and a span of the host's."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def events(self) -> list[Any]:
        spans = [("CUDA", 0, 2e6), ("CUDA", 1e6, 2e6), ("CUDA", 4e6, 6e6), ("CPU", 0, 9e6)]
        return [
            SimpleNamespace(
                device_type=SimpleNamespace(name=kind),
                time_range=SimpleNamespace(start=start, end=end),
            )
            for kind, start, end in spans
        ]


def test_what_an_accelerator_worked_is_taken_between_the_warm_up_and_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Profiler()
    monkeypatch.setattr(profiler, "profile", lambda **_: found)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    watched = Watched(steps=6, warmup=2, is_synthetic=False, out=1, is_profiled=True)
    for step in range(5):
        watched.stepped(optimizer)
        assert found.calls == (["start"] if step > 0 else [])
    with pytest.raises(ScriptEndsError):
        watched.stepped(optimizer)
    assert found.calls == ["start", "stop"]
    # 4 s in the 4 steps after the warm-up.
    assert watched.record.busy_s == pytest.approx(1.0)


def test_an_accelerator_works_where_any_of_its_spans_is() -> None:
    # 0 to 4 in two that overlap, one inside them, and 6 to 7.
    assert covered([(6.0, 7.0), (0.0, 3.0), (1.0, 2.0), (2.5, 4.0)]) == 5.0
    assert covered([]) == 0.0
