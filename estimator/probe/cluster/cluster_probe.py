"""Probe several nodes together: what rank 0 does beside its own share of the steps.

It says who takes part and when it is over, watches over the ranks, and keeps what all measure.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device, DeviceKind, MachineProfile, Provenance
from estimator.placement.topology import Cluster
from estimator.probe.cluster.discovery import Place
from estimator.probe.cluster.findings import (
    ClusterFindings,
    Member,
    World,
    from_plain,
    other_machines,
    unequal_versions,
)
from estimator.probe.cluster.rank import START_S, Heartbeat, own_facts, run_share
from estimator.probe.cluster.signed_store import SignedStore, open_session
from estimator.probe.cluster.steps import LEAST_STEP_S, ProbePlan, steps_of
from estimator.probe.devices.inventory import Cpu, core_device, core_groups
from estimator.units import GIB

Report = Callable[[str, float], None]
Say = Callable[[str], None]
# `estimator.probe.machine.probe_machine`.
ProbeMachine = Callable[..., MachineProfile]

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
# A host is a part of the name of a file.
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")


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
    probe_machine: ProbeMachine,
    report: Report,
    say: Say,
    is_called_off: Callable[[], bool],
) -> MachineProfile:
    """Take part as rank 0, and keep what all ranks measure; raises ProbeError.

    Out of time, called off or with ranks lost it returns what it has; `report(part, fraction of the
    budget used)` is called as it goes, `say` with sentences. Raises KeyboardInterrupt when it
    `is_called_off` before all ranks have come. `probe_machine` measures this node alone where no
    profile of it is given.
    """
    store = open_session(place, START_S)
    keeper = _Keeper(place, store, request, is_called_off, report, say)
    with Heartbeat(store, place.rank):
        try:
            keeper.run(probe_machine)
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
        # Longer than a busy machine holds a thread up.
        return self._silent_s[rank] < _PATIENCE_S


class _Keeper:
    """What only rank 0 does: who takes part, how long the steps may take, what they found."""

    def __init__(
        self,
        place: Place,
        store: SignedStore,
        request: ClusterRequest,
        is_called_off: Callable[[], bool],
        tell_progress: Report,
        tell_people: Say,
    ) -> None:
        self.place, self.store, self.request = place, store, request
        self.is_called_off = is_called_off
        self.tell_progress = tell_progress
        self.base = request.base
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self.plan = ProbePlan(findings=ClusterFindings(at=at), begin=self._begin, say=tell_people)
        # Everyone who came, and those of them who have fallen silent.
        self.world, self.lost = World(members=()), dict[int, Member]()
        self._doing, self._left = "waiting for all ranks", list[str]()
        self._begun = time.monotonic()
        self._silence, self._heard_at = Silence(range(place.world_size)), time.monotonic()

    def run(self, probe_machine: ProbeMachine) -> None:
        """Have everything measured, and say what is missing."""
        starts_by = time.monotonic() + START_S
        kind: DeviceKind | None = "cpu" if self.request.on_cpu else None
        facts = {0: own_facts(self.place, kind)} | self._gathered(
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
        for reason in dict.fromkeys(refused.values()):
            self.plan.miss(reason)
        self._greet()
        # Each process sees by its own number that the order answers it.
        nonces = {str(rank): own.get("nonce") for rank, own in facts.items()}
        try:
            if self.base is None:
                self._probe_machine(probe_machine)
            self._run_steps({"refused": refused, "nonces": nonces})
        except ProbeError as error:
            self.plan.miss(f"{self._doing} and what follows: {error}")

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
        self.tell_progress(self._doing, min(1.0, self._used_s() / self.request.budget_s))
        for member in self.world.members:
            rank = member.rank
            if rank in self.lost or rank == 0:
                continue
            if not self._silence.is_alive(rank, self.store.read(f"beat/{rank}"), tick_s):
                self.lost[rank] = member
                self.plan.miss(
                    f"rank {rank} on node {member.host} stopped answering during {self._doing}"
                )

    def _greet(self) -> None:
        """Say what is unlike the rest before anything is measured."""
        for what, version in unequal_versions(self.world).items():
            package = what.split(" on ")[0]
            ours = self.world.home.versions.get(package, "none")
            self.plan.remark(
                f"{what} is {version}, on rank 0 it is {ours}; install the same on all"
            )
        for host in self.world.unknown_hosts():
            self.plan.remark(
                f"the cluster file does not name node {host}, so its rack is not known"
            )
        for sentence in other_machines(self.world):
            self.plan.remark(sentence)

    def _used_s(self) -> float:
        return time.monotonic() - self._begun

    def _probe_machine(self, probe_machine: ProbeMachine) -> None:
        """Rank 0's machine, as far as the time goes; the other ranks wait meanwhile."""
        self._doing, home = "the machine itself", self.world.home
        ends_at = time.monotonic() + _MACHINE_END_RATIO * self.request.budget_s

        def poll(_part: str, _ratio: float) -> None:
            self._listen()
            if self.is_called_off() or time.monotonic() > ends_at:
                raise KeyboardInterrupt

        try:
            self.base = probe_machine(
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

    def _begin(self, left: list[str]) -> None:
        """The first of the steps that are left begins, on rank 0's thread of the steps."""
        self._left, self._doing = left, left[0]

    def _run_steps(self, roster: Mapping[str, Any]) -> None:
        """All steps, until they are done, the time is over or a rank is lost or fails."""
        left = tuple(member for member in self.world.members if member.rank not in self.lost)
        world = replace(self.world, members=left)
        self._left = [step.name for step in steps_of(world, all_pairs=self.request.all_pairs)]
        left_s = self.request.budget_s - self._used_s()
        measuring_s = left_s - max(_RESERVE_RATIO * self.request.budget_s, _RESERVE_S)
        reason = "interrupted" if self.is_called_off() else ""
        if len(left) < 2:
            reason = "no two ranks are left"
        elif measuring_s < LEAST_STEP_S:
            reason = "the budget was over"
        order = {
            **roster,
            "members": [] if reason else [asdict(member) for member in left],
            "switches": world.switches,
            "left_s": measuring_s,
            "timeout_s": left_s + _GIVEN_UP_S,
            "all_pairs": self.request.all_pairs,
        }
        # Who is refused hears it in any case.
        self.store.post("order", order)
        reason = reason or self._why_ended(order, [member.rank for member in left])
        if reason:
            self.plan.miss(f"{', '.join(self._left)}: {reason}")
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

        lost_before = len(self.lost)
        # Beside the watch over all; a thread that waits for a lost rank ends with this process.
        threading.Thread(target=share, name="steps", daemon=True).start()
        trouble_at: float | None = None

        def is_over(ended: Mapping[int, str]) -> bool:
            nonlocal trouble_at
            now = time.monotonic()
            if trouble_at is None and (any(ended.values()) or len(self.lost) > lost_before):
                trouble_at = now
            # Of a failure the cause may be a rank that is known for lost some seconds later.
            is_failed = trouble_at is not None and now - trouble_at > _GIVEN_UP_S
            return self.is_called_off() or is_failed or now > ends_at

        ended = self._gathered("ended", ranks, is_over)
        if self.is_called_off():
            # Ranks that the same launcher has ended look lost, and their peers' collectives fail.
            return "interrupted"
        if len(self.lost) > lost_before:
            return "a rank was lost; probe again without it"
        if failure := next(filter(None, ended.values()), ""):
            return failure
        return "" if len(ended) == len(ranks) else "the budget was over"

    def finish(self) -> None:
        """Tell all ranks that it is over, and let them hear it before the store ends."""
        self.store.post("over", True)
        patience_s = _SHORT_LEAVE_S if self.is_called_off() else _LEAVE_S
        deadline = time.monotonic() + patience_s
        members = [member.rank for member in self.world.members if member.rank]
        self._gathered("left", members, lambda _: time.monotonic() > deadline)

    def profile(self) -> MachineProfile:
        """Everything found; raises ProbeError where that is nothing."""
        measured = self.plan.findings
        if measured.empty and (self.base is None or self.request.base is not None):
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


def numbered(facts: Mapping[int, Mapping[str, Any]], rank: int) -> tuple[int, int, bool]:
    """A rank's number on its node, of how many, and whether each has cores of its own there.

    Ranks of one node are numbered in order where the launcher does not say.
    """
    own = facts[rank]
    peers = [one for one in sorted(facts) if facts[one]["host"] == own["host"]]
    nodes = chain.from_iterable(facts[one]["cpu"]["numa_cores"].values() for one in peers)
    cores = list(chain.from_iterable(nodes))
    local_rank = peers.index(rank) if own["local_rank"] is None else own["local_rank"]
    return local_rank, len(peers), len(set(cores)) == len(cores)


def device_of(
    facts: Mapping[int, Mapping[str, Any]], rank: int, base: MachineProfile | None, *, on_cpu: bool
) -> Device:
    """The device of a rank, by its number on the node; raises ProbeError where there is none.

    Groups of cores: those of the base profile, if the rank may use them; else
    all its cores where the launcher gave each rank its own, or its part of them.
    """
    own = facts[rank]
    number, count, has_own_cores = numbered(facts, rank)
    if own["gpus"] and not on_cpu:
        gpus = [from_plain(Device, gpu) for gpu in own["gpus"]]
        # Where there is one alone, launchers show each rank its own (srun --gpus-per-task).
        if len(gpus) > 1 and number >= len(gpus):
            raise ProbeError(
                f"{count} ranks were started on a node with {len(gpus)} GPUs; start at most "
                f"{len(gpus)} there"
            )
        return gpus[number % len(gpus)]
    cpu = from_plain(Cpu, own["cpu"])
    named = base.devices[number].cores if base else ()
    if named and set(named) <= set(cpu.cores):
        return core_device(cpu, number, named, memory_bytes=cpu.memory_bytes)
    if has_own_cores:
        cores = cpu.cores[: len(named) or None]
        return core_device(cpu, number, cores, memory_bytes=cpu.memory_bytes)
    return core_groups(cpu, count)[number]


def machine_words(facts: Mapping[str, Any], device: Device) -> str:
    """A node's hardware in words, alike for nodes of one type however many ranks each has."""
    cpu = facts["cpu"]
    words = f"{cpu['model']}, {cpu['threads']} threads, {round(cpu['memory_bytes'] / GIB)} GiB"
    return f"{words}, {len(facts['gpus'])} × {device.name}" if device.kind == "cuda" else words


def _refusal(facts: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """Why a rank cannot take part, or ""."""
    if rank not in facts:
        return f"rank {rank} did not start within {START_S:.0f} s"
    own, ours = facts[rank], facts[min(facts)]["versions"].get("estimator")
    host, version = own["host"], own["versions"].get("estimator")
    if not _HOST.fullmatch(host):
        return f"rank {rank} calls its node '{host[:100]}'; give it a host name"
    if version != ours:
        return (
            f"rank {rank} on node {host} runs estimator {version}, rank 0 runs {ours}; install the "
            "same on all nodes"
        )
    return f"rank {rank} on node {host} has no device: {own['failure']}" if own["failure"] else ""


def members_of(
    facts: Mapping[int, Mapping[str, Any]], request: ClusterRequest, world_size: int
) -> tuple[list[Member], dict[str, str]]:
    """Who takes part, each with its device; and by rank why the rest does not.

    Ranks that speak another version of this package are refused. Raises ProbeError where rank 0 is
    not among them, or a node has more ranks than the base profile has devices.
    """
    refused = {str(rank): reason for rank in range(world_size) if (reason := _refusal(facts, rank))}
    accepted = {rank: facts[rank] for rank in sorted(facts) if str(rank) not in refused}
    members, base = list[Member](), request.base
    for rank, own in accepted.items():
        if base is not None and numbered(accepted, rank)[0] >= len(base.devices):
            raise ProbeError(
                f"more than {len(base.devices)} ranks were started on node {own['host']}, and the "
                f"base profile '{base.name}' has {len(base.devices)} devices; start at most as "
                "many on a node"
            )
        try:
            device = device_of(accepted, rank, base, on_cpu=request.on_cpu)
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
