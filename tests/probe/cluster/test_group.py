"""Ranks of a world do the same in step, and what they measure comes together on rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from estimator.machines.profile import Device
from estimator.probe.cluster import steps
from estimator.probe.cluster.discovery import Place
from estimator.probe.cluster.findings import Member, World
from estimator.probe.cluster.group import Group
from estimator.probe.cluster.signed_store import dist, open_session
from estimator.probe.devices.ranks import process_group, report, run_on_devices
from tests.conftest import free_port

CORE = Device(kind="cpu", index=0, name="core", memory_bytes=1)
SECRET = b"0123456789abcdef" * 2


def _steps(group: Group) -> None:
    """Ranks 0 and 1 are busy for a while, then all three measure."""

    def work(**_: Any) -> list[str]:
        time.sleep(1.0)
        return ["worked"]

    busy = group.measured((0, 1), work)
    # One clock for all processes of a host.
    begun = group.measured((0, 1, 2), lambda **_: [time.monotonic()])
    assert group.agreed("home" if group.is_home else None) == "home"
    report({"busy": busy, "begun": begun})


def place_of(rank: int, port: int) -> Place:
    return Place(
        rank=rank, world_size=3, master_address="127.0.0.1", master_port=port, secret=SECRET
    )


def in_step(rank: int, _size: int, arguments: Mapping[str, Any]) -> None:
    # That of rank 0 is served by whoever has started them.
    place = replace(place_of(rank, arguments["port"]), has_store=True)
    store = open_session(place, 60.0)
    members = tuple(Member(rank=n, host="a", device=CORE, machine="m") for n in range(3))
    addresses = dist.PrefixStore("world", store.clone(60.0))
    with process_group("cpu", addresses, rank=rank, world_size=3, timeout_s=60.0):
        _steps(Group(store, World(members=members), rank))


def test_ranks_begin_a_measurement_together_though_some_had_nothing_to_do_before() -> None:
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    found: dict[int, Any] = {}
    run_on_devices(
        [replace(CORE, index=rank) for rank in range(3)],
        f"{__name__}:in_step",
        {"port": port},
        timeout_s=90.0,
        on_report=found.__setitem__,
        trains=False,
    )
    assert found[0]["busy"] == [["worked"], ["worked"]]
    begun = [at for (at,) in found[0]["begun"]]
    # Without waiting for the others rank 2 would have begun a second earlier.
    assert max(begun) - min(begun) < 0.9
    # Everything comes together on rank 0 alone.
    assert [found[rank] for rank in (1, 2)] == [{"busy": [], "begun": []}] * 2
    assert server.num_keys() > 0


def test_what_steps_lack_and_those_that_the_time_has_no_room_for_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    begun: list[list[str]] = []

    def measure(_group: Any, plan: steps.ProbePlan, seconds: float) -> str:
        given.append(seconds)
        begun.append(plan.left)
        plan.remark("found")
        return "a half of it" if len(given) == 2 else ""

    named = [
        steps.Step(name, share, measure) for name, share in (("a", 0.3), ("b", 0.1), ("c", 0.2))
    ]
    monkeypatch.setattr(steps, "steps_of", lambda *_, **__: named)

    class Alone:
        """A group of one, for which 60 s are left, then 30 and less than a step needs."""

        world = World(members=())
        left_s = iter([60.0, 30.0, 0.2])

        def agreed(self, _: float) -> float:
            return next(self.left_s)

    said: list[str] = []
    plan = steps.ProbePlan(say=said.append)
    steps.run_steps(Alone(), plan, seconds=60.0, all_pairs=None)  # type: ignore[arg-type]
    # 60 s by shares of 0.3 in 0.6, then 30 s by 0.1 in 0.3.
    assert given == pytest.approx([30.0, 10.0])
    assert begun == [["a", "b", "c"], ["b", "c"]]
    assert plan.findings.missing == ["b: a half of it", "c: the budget was over"]
    missing = [f"not measured: {sentence}" for sentence in plan.findings.missing]
    assert said == ["found", "found", *missing]


@pytest.mark.parametrize(("hosts", "is_wanted"), [("ab", False), ("aabb", True), ("abc", True)])
def test_groups_are_sharded_over_only_where_there_are_some_beside_everything(
    hosts: str, is_wanted: bool
) -> None:
    members = tuple(
        Member(rank=rank, host=host, device=CORE, machine="m") for rank, host in enumerate(hosts)
    )
    names = [step.name for step in steps.steps_of(World(members=members))]
    assert ("sharding in groups" in names) == is_wanted
    assert "other collectives" in names
