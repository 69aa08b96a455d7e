"""What to rent: offers cost what their instances do, choices are those of a look at them all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import estimator as est
from estimator.advise.rent.offers import Choice, Offer, allocations_of, choose, offers
from estimator.advise.rent.revocations import Revocations
from estimator.advise.rent.transient import Spot, best_interval_s, pareto_front
from estimator.errors import PriceError, WorkloadError
from estimator.machines.prices import Price, PriceList
from estimator.placement.allocation import Allocation
from estimator.units import format_bytes
from tests.synthetic import perceptron

GRAPH = perceptron([2048, 2048, 2048], target="cuda")
MACHINES = ("t4-g4dn", "v100-p3-8xlarge")
PRICES = PriceList(
    [
        Price(machine="t4-g4dn", instance_type="a", devices=1, usd_per_hour=1.0),
        Price(machine="t4-g4dn", instance_type="b", devices=4, usd_per_hour=3.0),
        Price(
            machine="v100-p3-8xlarge",
            instance_type="c",
            devices=4,
            usd_per_hour=12.0,
            spot_usd_per_hour=2.0,
            billed_s=3600.0,
        ),
    ]
)


def offered(*allocations: str, **asked: Any) -> list[Offer]:
    batch = {} if "global_batch" in asked else {"batch_per_gpu": GRAPH.batch}
    asked = {"samples": 1e8, "prices": PRICES} | batch | asked
    return offers(GRAPH, allocations, **asked).offers


def test_an_offer_takes_the_estimated_time_and_costs_its_instances() -> None:
    (found,) = offered("2x2:t4-g4dn", strategies=("ddp",))
    answer = est.estimate(GRAPH, "2x2:t4-g4dn")
    assert found.duration_s == pytest.approx(answer.duration_s(samples=1e8))
    assert found.high_s / found.low_s == pytest.approx(answer.high_s / answer.low_s)
    # Two devices are had in an instance of four, at 3 USD; two instances, by the second.
    assert found.usd == pytest.approx(2 * 3.0 * np.ceil(found.duration_s) / 3600)


def test_started_hours_of_every_instance_are_paid() -> None:
    (found,) = offered("3x4:v100-p3-8xlarge", strategies=("ddp",))
    assert found.usd == 3 * 12.0 * np.ceil(found.duration_s / 3600)


def test_the_fastest_strategy_is_offered() -> None:
    (found,) = offered("2x4:t4-g4dn", strategies=("fsdp", "ddp", "zero1"))
    rates = {
        strategy: est.estimate(GRAPH, "2x4:t4-g4dn", strategy=strategy).samples_per_s or 0.0
        for strategy in ("fsdp", "ddp", "zero1")
    }
    assert found.strategy == max(rates, key=rates.__getitem__)


def test_ranks_share_a_global_batch_in_the_fewest_micro_batches_that_fit() -> None:
    powers = [1 << power for power in range(30)]
    alone = est.estimate_many(GRAPH, ["1x1:t4-g4dn"] * len(powers), batch_per_gpu=powers)
    global_batch = 4 * powers[alone.fits.tolist().index("no")]
    (one, four, three) = offered(
        "1x1:t4-g4dn", "1x4:t4-g4dn", "1x3:t4-g4dn", global_batch=global_batch, strategies=("ddp",)
    )
    # Four ranks share it in twos of what is just too large, one rank in eights; three
    # unevenly, each with at most the share that is rounded up.
    assert (one.accumulation_steps, four.accumulation_steps) == (8, 2)
    assert one.batch_per_gpu * 8 == four.batch_per_gpu * 4 * 2 == global_batch
    assert three.batch_per_gpu == -(-global_batch // (3 * three.accumulation_steps))
    assert {one.global_batch, four.global_batch, three.global_batch} == {global_batch}


def test_what_cannot_train_is_left_out_with_its_reason() -> None:
    # 2048 · 65536 weights twice over: 1 GiB, with its gradients and AdamW's state 4 GiB and more.
    wide = perceptron([2048, 1 << 16, 2048], batch=64, target="cuda")
    asked: dict[str, Any] = {"samples": 1e8, "prices": PRICES, "strategies": ("ddp", "fsdp")}
    found = offers(wide, ["1x1:t4-g4dn", "1x3:t4-g4dn"], global_batch=2, **asked)
    assert [each.allocation for each in found.offers] == ["1x1:t4-g4dn"]
    assert found.left_out == {"1x3:t4-g4dn": "its 3 ranks are more than a global batch of 2"}
    large = perceptron([1 << 16, 1 << 16, 1 << 16], batch=64, target="cuda")
    none = offers(large, ["1x1:t4-g4dn", "1x4:t4-g4dn"], batch_per_gpu=64, **asked)
    assert none.offers == []
    # Of both strategies the nearest miss is told: FSDP's, where there is something to divide.
    answer = est.estimate(large, "1x4:t4-g4dn", strategy="fsdp")
    needed, missing = map(format_bytes, (answer.peak_memory_bytes, -answer.spare_memory_bytes))
    said = f"needs {needed} a device under fsdp, {missing} more than there is"
    assert none.left_out["1x4:t4-g4dn"] == said
    assert list(none.left_out) == ["1x1:t4-g4dn", "1x4:t4-g4dn"]


def test_batches_are_looked_for_where_none_is_given() -> None:
    (found,) = offered("1x1:t4-g4dn", batch_per_gpu=None, strategies=("ddp",))

    def rate(batch: int) -> float:
        return est.estimate(GRAPH, "1x1:t4-g4dn", batch_per_gpu=batch).samples_per_s or 0.0

    batch = GRAPH.batch or 0
    # Doubled while that trains 5 % faster, and fits.
    while rate(2 * batch) > 1.05 * rate(batch):
        batch *= 2
    assert found.batch_per_gpu in (batch, 2 * batch)
    assert found.samples_per_s == pytest.approx(rate(found.batch_per_gpu))
    assert found.usd < offered("1x1:t4-g4dn", strategies=("ddp",))[0].usd
    # Inputs alone of 2^22 samples of 2^11 single-precision values are 32 GiB, on 16.
    large = perceptron([2048, 64, 2048], batch=1 << 22, target="cuda")
    (halved,) = offers(large, ["1x1:t4-g4dn"], samples=1e8, prices=PRICES).offers
    assert halved.batch_per_gpu < 1 << 21
    assert halved.fits != "no"


def test_what_a_loader_cannot_feed_is_no_offer_s_speed() -> None:
    slow = "sample=1MB,prep=10ms,workers=1"
    for batch in ({}, {"global_batch": 256, "layouts_of": (GRAPH,)}):
        fed, held = (offered("1x4:t4-g4dn", **batch, loader=each)[0] for each in (None, slow))
        # One worker a rank prepares 100 samples a second.
        assert held.samples_per_s <= 400 * 1.01 < fed.samples_per_s
        assert held.usd > fed.usd


def test_tokens_are_counted_in_samples() -> None:
    graph = replace(GRAPH, tokens_per_sample=100)
    (by_tokens,) = offers(graph, ["1x1:t4-g4dn"], tokens=1e10, prices=PRICES).offers
    (by_samples,) = offers(graph, ["1x1:t4-g4dn"], samples=1e8, prices=PRICES).offers
    assert by_tokens == by_samples


def test_revocations_add_time_and_cost() -> None:
    asked: dict[str, Any] = {"spot": True, "strategies": ("ddp",)}
    (steady,) = offered("4x4:v100-p3-8xlarge", **asked)
    spot = Spot(revocations=Revocations(per_hour=(0.25,)), checkpoint_s=60.0, restart_s=300.0)
    (taken,) = offered("4x4:v100-p3-8xlarge", **asked | {"spot": spot})
    # Four instances lose one an hour: expected_time_s, worked by hand in test_checkpoints.
    four = Allocation.parse("4x4:v100-p3-8xlarge")
    (expected_s,), interval_s = spot.times_s([steady.duration_s], spot.of_any(four))
    assert taken.duration_s == pytest.approx(expected_s)
    assert taken.interval_s == interval_s == best_interval_s(60.0, 3600.0)
    assert taken.duration_s > 1.1 * steady.duration_s
    assert taken.usd == 4 * 2.0 * np.ceil(taken.duration_s / 3600)
    never = offers(
        GRAPH,
        ["4x4:v100-p3-8xlarge"],
        samples=1e8,
        prices=PRICES,
        **asked | {"spot": Spot(revocations=Revocations(per_hour=(60.0,)))},
    )
    assert never.offers == []
    (why,) = never.left_out.values()
    assert why == "no training ends with revocations as frequent"


def test_machines_are_revoked_each_at_its_own_rate() -> None:
    rates = {"t4-g4dn": 1.0, "v100-p3-8xlarge": 0.5}
    spot = Spot(revocations={name: Revocations(per_hour=(rate,)) for name, rate in rates.items()})
    both = Allocation.parse("3x4:t4-g4dn+2x4:v100-p3-8xlarge")
    # Three an hour of one machine, and two in two hours of the other: four an hour.
    assert spot.of_any(both).mean_per_s == pytest.approx(1 / 900)
    assert spot.of_any(Allocation.parse("2x4:v100-p3-8xlarge")).mean_per_s == 1 / 3600
    with pytest.raises(WorkloadError, match="spot instance of 'a100-p4d' stays"):
        spot.of_any(Allocation.parse("1x8:a100-p4d"))
    with pytest.raises(WorkloadError, match="do not both name a100-p4d, v100-p3-8xlarge; name"):
        est.rent(GRAPH, ["t4-g4dn", "a100-p4d"], samples=1e6, spot=spot)


def test_training_by_night_is_cheaper_where_revocations_come_by_day() -> None:
    by_day = Revocations(per_hour=(0.0,) * 12 + (1.0,) * 12, lifetime_s=24 * 3600.0)
    asked: dict[str, Any] = {"strategies": ("ddp",)}
    at_noon, at_midnight = (
        offered("4x4:v100-p3-8xlarge", spot=Spot(revocations=by_day, start_hour=hour), **asked)[0]
        for hour in (12.0, 0.0)
    )
    (steady,) = offered("4x4:v100-p3-8xlarge", spot=True, **asked)
    # Its nine hours end before noon; from noon on four instances are lost every hour.
    assert steady.duration_s < 12 * 3600
    assert at_midnight.duration_s < 1.1 * steady.duration_s
    assert at_noon.duration_s > 1.5 * steady.duration_s


def test_choices_are_those_of_a_look_at_all_offers() -> None:
    found = est.rent(GRAPH, MACHINES, max_nodes=4, samples=1e9, prices=PRICES)
    every = found.offers
    assert {each.allocation for each in every} == set(allocations_of(MACHINES, 4))
    for each in every:
        beaten = any(
            other.duration_s <= each.duration_s
            and other.usd <= each.usd
            and (other.duration_s, other.usd) != (each.duration_s, each.usd)
            for other in every
        )
        assert (each in found.front) == (not beaten), each
    assert found.cheapest == min(every, key=lambda each: each.usd)
    assert found.fastest == min(every, key=lambda each: each.duration_s)


def test_a_deadline_and_a_budget_are_kept() -> None:
    every = offered(*allocations_of(MACHINES, 4), samples=1e9)
    times = sorted(each.duration_s for each in every)
    deadline_s = times[len(times) // 2]
    found = choose(every, deadline_s=deadline_s)
    in_time = [each for each in every if each.duration_s <= deadline_s]
    assert found.cheapest == min(in_time, key=lambda each: each.usd)
    budget_usd = sorted(each.usd for each in every)[len(every) // 2]
    found = choose(every, budget_usd=budget_usd)
    paid = [each for each in every if each.usd <= budget_usd]
    assert found.fastest == min(paid, key=lambda each: each.duration_s)
    nothing = choose(every, deadline_s=0.5 * times[0])
    assert (nothing.cheapest, nothing.front) == (None, ())


def made(name: str, hours: float, usd: float, width: float = 0.1) -> Offer:
    (like,) = offered("1x1:t4-g4dn", strategies=("ddp",))
    return replace(
        like,
        allocation=name,
        duration_s=3600 * hours,
        low_s=3600 * hours * (1 - width),
        high_s=3600 * hours * (1 + width),
        usd=usd,
        low_usd=usd * (1 - width),
        high_usd=usd * (1 + width),
    )


def test_what_cannot_be_told_apart_is_named() -> None:
    # Ten percent either way: 100 and 115 USD meet at 104 to 110, 100 and 130 do not.
    every = [made("a", 10, 100), made("b", 8, 115), made("c", 5, 130)]
    found: Choice = choose(every)
    assert [each.allocation for each in found.as_cheap] == ["b"]
    assert found.as_fast == ()
    assert [each.allocation for each in found.front] == ["c", "b", "a"]
    more = [*every, made("worse", 8.5, 116)]
    front = pareto_front(more, lambda offer: (offer.duration_s, offer.usd))
    assert front == list(found.front)


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(PriceError, match="no price of 'dgx-a100' is known"):
        offered("1x8:dgx-a100")
    with pytest.raises(PriceError, match="no spot price of 't4-g4dn' is known"):
        offered("1x1:t4-g4dn", spot=True)
    with pytest.raises(WorkloadError, match="give samples or tokens"):
        offered("1x1:t4-g4dn", samples=None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"samples": 0.0}, "0 samples are to be trained; give a number above 0"),
        ({"samples": -1.0}, "-1 samples"),
        ({"samples": np.nan}, "nan samples"),
        ({"tokens": np.inf}, "inf tokens"),
        ({"samples": 1e6, "deadline_s": -1.0}, "deadline_s is -1; give a number from 0 on"),
        ({"samples": 1e6, "budget_usd": np.nan}, "budget_usd is nan"),
        ({"samples": 1e6, "machines": "t4-g4dn"}, "are the text 't4-g4dn'; give a list"),
        ({"samples": 1e6, "machines": ()}, "no machine was given"),
    ],
)
def test_what_cannot_be_rented_for_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        est.rent(GRAPH, **{"machines": ["t4-g4dn"], "max_nodes": 1, **asked})


@pytest.mark.parametrize(
    ("name", "value"),
    [("checkpoint_s", np.nan), ("restart_s", -1.0), ("warning_s", -1.0), ("start_hour", np.inf)],
)
def test_impossible_revocations_are_refused(name: str, value: float) -> None:
    with pytest.raises(WorkloadError, match=f"{name} is"):
        Spot(revocations=Revocations(), **{name: value})


def test_an_hour_costs_the_price_of_an_hour_however_long_the_least_is() -> None:
    two_hours = Price(
        machine="t4-g4dn", instance_type="a", devices=4, usd_per_hour=3.0, least_billed_s=7200.0
    )
    (found,) = offered("1x4:t4-g4dn", prices=PriceList([two_hours]), samples=1.0)
    assert (found.usd_per_hour, found.usd) == (3.0, 6.0)


def test_layouts_of_offers_are_worked_out_on_an_executor() -> None:
    asked: dict[str, Any] = {"global_batch": 64, "layouts_of": [GRAPH]}
    with ThreadPoolExecutor(2) as executor, patch.object(executor, "submit", wraps=executor.submit):
        found = offered("2x4:t4-g4dn", "1x4:v100-p3-8xlarge", executor=executor, **asked)
        assert executor.submit.called  # type: ignore[attr-defined]
    assert found == offered("2x4:t4-g4dn", "1x4:v100-p3-8xlarge", **asked)
