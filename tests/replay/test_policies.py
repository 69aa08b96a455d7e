"""Policies do what their papers say, on speeds that are worked out here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from calibration.baselines import OptimusRegressor
from replay_speeds import FittedSpeeds, MistakenSpeeds, sample_counts
from scipy.optimize import linprog
from scipy.stats import lognorm

from estimator.errors import AllocationError, WorkloadError
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes, PlacementRule, ReplayNode
from estimator.replay.policies import BUILT_IN, load_policy
from estimator.replay.policies.goodput import assigned, batches
from estimator.replay.policies.ones import Ones, reordered
from estimator.replay.policies.queues import time_shares
from estimator.replay.speeds import CalibratedSpeeds, EngineSpeeds, TrueSpeeds
from estimator.replay.view import Grant, View, Waiting
from tests.synthetic import perceptron

GRAPH = perceptron([8, 8])


class Table:
    """Samples a second of each job on 1, 2, 4 … devices, by machine type if they differ."""

    def __init__(self, **rates: Sequence[float]) -> None:
        self.rates = rates

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        batch = global_batch or job.global_batch
        found = [self.rates[job.name][shape.ranks.bit_length() - 1] for shape in shapes]
        return [batch / rate for rate in found]


def waiting(name: str, samples: float, devices: int = 1, **more: object) -> Waiting:
    attained = float(more.pop("attained", 0.0))  # type: ignore[arg-type]
    grant = more.pop("grant", None)
    fields: dict[str, object] = {"global_batch": 4, "arrival_s": 0.0, **more}
    job = Job(name=name, graph=GRAPH, samples=samples, devices=devices, **fields)  # type: ignore[arg-type]
    return Waiting(
        job=job,
        remaining_samples=samples,
        attained_device_s=attained,
        grant=grant,  # type: ignore[arg-type]
    )


def counts(policy: str, jobs: list[Waiting], table: Table, devices: int = 4) -> dict[str, int]:
    nodes = Nodes((ReplayNode("m", devices),))
    plan = load_policy(policy).plan(View(now_s=0, jobs=jobs, nodes=nodes, believed=table))
    return {name: grant.count for name, grant in plan.items()}


def test_max_min_stops_at_the_count_that_is_believed_fastest() -> None:
    table = Table(a=(1, 0.9, 0.8), b=(1, 1.5, 2))
    jobs = [waiting("a", 10), waiting("b", 10)]
    assert counts("max-min", jobs, table) == {"a": 1, "b": 2}
    assert counts("max-min-uncapped", jobs, table) == {"a": 2, "b": 2}


def test_max_min_gives_the_last_devices_to_who_scales_best() -> None:
    table = Table(a=(1, 1.2, 1.3), b=(1, 1.9, 3), c=(1, 1.5, 2))
    jobs = [waiting("a", 10), waiting("b", 10), waiting("c", 10)]
    assert counts("max-min", jobs, table) == {"a": 1, "b": 2, "c": 1}


def test_max_min_ranks_equals_by_their_speed_up_over_one_device() -> None:
    # On four devices b is 2.9 times as fast as on one, a 2.6 times, although a gains more from two
    # to four: 2.6 / 1.6 against 2.9 / 1.9.
    table = Table(a=(1, 1.6, 2.6), b=(1, 1.9, 2.9))
    jobs = [waiting("a", 10), waiting("b", 10)]
    assert counts("max-min", jobs, table, devices=6) == {"a": 2, "b": 4}


def test_afs_lets_the_longer_job_have_a_device_only_if_it_gains_more_by_the_rule() -> None:
    # s is shorter. Gains from 1 to 2: s (1.4 − 1) / 1 = 0.4; l (x − 1) / x: 0.41 for x = 1.7,
    # 0.375 for x = 1.6. A third device is one of four: from 2 to 4 neither gains.
    short, long = waiting("s", 10), waiting("l", 100)
    for rate, winner in ((1.7, "l"), (1.6, "s")):
        table = Table(s=(1, 1.4, 1.4), l=(1, rate, rate))
        found = counts("afs", [short, long], table, devices=3)
        assert found == {"s": 1, "l": 1} | {winner: 2}


def test_afs_starts_the_shortest_where_not_all_can_run() -> None:
    jobs = [waiting("l", 100), waiting("s", 10)]
    assert counts("afs", jobs, Table(s=(1,), l=(1,)), devices=1) == {"s": 1}


def test_srtf_goes_by_remaining_time_at_the_request() -> None:
    # 100 samples at 10 a second end before 50 at 2.
    table = Table(fast=(5, 10, 0), slow=(1, 2, 0))
    jobs = [waiting("slow", 50, 2), waiting("fast", 100, 2)]
    assert counts("srtf", jobs, table, devices=2) == {"fast": 2}


def test_tiresias_prefers_who_has_attained_less_than_a_device_hour() -> None:
    table = Table(old=(1, 1, 1), new=(1, 1, 1), young=(1, 1, 1))
    jobs = [
        waiting("old", 10, 2, attained=3601),
        waiting("young", 10, 2, attained=3599),
        waiting("new", 10, 2),
    ]
    assert counts("tiresias", jobs, table) == {"young": 2, "new": 2}


def test_optimus_gives_devices_to_who_saves_most_time_for_each() -> None:
    # From 1 to 2: a saves 100 − 50, b saves 60 − 40; then a from 2 to 4 saves (50 − 40) / 2.
    table = Table(a=(1, 2, 2.5), b=(1, 1.5, 1.6))
    jobs = [waiting("a", 100), waiting("b", 60)]
    assert counts("optimus", jobs, table, devices=3) == {"a": 2, "b": 1}
    assert counts("optimus", jobs, table, devices=4) == {"a": 2, "b": 2}


def test_gavel_gives_the_fast_machine_to_who_gains_most_from_it() -> None:
    # Relative to the slow machine cnn gains 4 and rnn 2, each wants one device, one of each exists:
    # cnn fast and rnn slow make 4 + 1 = 5, the other way round 1 + 2 = 3.
    rates = {"cnn": {"slow": 1.0, "fast": 4.0}, "rnn": {"slow": 3.0, "fast": 6.0}}
    shares = time_shares(rates, {"cnn": 1, "rnn": 1}, {"slow": 1, "fast": 1})
    assert shares["cnn"] == pytest.approx({"slow": 0, "fast": 1})
    assert shares["rnn"] == pytest.approx({"slow": 1, "fast": 0})


def test_gavel_shares_a_machine_by_rounds() -> None:
    table = Table(a=(1,), b=(1,))
    policy, nodes = load_policy("gavel"), Nodes((ReplayNode("m", 1),))
    had = []
    for _ in range(8):
        view = View(now_s=0, jobs=[waiting("a", 9), waiting("b", 9)], nodes=nodes, believed=table)
        had += list(policy.plan(view))
    assert len(had) == 8


def test_pollux_grows_the_batch_as_far_as_the_noise_allows() -> None:
    # φ = 12, B₀ = 4: batch 8 is worth 8 · 16 / 20 = 6.4 samples of 4, 16 is worth 9.14.
    job = waiting("a", 10, gradient_noise_samples=12.0, most_global_batch=16).job
    assert batches(job) == [4, 8, 16]
    assert job.useful_samples(8) == pytest.approx(6.4)
    assert job.useful_samples(16) == pytest.approx(16 * 16 / 28)
    assert batches(waiting("b", 10).job) == [4]


def test_pollux_reaches_the_best_fitness_of_all_counts() -> None:
    # Section 4.2 with p = −1: the harmonic mean of speed-ups over one device, on eight devices.
    table = Table(a=(1, 1.4, 1.6, 1.7), b=(1, 1.9, 3.4, 5.5), c=(2, 3, 4, 4.4))
    curves = {name: dict(zip((1, 2, 4, 8), rates)) for name, rates in table.rates.items()}

    def fitness(given: Sequence[int]) -> float:
        return 3 / sum(curves[name][1] / curves[name][n] for name, n in zip("abc", given))

    found = counts("pollux", [waiting(n, 100, global_batch=8) for n in "abc"], table, devices=8)
    choices = itertools.product((1, 2, 4, 8), repeat=3)
    best = max(fitness(each) for each in choices if sum(each) <= 8)
    assert fitness([found[name] for name in "abc"]) == pytest.approx(best)


class ByMachine:
    """Samples a second on one device by job and machine type; n devices are n^0.9 times as fast.

    Unlike devices add up; 0 stands for a machine that cannot hold the job.
    """

    def __init__(self, **rates: dict[str, float]) -> None:
        self.rates = rates

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        batch, rates = global_batch or job.global_batch, self.rates[job.name]
        parts = [(shape._replace(also=()), *shape.also) for shape in shapes]
        found = [sum(rates[each.machine] * each.ranks**0.9 for each in some) for some in parts]
        return [batch / rate if rate else math.inf for rate in found]


def unlike(slow: int = 4, fast: int = 4) -> Nodes:
    return Nodes((ReplayNode("slow", slow), ReplayNode("fast", fast)))


def unlike_grants(policy: str, jobs: list[Waiting], speeds: ByMachine) -> dict[str, Grant]:
    view = View(now_s=600, jobs=jobs, nodes=unlike(), believed=speeds)
    return dict(load_policy(policy).plan(view))


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy_uses_unlike_machines(policy: str) -> None:
    names = [f"j{number}" for number in range(8)]
    speeds = ByMachine(**{name: {"slow": 1.0, "fast": 3.0} for name in names})
    jobs = [waiting(name, 1e4, most_devices=4) for name in names]
    grants = unlike_grants(policy, jobs, speeds)
    held = dict.fromkeys(("slow", "fast"), 0)
    for grant in grants.values():
        for machine, count in grant.parts:
            held[machine] += count
    assert held == {"slow": 4, "fast": 4}


@pytest.mark.parametrize("policy", ["max-min", "afs", "optimus", "pollux", "sia"])
def test_the_fast_machine_goes_to_who_gains_most_from_it(policy: str) -> None:
    speeds = ByMachine(cnn={"slow": 1.0, "fast": 8.0}, rnn={"slow": 3.0, "fast": 4.0})
    fixed = {"devices": 4, "most_devices": 4}
    jobs = [waiting(name, 1e4, **fixed, grant=Grant(4, "slow")) for name in ("rnn", "cnn")]
    grants = unlike_grants(policy, jobs, speeds)
    assert {name: grant.machine for name, grant in grants.items()} == {"cnn": "fast", "rnn": "slow"}


def test_a_long_job_trains_on_unlike_devices_at_once_where_that_pays() -> None:
    speeds = ByMachine(a={"slow": 2.0, "fast": 3.0})
    job = waiting("a", 1e5, global_batch=64)
    assert unlike_grants("max-min", [job], speeds)["a"] == Grant(4, "fast", also=(("slow", 4),))
    # A tenth more is not worth it.
    speeds = ByMachine(a={"slow": 0.2, "fast": 3.0})
    assert unlike_grants("max-min", [job], speeds)["a"] == Grant(4, "fast")


def test_counts_of_a_job_keep_its_bounds_and_its_layout() -> None:
    assert waiting("a", 1, 6, global_batch=64).job.counts(20) == [1, 2, 4, 6, 8, 16]
    bounded = waiting("a", 1, 6, global_batch=64, least_devices=3, most_devices=12).job
    assert bounded.counts(20) == [3, 4, 6, 8, 12]
    # Replicas of two stages: 1, 2, 4, 8 of them, and the three asked for.
    assert waiting("a", 1, 6, global_batch=64, layout="pp=2").job.counts(20) == [2, 4, 6, 8, 16]


def test_a_view_of_unlike_machines_wants_one_named() -> None:
    view = View(now_s=0, jobs=[], nodes=unlike(), believed=ByMachine())
    with pytest.raises(WorkloadError, match="the cluster has slow, fast; say of which machine"):
        view.curve(waiting("a", 1).job)


@pytest.mark.parametrize(("jobs", "devices", "least"), [(4, (4, 4), 0.93), (80, (64, 64), 0.995)])
def test_sia_assigns_as_well_as_its_program_allows(
    jobs: int, devices: tuple[int, ...], least: float
) -> None:
    """Against the bound of the linear relaxation, which no assignment beats."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        speed, scaling = rng.uniform(0.2, 1, (jobs, 2)), rng.uniform(0.4, 1, jobs)
        keys = np.array(list(itertools.product(range(jobs), range(2), (1, 2, 4, 8))))
        job, kind, count = keys.T
        rate = speed[job, kind] * count ** scaling[job] / speed.min(axis=1)[job]
        costs = rate**-0.5 - 1.1
        taken = assigned(costs, jobs=job, types=kind, counts=1.0 * count, devices=[*devices])
        assert len(set(job[taken])) == len(taken)
        held = np.bincount(kind[taken], count[taken], 2)
        assert (held <= devices).all()
        limits = np.concatenate([np.eye(jobs)[job].T, count * np.eye(2)[kind].T])
        bound = linprog(costs, A_ub=limits, b_ub=[*np.ones(jobs), *devices], bounds=(0, 1))
        assert costs[taken].sum() <= least * bound.fun


def test_sia_at_most_doubles_a_job_and_weighs_its_restart() -> None:
    speeds = ByMachine(a={"slow": 1.0, "fast": 1.05})
    new, running = waiting("a", 1e4), waiting("a", 1e4, grant=Grant(4, "slow"))
    assert unlike_grants("sia", [new], speeds)["a"].count == 1
    two = waiting("a", 1e4, global_batch=8, grant=Grant(2, "slow"))
    assert unlike_grants("sia", [two], speeds)["a"].count == 4
    # Five percent faster elsewhere is less than a restart of 30 s costs a job 600 s old.
    assert unlike_grants("sia", [running], speeds)["a"] == Grant(4, "slow")


def test_ones_grows_the_batch_with_the_devices_up_to_its_limit() -> None:
    # The job's own share of a device is 4; after two epochs it may have twice its devices.
    job = waiting("a", 100, 1, epoch_samples=10.0, most_global_batch=64).job
    nodes = Nodes((ReplayNode("m", 8),))
    for epochs, most in ((0, 1), (2, 2), (4, 4), (8, 4)):
        held = Waiting(job=job, remaining_samples=100 - 10 * epochs)
        table = Table(a=(1, 2, 4, 8))
        view = View(now_s=0, jobs=[held], nodes=nodes, believed=table)
        grant = Ones(0).plan(view)["a"]
        assert grant.count == most
        assert grant.global_batch == 4 * most


def test_ones_grows_no_batch_that_does_not_fit_into_memory() -> None:
    class Small(Table):
        """Four samples a device fit, not more."""

        def step_times_s(self, job, shapes, global_batch=None):  # type: ignore[no-untyped-def]
            steps_s = super().step_times_s(job, shapes, global_batch)
            batch = global_batch or job.global_batch
            return [
                s if batch <= 4 * shape.ranks else math.inf
                for s, shape in zip(steps_s, shapes, strict=True)
            ]

    # Its own share of a device is 8: on two devices 8 samples, not the 16 that it would grow to.
    job = waiting("a", 100, 1, epoch_samples=10.0, most_global_batch=64, global_batch=8).job
    nodes = Nodes((ReplayNode("m", 4),))
    policy, table = Ones(0), Small(a=(1, 2, 4))
    for done in (0, 20, 40, 60):
        held = Waiting(job=job, remaining_samples=100 - done)
        for _ in range(3):
            view = View(now_s=0, jobs=[held], nodes=nodes, believed=table)
            plan = policy.plan(view)
            for grant in plan.values():
                assert view.rate(job, grant.count, "m", grant.global_batch) > 0
        # A round or two after a batch was found too large a smaller one trains.
        assert plan["a"].count == (2 if done < 40 else 4)


def test_rates_asked_together_are_those_asked_one_by_one() -> None:
    nodes = Nodes((ReplayNode("t4-g4dn", 4), ReplayNode("t4-g4dn", 4)))
    job = replace(real_job(), most_global_batch=256)
    rates = [(job, 1, 64), (job, 2, 128), (job, 2, 96), (job, 8, 128), (job, 2, None)]
    together, alone = EngineSpeeds(), EngineSpeeds()
    view = View(now_s=0, jobs=[], nodes=nodes, believed=together)
    view.ask(rates)
    for of_job, count, batch in rates:
        shape = nodes.packed("t4-g4dn", count)
        (step_s,) = alone.step_times_s(of_job, [shape], batch)
        asked = batch or of_job.global_batch
        assert view.rate(of_job, count, None, batch) == asked / step_s


def test_of_a_batch_chosen_for_a_count_no_other_count_is_asked() -> None:
    asked = []

    class Asked(Table):
        def step_times_s(self, job, shapes, global_batch=None):  # type: ignore[no-untyped-def]
            asked.extend((shape.ranks, global_batch) for shape in shapes)
            return super().step_times_s(job, shapes, global_batch)

    one = waiting("a", 10, most_global_batch=64)
    nodes = Nodes((ReplayNode("m", 4),))
    view = View(now_s=0, jobs=[one], nodes=nodes, believed=Asked(a=(1, 2, 4)))
    assert view.rate(one.job, 2, None, 16) == 2
    assert asked == [(2, 16)]


def test_a_plan_that_names_taken_devices_is_refused() -> None:
    nodes = Nodes((ReplayNode("m", 2), ReplayNode("m", 2)))
    nodes.take("a", 2, "m", ((0, 2),))
    with pytest.raises(AllocationError, match="given 2 devices of m as"):
        nodes.take("b", 2, "m", ((0, 1), (1, 1)))


def test_ones_lets_no_job_grow_before_two_epochs() -> None:
    table = Table(a=(1, 2, 4))
    young = waiting("a", 100, 1, epoch_samples=10.0)
    assert counts("ones", [young], table) == {"a": 1}
    later = Waiting(job=young.job, remaining_samples=79.0, grant=Grant(1, "m"))
    assert counts("ones", [later], table) == {"a": 2}


def trained(name: str, epochs: float, devices: int) -> Waiting:
    """A job of 10 epochs of 10 samples that has trained some of them."""
    job = waiting(name, 100, devices, epoch_samples=10.0).job
    return Waiting(job=job, remaining_samples=100 - 10 * epochs)


def ones_plans(policy: Ones, rounds: list[list[Waiting]], table: Table) -> list[dict[str, int]]:
    """Counts of each round on two devices."""
    nodes = Nodes((ReplayNode("m", 2),))
    plans = [policy.plan(View(now_s=0, jobs=j, nodes=nodes, believed=table)) for j in rounds]
    return [{name: grant.count for name, grant in plan.items()} for plan in plans]


def test_ones_keeps_its_schedule_until_an_epoch_ends() -> None:
    # Either of two equal jobs fills both devices; only another draw would prefer the other.
    table = Table(a=(1, 2), b=(1, 2))
    for seed in range(5):
        rounds = [[trained(name, 5 + part / 20, 2) for name in "ab"] for part in range(20)]
        plans = ones_plans(Ones(seed), rounds, table)
        assert plans == [plans[0]] * 20
        assert list(plans[0].values()) == [2]


def test_ones_admits_a_new_job_to_a_full_cluster() -> None:
    # Before its first epoch ends a job has Y = 0 and costs nothing: it replaces the one that has.
    table = Table(old=(1, 2), new=(1, 2))
    old, new = trained("old", 5, 2), trained("new", 0, 2)
    for seed in range(5):
        assert ones_plans(Ones(seed), [[old], [old, new]], table) == [{"old": 2}, {"new": 2}]


def test_ones_prefers_who_is_closer_to_the_epochs_of_jobs_that_have_ended() -> None:
    # After a job of 10 epochs, 8 done leave β = 2, some 2 epochs; 2 done leave β = 8, some 8. With
    # β = 1 for both, either would seem to have one epoch left and be chosen as often.
    table = Table(ended=(1, 2), near=(1, 2), far=(1, 2))
    rounds = [[trained("ended", 9, 2)], [trained("far", 2, 2), trained("near", 8, 2)]]
    chosen = [ones_plans(Ones(seed), rounds, table)[1] for seed in range(20)]
    assert chosen.count({"near": 2}) >= 16


def test_ones_reorders_so_that_the_fewest_devices_change_hands() -> None:
    # Job 1 keeps two of its three devices and 2 its one; 2's other and 3 take what is left.
    running = np.array([1, 1, 1, 2, -1])
    assert reordered(np.array([[0, 2, 2, 1]]), running).tolist() == [[1, 1, 2, 2, 3]]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(WorkloadError, match="'lottery' is no policy; use fifo, max-min"):
        load_policy("lottery")
    with pytest.raises(WorkloadError, match="':' cannot be imported"):
        load_policy(":")
    with pytest.raises(WorkloadError, match="'nowhere:plan' cannot be imported"):
        load_policy("nowhere:plan")


MACHINE = "gtx-1080-roce"
ON_CUDA = perceptron([64, 64], target="cuda")


def real_job(name: str = "a") -> Job:
    return Job(name=name, arrival_s=0, graph=ON_CUDA, samples=1e6, devices=4, global_batch=64)


def test_hidden_factors_are_the_same_for_one_seed_and_spread_as_said() -> None:
    jobs = [real_job(str(number)) for number in range(400)]
    shape = [AllocationShape(MACHINE, (1,))]
    (engine_s,) = EngineSpeeds().step_times_s(jobs[0], shape)
    true = TrueSpeeds(jobs, 3, allocation_spread=0.0)
    ratios = [true.step_times_s(job, shape)[0] / engine_s for job in jobs]
    again = TrueSpeeds(jobs, 3, allocation_spread=0.0)
    assert ratios == [again.step_times_s(job, shape)[0] / engine_s for job in jobs]
    # On one device only computing counts: 12 %, to within four standard errors.
    spread = lognorm.fit(ratios, floc=0)[0]
    assert spread == pytest.approx(0.12, abs=4 * 0.12 / (2 * 400) ** 0.5)


def test_mistaken_speeds_are_exact_on_one_device_and_one_factor_a_power_of_two() -> None:
    jobs = [real_job()]
    exact = EngineSpeeds()
    mistaken = MistakenSpeeds(exact, 0.25, jobs, 0)
    shapes = [AllocationShape(MACHINE, (count,)) for count in (1, 2, 3, 4)]
    pairs = zip(mistaken.step_times_s(jobs[0], shapes), exact.step_times_s(jobs[0], shapes))
    ratios = [wrong / right for wrong, right in pairs]
    assert ratios[0] == 1
    assert ratios[1] == pytest.approx(ratios[2])
    assert len({round(ratio, 9) for ratio in ratios}) == 3


def test_calibrated_speeds_move_towards_what_was_observed() -> None:
    job, speeds, shape = real_job(), CalibratedSpeeds(), AllocationShape(MACHINE, (2,))
    (before,) = speeds.step_times_s(job, [shape])
    assert before == pytest.approx(EngineSpeeds().step_times_s(job, [shape])[0])
    assert list(speeds.observe(job, shape, 1.5 * before, None)) == ["a"]
    assert not speeds.observe(job, shape, 1.5 * before, None)
    (after,) = speeds.step_times_s(job, [shape])
    assert 1.2 * before < after <= 1.5 * before * (1 + 1e-9)
    others = [AllocationShape(MACHINE, (4,)), AllocationShape(MACHINE, (1,))]
    for found, cold in zip(
        speeds.step_times_s(job, others), EngineSpeeds().step_times_s(job, others), strict=True
    ):
        assert found > cold


def test_a_fitted_form_finds_the_steps_that_it_was_made_of() -> None:
    class Formed:
        """Optimus' form: 2 ms a sample of each rank, 10 ms, and 1 ms a rank."""

        def step_times_s(
            self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
        ) -> list[float]:
            return [0.002 * 64 / each.ranks + 0.01 + 0.001 * each.ranks for each in shapes]

    job, nodes = real_job(), Nodes((ReplayNode("m", 16),))
    speeds = FittedSpeeds(OptimusRegressor, Formed(), partial(sample_counts, nodes))
    found = speeds.step_times_s(job, [AllocationShape("m", (8,)), AllocationShape("m", (16,))])
    assert found == pytest.approx([0.016 + 0.018, 0.008 + 0.026])
    assert list(speeds.observe(job, AllocationShape("m", (8,)), 0.05, None)) == ["a"]
    assert not speeds.observe(job, AllocationShape("m", (8,)), 0.05, None)
    assert speeds.step_times_s(job, [AllocationShape("m", (8,))])[0] > 0.034


@pytest.mark.parametrize("held", list(itertools.product((0, 1, 2, 3), repeat=2)))
def test_a_job_is_packed_onto_as_few_nodes_as_can_be(held: tuple[int, int]) -> None:
    nodes = Nodes((ReplayNode("m", 4), ReplayNode("m", 4)))
    for index, devices in enumerate(held):
        nodes.free_on[index] -= devices
    given = nodes.take("job", 2, "m")
    enough = [4 - devices for devices in held if 4 - devices >= 2]
    assert len(given) == (1 if enough else 2)
    if enough:
        (chosen,) = given
        assert 4 - held[chosen] == min(enough)


@pytest.mark.parametrize(
    ("rule", "taken", "alone"),
    [
        # Three of the four devices of each node are free on two nodes, two on the third.
        ("pack", {0: 3, 2: 2}, (4, 1)),
        ("even", {0: 2, 1: 3}, (3, 2)),
        ("spread", {0: 2, 1: 2, 2: 1}, (2, 2, 1)),
    ],
)
def test_five_devices_are_placed_by_the_rule(
    rule: PlacementRule, taken: dict[int, int], alone: tuple[int, ...]
) -> None:
    nodes = Nodes((ReplayNode("m", 4),) * 3, rule)
    assert nodes.packed("m", 5) == AllocationShape("m", alone)
    nodes.free_on = [3, 3, 2]
    assert nodes.take("job", 5, "m") == taken


@pytest.mark.parametrize("policy", BUILT_IN)
def test_no_policy_plans_on_nodes_that_are_all_down(policy: str) -> None:
    nodes = Nodes((ReplayNode("m", 4),))
    nodes.set_down(0, True)
    table = Table(a=(1, 2, 4))
    view = View(now_s=0, jobs=[waiting("a", 10)], nodes=nodes, believed=table)
    assert not load_policy(policy).plan(view)
