"""Probe several nodes together: what rank 0 does beside its own share of the steps.

It says who takes part and when it is over, watches over the ranks, and keeps what all measure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from pydantic import TypeAdapter

from estimator.errors import ProbeError
from estimator.machines.profile import Device, MachineProfile, Provenance
from estimator.placement.topology import Cluster
from estimator.probe.cluster.discovery import Place
from estimator.probe.cluster.findings import (
    ClusterFindings,
    Member,
    World,
    other_machines,
    unequal_versions,
)
from estimator.probe.cluster.rank import START_S, Heartbeat, own_facts, run_share
from estimator.probe.cluster.signed_store import SignedStore, open_session
from estimator.probe.cluster.steps import LEAST_STEP_S, ProbePlan, steps_of
from estimator.probe.devices.inventory import Cpu, core_device, core_groups
from estimator.units import GIB

Report = Callable[[str, float], None]
# What a rank says of itself, as `rank.own_facts` has it.
Facts = Mapping[str, Any]

# Of the budget, what is planned for the machine itself where no profile of it is given, and when
# that is called off.
_MACHINE_RATIO, _MACHINE_END_RATIO = 0.4, 0.5
# How long a silent rank is waited for, longer than a busy machine holds a thread up; and how long
# ranks may take to end what was given up: the dead are noticed before that.
_PATIENCE_S = 4.0
_GIVEN_UP_S = _PATIENCE_S + 1.0
# What is left at the end for steps that take longer than planned, and for giving them up.
_RESERVE_RATIO, _RESERVE_S = 0.08, _GIVEN_UP_S + 1.0
# How long ranks may take to hear that it is over; launchers that end a job (Open MPI: SIGTERM, then
# SIGKILL after 1 s) leave less.
_LEAVE_S, _SHORT_LEAVE_S = 3.0, 0.6
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """What to probe: `base` has the machine's own numbers already, `cluster` names the racks.

    `all_pairs` None measures every pair of nodes where they are few.
    """

    name: str = "local"
    budget_s: float = 60.0
    base: MachineProfile | None = None
    cluster: Cluster | None = None
    all_pairs: bool | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether cores are probed, whatever else the nodes have."""
        return self.name == "local-cpu" if self.base is None else self.base.kind == "cpu"


def probe_cluster(
    place: Place,
    request: ClusterRequest,
    *,
    probe_machine: Callable[..., MachineProfile],
    report: Report,
    say: Callable[[str], None],
    is_called_off: Callable[[], bool],
) -> MachineProfile:
    """Take part as rank 0, and keep what all ranks measure; raises ProbeError.

    Out of time, called off or with ranks lost it returns what it has; `report(part, fraction of the
    budget used)` is called as it goes, `say` with sentences. Raises KeyboardInterrupt when it
    `is_called_off` before all ranks have come. `probe_machine` measures this node alone where no
    profile of it is given.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    plan = ProbePlan(findings=ClusterFindings(at=at), left=["waiting for all ranks"], say=say)
    store = open_session(place, START_S)
    keeper = _Keeper(place, store, request, plan, probe_machine, report, is_called_off)
    with Heartbeat(store, place.rank):
        try:
            keeper.run()
            return keeper.profile()
        finally:
            # Where the store has ended, nobody is left to be told.
            with contextlib.suppress(ProbeError):
                keeper.finish()


class Silence:
    """Which ranks have stopped beating, by the clock of a listener that may itself be paused."""

    _LONGEST_TICK_S = 0.2

    def __init__(self, ranks: Iterable[int]) -> None:
        self._seen = dict.fromkeys(ranks, -1)
        self._silent_s = dict.fromkeys(self._seen, 0.0)

    def is_alive(self, rank: int, count: int | None, tick_s: float) -> bool:
        """Take note of a rank's count after `tick_s`; whether it is still taken for alive.

        Only a count above all before it is a sign of life: an earlier one may be a replay.
        """
        if count is not None and count > self._seen[rank]:
            self._seen[rank], self._silent_s[rank] = count, 0.0
        else:
            # While this process itself was stopped, the others could not be heard.
            self._silent_s[rank] += min(tick_s, self._LONGEST_TICK_S)
        return self._silent_s[rank] < _PATIENCE_S


@dataclass
class _Keeper:
    """What only rank 0 does: who takes part, how long the steps may take, what they found."""

    place: Place
    store: SignedStore
    request: ClusterRequest
    plan: ProbePlan
    probe_machine: Callable[..., MachineProfile]
    report: Report
    is_called_off: Callable[[], bool]

    def __post_init__(self) -> None:
        # Everyone who came, and those of them who have fallen silent.
        self.world, self.lost = World(members=()), set[int]()
        self.base = self.request.base
        self._begun = self._heard_at = time.monotonic()
        self._silence = Silence(range(self.place.world_size))

    def run(self) -> None:
        """Have everything measured, and say what is missing."""
        starts_by = time.monotonic() + START_S
        facts = {0: own_facts(self.place, "cpu" if self.request.on_cpu else None)} | self._gathered(
            "facts",
            range(1, self.place.world_size),
            lambda _: self.is_called_off() or time.monotonic() > starts_by,
        )
        if self.is_called_off():
            raise KeyboardInterrupt
        # Ranks start when their launcher starts them; from here on the time is the probe's own.
        self._begun = time.monotonic()
        members, refused = members_of(facts, self.request, self.place.world_size)
        self.world = World.of(members, self.request.cluster)
        self.plan.miss(*dict.fromkeys(refused.values()))
        self._greet()
        # Each process sees by its own number that the order answers it.
        nonces = {str(rank): own.get("nonce") for rank, own in facts.items()}
        try:
            if self.base is None:
                self._probe_machine()
            self._run_steps({"refused": refused, "nonces": nonces})
        except ProbeError as error:
            self.plan.miss(f"{self.plan.left[0]} and what follows: {error}")

    def _gathered(
        self, key: str, ranks: Iterable[int], is_over: Callable[[Mapping[int, Any]], bool]
    ) -> dict[int, Any]:
        """What the ranks say under a key, until all that are not lost have or it `is_over`."""
        answers: dict[int, Any] = {}
        waiting = list(ranks)
        while waiting and not is_over(answers):
            time.sleep(_POLL_S)
            self._listen()
            for rank in waiting:
                if (value := self.store.read(f"{key}/{rank}")) is not None:
                    answers[rank] = value
            waiting = [r for r in waiting if r not in answers and r not in self.lost]
        return answers

    def _listen(self) -> None:
        """Say how far it is, and take note of members that have stopped beating."""
        now = time.monotonic()
        tick_s = now - self._heard_at
        if tick_s < _POLL_S:
            return
        self._heard_at = now
        self.report(self.plan.left[0], min(1.0, self._used_s() / self.request.budget_s))
        for member in self.world.members:
            rank = member.rank
            if rank in self.lost or rank == 0:
                continue
            if not self._silence.is_alive(rank, self.store.read(f"beat/{rank}"), tick_s):
                self.lost.add(rank)
                during = f"during {self.plan.left[0]}"
                self.plan.miss(f"rank {rank} on node {member.host} stopped answering {during}")

    def _greet(self) -> None:
        """Say what is unlike the rest before anything is measured."""
        for what, version in unequal_versions(self.world).items():
            ours = self.world.home.versions.get(what.split(" on ")[0], "none")
            unlike = f"{what} is {version}, on rank 0 it is {ours}"
            self.plan.remark(f"{unlike}; install the same on all")
        for host in self.world.nodes:
            if self.request.cluster is not None and host not in self.world.switches:
                self.plan.remark(
                    f"the cluster file does not name node {host}, so its rack is not known"
                )
        self.plan.remark(*other_machines(self.world))

    def _used_s(self) -> float:
        return time.monotonic() - self._begun

    def _probe_machine(self) -> None:
        """Rank 0's machine, as far as the time goes; the other ranks wait meanwhile."""
        self.plan.left, home = ["the machine itself"], self.world.home
        ends_at = time.monotonic() + _MACHINE_END_RATIO * self.request.budget_s

        def poll(_part: str, _ratio: float) -> None:
            self._listen()
            if self.is_called_off() or time.monotonic() > ends_at:
                raise KeyboardInterrupt

        try:
            self.base = self.probe_machine(
                name=self.request.name,
                devices=len(self.world.own_devices) if home.device.kind == "cpu" else None,
                budget_s=_MACHINE_RATIO * self.request.budget_s,
                kind=home.device.kind,
                report=poll,
                # Ranks that wait for each other are busy themselves.
                patience_s=0.0,
            )
        except ProbeError as error:
            self.plan.miss(f"the machine of node {home.host}: {error}")

    def _run_steps(self, roster: Mapping[str, Any]) -> None:
        """All steps, until they are done, the time is over or a rank is lost or fails."""
        left = tuple(member for member in self.world.members if member.rank not in self.lost)
        world = replace(self.world, members=left)
        self.plan.left = [step.name for step in steps_of(world, all_pairs=self.request.all_pairs)]
        left_s = self.request.budget_s - self._used_s()
        measuring_s = left_s - max(_RESERVE_RATIO * self.request.budget_s, _RESERVE_S)
        reason = "interrupted" if self.is_called_off() else ""
        if len(left) < 2:
            reason = "no two ranks are left"
        elif measuring_s < LEAST_STEP_S:
            reason = "the budget was over"
        order = {
            **roster,
            "world": asdict(replace(world, members=() if reason else left)),
            "left_s": measuring_s,
            "timeout_s": left_s + _GIVEN_UP_S,
            "all_pairs": self.request.all_pairs,
        }
        # Who is refused hears it in any case.
        self.store.post("order", order)
        reason = reason or self._why_ended(order, [member.rank for member in left])
        if reason:
            self.plan.miss(f"{', '.join(self.plan.left)}: {reason}")
        if forged := self.store.forged:
            self.plan.remark(
                f"{len(forged)} messages, such as '{min(forged)}', were not signed with the secret "
                "of this launch and were ignored; somebody else writes to rank 0's store"
            )

    def _why_ended(self, order: Mapping[str, Any], ranks: Sequence[int]) -> str:
        """Have the ranks run the steps; why they ended too early, or ""."""
        ends_at = time.monotonic() + order["timeout_s"] - _GIVEN_UP_S - _LEAVE_S
        own = self.store.clone()

        def share() -> None:
            # Where the store has ended, the keeper finds that out itself.
            with contextlib.suppress(ProbeError):
                own.post("ended/0", run_share(0, own, order, self.plan))

        # Beside the watch over all; a thread that waits for a lost rank ends with this process.
        threading.Thread(target=share, name="steps", daemon=True).start()

        def is_over(ended: Mapping[int, str]) -> bool:
            nonlocal ends_at
            now = time.monotonic()
            if any(ended.values()) or self.lost.intersection(ranks):
                # Of a failure the cause may be a rank that is known for lost some seconds later.
                ends_at = min(ends_at, now + _GIVEN_UP_S)
            return self.is_called_off() or now > ends_at

        ended = self._gathered("ended", ranks, is_over)
        if self.is_called_off():
            # Ranks that the same launcher has ended look lost, and their peers' collectives fail.
            return "interrupted"
        if self.lost.intersection(ranks):
            return "a rank was lost; probe again without it"
        if failure := next(filter(None, ended.values()), ""):
            return failure
        return "" if len(ended) == len(ranks) else "the budget was over"

    def finish(self) -> None:
        """Tell all ranks that it is over, and let them hear it before the store ends."""
        self.store.post("over", True)
        deadline = time.monotonic() + (_SHORT_LEAVE_S if self.is_called_off() else _LEAVE_S)
        members = [member.rank for member in self.world.members if member.rank]
        self._gathered("left", members, lambda _: time.monotonic() > deadline)

    def profile(self) -> MachineProfile:
        """Everything found; raises ProbeError where that is nothing."""
        measured = self.plan.findings
        found = (measured.network, measured.pairs, measured.collectives, measured.overlaps)
        if not any(found) and (self.base is None or self.request.base is not None):
            reason = "; ".join(measured.missing[:3]) or "there was no time"
            raise ProbeError(f"nothing was measured ({reason}); mend that and probe again")
        # The machine of rank 0 where nothing but the network was measured.
        bare = MachineProfile(
            name=self.request.name,
            devices=self.world.own_devices,
            provenance=Provenance(source="measured", at=measured.at, samples=0),
        )
        return measured.merged(
            self.base or bare,
            name=self.request.name,
            world=self.world,
            used_s=self._used_s(),
        )


def device_of(own: Facts, number: int, on_node: Sequence[Facts], request: ClusterRequest) -> Device:
    """The device of the rank of that `number` on its node; raises ProbeError where there is none.

    Groups of cores: those of the base profile, if the rank may use them; else all its cores where
    the launcher gave each rank `on_node` its own, or its part of them.
    """
    if own["gpus"] and not request.on_cpu:
        gpus = TypeAdapter(list[Device]).validate_python(own["gpus"])
        # Where there is one alone, launchers show each rank its own (srun --gpus-per-task).
        if len(gpus) > 1 and number >= len(gpus):
            raise ProbeError(
                f"{len(on_node)} ranks were started on a node with {len(gpus)} GPUs; start at most "
                f"{len(gpus)} there"
            )
        return gpus[number % len(gpus)]
    cpu = TypeAdapter(Cpu).validate_python(own["cpu"])
    cores = request.base.devices[number].cores if request.base else ()
    if not cores or not set(cores) <= set(cpu.cores):
        nodes = [cores for each in on_node for cores in each["cpu"]["numa_cores"].values()]
        given = list(chain.from_iterable(nodes))
        if len(set(given)) < len(given):
            # Ranks that cannot take part leave gaps in the launcher's numbers.
            return core_groups(cpu, max(len(on_node), number + 1))[number]
        cores = cpu.cores[: len(cores) or None]
    return core_device(cpu, number, cores, memory_bytes=cpu.memory_bytes)


def machine_words(facts: Facts, device: Device) -> str:
    """A node's hardware in words, alike for nodes of one type however many ranks each has."""
    cpu = facts["cpu"]
    words = f"{cpu['model']}, {cpu['threads']} threads, {round(cpu['memory_bytes'] / GIB)} GiB"
    return f"{words}, {len(facts['gpus'])} × {device.name}" if device.kind == "cuda" else words


def _refusal(facts: Mapping[int, Facts], rank: int) -> str:
    """Why a rank cannot take part, or ""."""
    if rank not in facts:
        return f"rank {rank} did not start within {START_S:.0f} s"
    own, ours = facts[rank], facts[min(facts)]["versions"].get("estimator")
    who, version = f"rank {rank} on node {own['host']}", own["versions"].get("estimator")
    if version != ours:
        return f"{who} runs estimator {version}, rank 0 runs {ours}; install the same on all nodes"
    return f"{who} has no device: {own['failure']}" if own["failure"] else ""


def members_of(
    facts: Mapping[int, Facts], request: ClusterRequest, world_size: int
) -> tuple[list[Member], dict[str, str]]:
    """Who takes part, each with its device; and by rank why the rest does not.

    Ranks that speak another version of this package are refused. Ranks of one node are numbered in
    order where the launcher does not say. Raises ProbeError where rank 0 is not among them, or a
    node has more ranks than the base profile has devices.
    """
    refused = {str(rank): reason for rank in range(world_size) if (reason := _refusal(facts, rank))}
    accepted = {rank: facts[rank] for rank in sorted(facts) if str(rank) not in refused}
    members, base = list[Member](), request.base
    for rank, own in accepted.items():
        on_node = {one: them for one, them in accepted.items() if them["host"] == own["host"]}
        number = [*on_node].index(rank) if own["local_rank"] is None else own["local_rank"]
        if base is not None and number >= len(base.devices):
            raise ProbeError(
                f"more than {len(base.devices)} ranks were started on node {own['host']}, and the "
                f"base profile '{base.name}' has {len(base.devices)} devices; start at most as "
                "many on a node"
            )
        try:
            device = device_of(own, number, [*on_node.values()], request)
        except ProbeError as error:
            refused[str(rank)] = f"rank {rank} on node {own['host']} has no device: {error}"
            continue
        members.append(
            Member(
                rank=rank,
                host=own["host"],
                address=own["address"],
                device=device,
                machine=machine_words(own, device),
                versions=own["versions"],
            )
        )
    if not members or members[0].rank != 0:
        raise ProbeError("; ".join(list(refused.values())[:3]) or "rank 0 cannot reach itself")
    return members, refused
