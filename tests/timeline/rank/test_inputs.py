"""What a loader adds to a step: the closed form equals a queue of workers played by events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.errors import WorkloadError
from estimator.estimates.table import estimate_many
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import InputCost, Provenance
from estimator.timeline.collectives.overlap import NO_OVERLAP
from estimator.timeline.rank.lanes import InputCosts, input_copies_s, input_costs, with_rates
from estimator.timeline.simulator.simulation import simulate
from estimator.timeline.simulator.tasks import COMPUTE, TaskList, play
from estimator.workload.loader import Loader
from tests.budgets import examples
from tests.conftest import Command
from tests.synthetic import Machine, perceptron

GRAPH = perceptron([512, 1024, 512], batch=64)
PROFILE = Machine(devices=4).profile()


def queue_of(
    workers: int, prefetch: int, disk_s: float, prep_s: float, step_s: float, steps: int
) -> TaskList:
    """A disk that serves reads in order, workers in turn, and steps that take a batch each."""
    tasks = TaskList()
    prepared: list[int] = []
    taken: list[int] = []
    for batch in range(steps):
        before = batch - workers
        slot = batch - workers * prefetch
        waits = [prepared[before]] if before >= 0 else []
        waits += [taken[slot]] if slot >= 0 else []
        read = tasks.add("disk", disk_s, *waits)
        prepared.append(tasks.add(f"worker {batch % workers}", prep_s, read))
        taken.append(tasks.add(COMPUTE, 0.0, prepared[-1]))
        tasks.add(COMPUTE, step_s)
    return tasks


SECONDS = st.integers(1, 12).map(float)


@settings(max_examples=examples(40), deadline=None)
@given(
    workers=st.integers(1, 5),
    prefetch=st.integers(1, 3),
    disk_s=SECONDS,
    prep_s=SECONDS,
    step_s=SECONDS,
)
def test_a_queue_of_workers_has_the_period_of_the_closed_form_whatever_is_prefetched(
    workers: int, prefetch: int, disk_s: float, prep_s: float, step_s: float
) -> None:
    loader = Loader(
        sample_bytes=1200.0,
        cached_ratio=0.0,
        disk_bytes_per_s=1200.0 / disk_s,
        prep_s=prep_s,
        cpu_ratio=0.0,
        workers=workers,
    )
    costs = input_costs(loader, PROFILE, samples=1, batches=1, ranks_per_node=1)
    expected = step_s + costs.stall_s(step_s)
    tasks = queue_of(workers, prefetch, disk_s, prep_s, step_s, 60 * workers).tasks
    played = simulate(tasks, NO_OVERLAP)
    ends = played.end_s[3::4, 0]
    assert (ends[-1] - ends[-1 - workers]) / workers == pytest.approx(expected, rel=1e-9)
    assert play(tasks, NO_OVERLAP) == pytest.approx(played.step_s, rel=1e-12)


def costs_of(loader: Loader, samples: int = 10, ranks: int = 1) -> InputCosts:
    return input_costs(loader, PROFILE, samples=samples, batches=1, ranks_per_node=ranks)


def test_workers_that_sleep_are_hidden_behind_the_step() -> None:
    sleeping = Loader(prep_s=0.01, cpu_ratio=0.0, workers=2)
    # Two workers make 10 samples of 10 ms each every 50 ms.
    assert costs_of(sleeping).stall_s(0.06) == 0.0
    assert costs_of(sleeping).stall_s(0.03) == pytest.approx(0.02)


def test_workers_that_work_take_the_core_that_computes() -> None:
    # A device of the machine is one core: 100 ms of it go to the workers however many there are.
    for workers in (1, 3):
        working = Loader(prep_s=0.01, workers=workers)
        assert costs_of(working).stall_s(1.0) == pytest.approx(0.1)


def test_without_workers_the_step_waits_for_reading_and_preparing() -> None:
    # 10 samples of 1 kB, 60 % of them at 1 MB/s: 6 ms; the rest at 10 MB/s: 0.4 ms; 50 ms of work.
    alone = Loader(
        sample_bytes=1e3,
        prep_s=5e-3,
        cached_ratio=0.4,
        disk_bytes_per_s=1e6,
        cache_bytes_per_s=1e7,
    )
    assert costs_of(alone).stall_s(0.2) == pytest.approx(0.0564)


def test_ranks_of_a_node_share_its_disk() -> None:
    disk = Loader(sample_bytes=1e3, cached_ratio=0.0, disk_bytes_per_s=1e6, workers=8)
    # 10 kB a rank at 1 MB/s are 10 ms, of four ranks 40 ms.
    assert costs_of(disk, ranks=4).stall_s(0.03) == pytest.approx(0.01)
    assert costs_of(disk, ranks=2).stall_s(0.03) == 0.0


def test_batches_are_copied_to_an_accelerator_before_it_computes() -> None:
    profile = load_profile("a100-sxm-40gb")
    (link,) = [each for each in profile.links if each.kind == "h2d"]
    loader = Loader(sample_bytes=1e6, workers=4)
    costs = input_costs(loader, profile, samples=64, batches=2, ranks_per_node=8)
    expected = 2 * link.latency_s + 64e6 / link.bandwidth_bytes_per_s
    assert costs.stall_s(0.1) == pytest.approx(expected)


def test_an_estimate_holds_the_stall_and_says_what_would_hide_it() -> None:
    def answer_of(loader: Loader | None) -> Any:
        return est.estimate(GRAPH, "1x2:m", profile=PROFILE, loader=loader)

    plain = answer_of(None)
    step_s = plain.step_time_s
    # Four workers would just make 64 samples within the step; one makes them in four steps.
    sleeping = Loader(prep_s=4 * step_s / 64, cpu_ratio=0.0, workers=1)
    fed = answer_of(sleeping)
    assert fed.step_time_s == pytest.approx(4 * step_s)
    assert fed.breakdown.input_stall_s == pytest.approx(3 * step_s)
    assert fed.breakdown.total_s == pytest.approx(fed.step_time_s)
    assert fed.bottleneck == "waiting for data: 3 more workers would hide it (75 % of the step)"
    assert fed.input_remedy == "3 more workers would hide it"
    assert plain.input_remedy == ""
    assert fed.timeline.step_time_s == pytest.approx(fed.step_time_s, rel=1e-9)
    hidden = answer_of(replace(sleeping, workers=4))
    assert hidden.step_time_s == pytest.approx(step_s)
    assert answer_of(replace(sleeping, workers=4, prep_s=0.0)).breakdown == plain.breakdown


def test_a_slow_disk_is_named_with_the_rate_that_would_do() -> None:
    plain = est.estimate(GRAPH, "1x2:m", profile=PROFILE)
    # Two ranks read 64 samples of 1 MB in a step: at half the rate that needs, half a step waits.
    needed = 2 * 64e6 / plain.step_time_s
    loader = Loader(
        sample_bytes=1e6, cached_ratio=0.0, disk_bytes_per_s=needed / 4, cpu_ratio=0.0, workers=8
    )
    fed = est.estimate(GRAPH, "1x2:m", profile=PROFILE, loader=loader)
    assert fed.step_time_s == pytest.approx(4 * plain.step_time_s)
    assert fed.bottleneck.startswith("waiting for data: a disk of ")


def test_a_table_that_is_asked_again_with_a_loader_is_answered_anew() -> None:
    loader = Loader(prep_s=10.0)
    plain, fed, again = (
        estimate_many(GRAPH, ["1x2:m"], profile=PROFILE, loader=each).input_stall_s[0]
        for each in (None, loader, None)
    )
    assert plain == again == 0.0
    assert fed > 0.0


def test_columns_with_a_loader_equal_their_estimates() -> None:
    loader = Loader(
        sample_bytes=1e5, prep_s=1e-4, workers=2, cached_ratio=0.5, disk_bytes_per_s=1e9
    )
    texts = ["1x1:m", "1x4:m", "2x2:m", "3x4:m"]
    batches = np.array([16, 64, 256, 64])
    table = estimate_many(GRAPH, texts, batch_per_gpu=batches, profile=PROFILE, loader=loader)
    for row, text in enumerate(texts):
        batch = int(batches[row])
        one = est.estimate(GRAPH, text, batch_per_gpu=batch, profile=PROFILE, loader=loader)
        assert table.step_time_s[row] == pytest.approx(one.step_time_s, rel=1e-12)
        assert table.input_stall_s[row] == pytest.approx(one.breakdown.input_stall_s, rel=1e-9)
        assert table.high_s[row] == pytest.approx(one.high_s, rel=1e-9)
        assert one.breakdown.input_stall_s > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers=9999", "workers is from 0 to 4096, found 9999"),
        ("prep=8", "'8' is not a duration"),
        ("prefetch=2", "'prefetch=2' is no knob of a loader; its knobs are sample=, prep="),
        ("speed", "'speed' is no knob"),
        ("cached=nan", "cached_ratio is from 0 to 1"),
        ("workers=two", "workers: "),
        ("workers=inf", "is no whole number; write one such as 4"),
        ("workers=²", "is no whole number"),
        ("cores=" + "9" * 5000, "is not from 0 to"),
        ("sample=1kB,sample=2kB", "'sample' stands twice; write it once"),
        (" ", "a loader is text such as"),
    ],
)
def test_a_loader_that_makes_no_sense_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said) as error:
        Loader.parse(text)
    assert "\n" not in str(error.value)


def test_the_command_takes_a_loader(tiny: str, command: Command) -> None:
    asked = ("estimate", tiny, "--batch", 8, "--on", "1x2:a100-sxm-40gb")
    loader = ("--loader", "sample=600kB,prep=10ms,workers=2,disk=1GB/s,cached=0.9")
    found = command(*asked, *loader, "--json").content
    # Two workers make 8 samples of 10 ms, of which a tenth is read, in 40 ms and a little.
    assert found["step_time_s"] == pytest.approx((0.08 + 8 * 6e5 * 0.1 / 1e9) / 2, rel=1e-6)
    assert found["breakdown"]["input_stall_s"] > 0.03
    assert found["loader"]["workers"] == 2
    said = command(*asked, *loader).out
    assert "waiting for data" in said
    assert " of waiting: " in said


RATES = InputCost(
    disk_bytes_per_s=2e8,
    cache_bytes_per_s=4e9,
    jpeg_pixels_per_s=5e7,
    tokens_per_s=1e8,
    provenance=Provenance(source="measured", at="2026"),
)


def test_a_loader_takes_the_rates_that_the_machine_was_measured_at() -> None:
    profile = replace(PROFILE, input=RATES)
    loader = Loader.parse("sample=100kB,pixels=200e3,tokens=1000,cached=0.75,prep=1ms")
    found = with_rates(loader, profile)
    # 4 ms of decoding and 10 µs of tokens; a quarter of 100 kB at 200 MB/s, the rest at 4 GB/s.
    assert found.prep_s == pytest.approx(0.001 + 0.004 + 10e-6)
    assert found.read_s(1) == pytest.approx(0.25 * 1e5 / 2e8 + 0.75 * 1e5 / 4e9)
    assert with_rates(found, profile) == found
    costs = input_costs(loader, profile, samples=10, batches=1, ranks_per_node=1)
    assert costs.own_s >= 10 * (found.prep_s + found.read_s(1))


def test_measured_preparing_holds_reading_of_the_cache_and_named_rates_stay() -> None:
    profile = replace(PROFILE, input=RATES)
    measured = Loader(sample_bytes=1e5, prep_s=0.001, source="measured")
    assert with_rates(measured, profile).cache_bytes_per_s is None
    named = Loader.parse("sample=100kB,disk=1GB/s,cache=9GB/s")
    assert with_rates(named, profile) == named


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cached=0.5", "does not describe; say how fast"),
        ("pixels=1000", "no measured rate of jpeg pixels"),
        ("tokens=1000", "no measured rate of tokens"),
    ],
)
def test_a_rate_that_was_not_measured_is_asked_for(text: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        with_rates(Loader.parse(text), PROFILE)


def test_batches_are_copied_from_the_memory_that_the_loader_uses() -> None:
    gpu = load_profile("a100-sxm-40gb")
    (pinned,) = (link for link in gpu.links if link.kind == "h2d")
    pageable = replace(pinned, pinned=False, bandwidth_bytes_per_s=4e9, latency_s=0.0)
    profile = replace(gpu, links=(*gpu.links, pageable))
    slow = Loader(sample_bytes=1e6, pinned=False)
    assert input_copies_s(slow, profile, 32, 1) == pytest.approx(32e6 / 4e9)
    fast = replace(slow, pinned=True)
    expected_s = pinned.latency_s + 32e6 / pinned.bandwidth_bytes_per_s
    assert input_copies_s(fast, profile, 32, 1) == pytest.approx(expected_s)
    # With one of them known, that one it is.
    assert input_copies_s(slow, gpu, 32, 1) == pytest.approx(expected_s)
