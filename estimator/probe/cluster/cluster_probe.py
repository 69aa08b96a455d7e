"""Probe several nodes together: what rank 0 does beside its own share of the steps.

It says who takes part and when it is over, watches over the ranks, and keeps what all measure.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from estimator.errors import EstimatorError, ProbeError
from estimator.machines.profile import Device, MachineProfile, Provenance
from estimator.placement.topology import Cluster
from estimator.probe.cluster.discovery import Place
from estimator.probe.cluster.findings import (
    ClusterFindings,
    Member,
    World,
    device_from,
    in_world_order,
    unequal_versions,
)
from estimator.probe.cluster.rank import START_S, ProbeMachine, take_part
from estimator.probe.cluster.signed_store import SignedStore, begin_session, connect, listen
from estimator.probe.cluster.steps import LEAST_STEP_S, steps_of
from estimator.probe.devices.inventory import Cpu, core_device, core_groups
from estimator.units import GIB

Report = Callable[[str, float], None]
Say = Callable[[str], None]

# Of the budget, what is planned for the machine itself where no profile of it is given, and when
# that is called off.
_MACHINE_RATIO, _MACHINE_END_RATIO = 0.4, 0.5
# How long a silent rank is waited for, longer than a busy machine holds a thread up; and how long
# ranks may take to end what was given up: the dead are noticed before that.
_PATIENCE_S = 4.0
_GIVEN_UP_S = _PATIENCE_S + 1.0
# What is left at the end for steps that take longer than planned, and for giving them up.
_RESERVE_RATIO, _RESERVE_S = 0.08, _GIVEN_UP_S + 1.0
# Steps that take this much longer than planned are given up.
_OVERTIME_RATIO, _OVERTIME_S = 2.0, 5.0
# How long ranks may take to hear that it is over; launchers that end a job (Open MPI: SIGTERM, then
# SIGKILL after 1 s) leave less.
_LEAVE_S, _SHORT_LEAVE_S = 3.0, 0.3
_POLL_S = 0.05
# What a rank says when a peer of its world is lost.
_CONSEQUENCES = ("Connection closed", "Connection reset", "died without a result", "Timed out")
# A host is a part of the name of a file.
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfiles:
    """The profile of rank 0's machine with the network, and those of other machine types."""

    profile: MachineProfile
    others: Mapping[str, MachineProfile]


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
    host: str,
    versions: Mapping[str, str],
    probe_machine: ProbeMachine,
    report: Report,
    say: Say,
    is_called_off: Callable[[], bool],
) -> ClusterProfiles:
    """Take part as rank 0, and keep what all ranks measure; raises ProbeError.

    `host` is the name of this node. Out of time, called off or with ranks lost it returns what
    it has; `report(part, fraction of the budget used)` is called as it goes, `say` with sentences.
    Raises KeyboardInterrupt when it `is_called_off` before all ranks have come.
    """
    listener = None if place.has_store else listen(place)
    tcp_store = connect(
        place.master_address, place.master_port, listener=listener, timeout_s=START_S
    )
    store = begin_session(tcp_store, place)
    keeper = _Keeper(store, place.world_size, request, is_called_off, report, say)

    def work() -> None:
        # What goes wrong is in the store, where the keeper reads it.
        with contextlib.suppress(EstimatorError):
            take_part(
                place,
                host=host,
                versions=versions,
                probe_machine=probe_machine,
                kind="cpu" if request.on_cpu else None,
                on_report=keeper.take,
            )

    # A thread of its own, so that rank 0's steps run beside the watch over all.
    own = threading.Thread(target=work, name="rank 0", daemon=True)
    own.start()
    try:
        keeper.run()
        return keeper.profiles()
    finally:
        # Where the store has ended, nobody is left to be told.
        with contextlib.suppress(ProbeError):
            keeper.finish()
        own.join(timeout=2.0)


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
        store: SignedStore,
        world_size: int,
        request: ClusterRequest,
        is_called_off: Callable[[], bool],
        tell_progress: Report,
        tell_people: Say,
    ) -> None:
        self.store, self.world_size, self.request = store, world_size, request
        self.is_called_off = is_called_off
        self.tell_progress, self.tell_people = tell_progress, tell_people
        self.base, self.others = request.base, dict[str, MachineProfile]()
        self.findings = ClusterFindings(at=datetime.now(UTC).isoformat(timespec="seconds"))
        self.missing: list[str] = []
        self.remarks: list[str] = []
        self.world = self._everyone = World(members=())
        # What every order says of the ranks: which process each is, and why some have none.
        self._roster: dict[str, Any] = {"nonces": {}, "refused": {}}
        self._orders = 0
        self._doing, self._left = "waiting for all ranks", list[str]()
        self._begun = self._step_ends = time.monotonic()
        self._silence, self._heard_at = Silence(range(world_size)), time.monotonic()

    def run(self) -> None:
        """Have everything measured, and say what is missing."""
        starts_by = time.monotonic() + START_S
        facts = self._gathered(
            "facts",
            range(self.world_size),
            lambda _: self.is_called_off() or time.monotonic() > starts_by,
        )
        if self.is_called_off():
            raise KeyboardInterrupt
        # Ranks start when their launcher starts them; from here on the time is the probe's own.
        self._begun = time.monotonic()
        members, refused = members_of(facts, self.request, self.world_size)
        nonces = {str(member.rank): facts[member.rank]["nonce"] for member in members}
        self._roster = {"nonces": nonces, "refused": refused}
        for reason in dict.fromkeys(refused.values()):
            self._miss(reason)
        cluster = self.request.cluster
        self._everyone = self.world = World(
            members=in_world_order(members, cluster), has_racks=cluster is not None
        )
        self._greet()
        try:
            self._probe_machines()
            self._run_steps()
        except ProbeError as error:
            self._miss(f"{self._doing} and what follows: {error}")

    def _gathered(
        self, key: str, ranks: Iterable[int], is_over: Callable[[Mapping[int, Any]], bool]
    ) -> dict[int, Any]:
        """What the ranks say under a key, until all have or it `is_over`."""
        answers: dict[int, Any] = {}
        waiting = list(ranks)
        while waiting and not is_over(answers):
            self._tell()
            time.sleep(_POLL_S)
            for rank in waiting:
                if (value := self.store.read(f"{key}/{rank}")) is not None:
                    answers[rank] = value
            waiting = [rank for rank in waiting if rank not in answers]
        return answers

    def _greet(self) -> None:
        """Say what is unlike the rest before anything is measured."""
        for what, version in unequal_versions(self.world).items():
            package = what.split(" on ")[0]
            ours = self.world.home.versions.get(package, "none")
            self._remark(f"{what} is {version}, on rank 0 it is {ours}; install the same on all")
        for host in self.world.unknown_hosts():
            self._remark(f"the cluster file does not name node {host}, so its rack is not known")

    def _miss(self, sentence: str) -> None:
        self.missing.append(sentence)
        self.tell_people(f"not measured: {sentence}")

    def _remark(self, sentence: str) -> None:
        self.remarks.append(sentence)
        self.tell_people(sentence)

    def _used_s(self) -> float:
        return time.monotonic() - self._begun

    def _tell(self) -> None:
        self.tell_progress(self._doing, min(1.0, self._used_s() / self.request.budget_s))

    def _probe_machines(self) -> None:
        """Rank 0's machine there, other types on the first node of each, at the same time."""
        probing: dict[str, Member] = {}
        if self.base is None:
            for member in sorted(self.world.members, key=lambda member: member.rank):
                probing.setdefault(member.machine, member)
        budget_s = _MACHINE_RATIO * self.request.budget_s
        number = self._order(
            machines={
                str(member.rank): {
                    "name": self.request.name if member.rank == 0 else member.host,
                    "devices": (
                        len(self.world.nodes[member.host]) if member.device.kind == "cpu" else None
                    ),
                    "budget_s": budget_s,
                    "kind": member.device.kind,
                }
                for member in probing.values()
            }
        )
        if not probing:
            return
        self._doing, lost = "the machine itself", set[int]()
        waiting = {member.rank: member for member in probing.values()}
        ends_at = time.monotonic() + _MACHINE_END_RATIO * self.request.budget_s

        def is_over(answers: Mapping[int, Any]) -> bool:
            left = waiting.keys() - answers.keys()
            lost.update(self._silent(left))
            return left <= lost or self.is_called_off() or time.monotonic() > ends_at

        answers = self._gathered(f"ended/{number}", waiting, is_over)
        # What is interrupted has its profile so far within a moment.
        self.store.post(f"given_up/{number}", True)
        late_by = time.monotonic() + _GIVEN_UP_S
        late = waiting.keys() - answers.keys() - lost
        answers |= self._gathered(f"ended/{number}", late, lambda _: time.monotonic() > late_by)
        for rank, member in waiting.items():
            reason = "stopped answering" if rank in lost else "did not end in time"
            self._take_machine(member, answers.get(rank, {"failure": reason}))

    def _take_machine(self, member: Member, answer: Mapping[str, Any]) -> None:
        if "failure" in answer:
            self._miss(f"the machine of node {member.host}: {answer['failure']}")
        elif member is self.world.home:
            self.base = MachineProfile.from_dict(answer["profile"])
        else:
            self.others[member.host] = MachineProfile.from_dict(answer["profile"])

    # the steps

    def take(self, message: Mapping[str, Any]) -> None:
        """What rank 0's own share of the steps reports: those that are left, or all findings."""
        if "left" in message:
            self._left, self._doing = message["left"], message["left"][0]
            planned_s = message["planned_s"]
            self._step_ends = time.monotonic() + _OVERTIME_RATIO * planned_s + _OVERTIME_S
        else:
            known = len(self.findings.missing), len(self.findings.remarks)
            self.findings = ClusterFindings.from_dict(message["findings"])
            for sentence in self.findings.missing[known[0] :]:
                self.tell_people(f"not measured: {sentence}")
            for sentence in self.findings.remarks[known[1] :]:
                self.tell_people(sentence)

    def _run_steps(self) -> None:
        """World after world, until all steps are done or there is no time or nobody left."""
        steps = steps_of(self.world, all_pairs=self.request.all_pairs)
        self._left, retried = [step.name for step in steps], ""
        while self._left:
            if reason := self._why_over():
                self._miss(f"{', '.join(self._left)}: {reason}")
                break
            lost, failure = self._run_world()
            for rank, member in lost.items():
                self._miss(
                    f"rank {rank} on node {member.host} stopped answering during {self._doing}; "
                    "the rest goes on without it"
                )
            left = tuple(member for member in self.world.members if member.rank not in lost)
            self.world = replace(self.world, members=left)
            if not lost and not failure:
                break
            if failure:
                self._miss(f"{self._doing}: {failure}")
            if lost and retried != self._doing:
                # Once more without the ranks that were lost during it.
                retried = self._doing
            else:
                self._left = self._left[1:]
        if forged := self.store.forged:
            self._remark(
                f"{len(forged)} messages, such as '{min(forged)}', were not signed with the secret "
                "of this launch and were ignored; somebody else writes to rank 0's store"
            )

    def _left_s(self) -> float:
        return self.request.budget_s - self._used_s()

    @property
    def _reserve_s(self) -> float:
        return max(_RESERVE_RATIO * self.request.budget_s, _RESERVE_S)

    def _why_over(self) -> str:
        """Why nothing more can be measured, or ""."""
        if self.is_called_off():
            return "interrupted"
        if len(self.world.members) < 2:
            return "no two ranks are left"
        return "the budget was over" if self._left_s() - self._reserve_s < LEAST_STEP_S else ""

    def _run_world(self) -> tuple[dict[int, Member], str]:
        """The members lost in a new world, and why a step failed where none was; or nothing."""
        ends_at = self._step_ends = time.monotonic() + self._left_s() - _GIVEN_UP_S
        number = self._order(
            timeout_s=self._left_s() + _GIVEN_UP_S,
            has_racks=self.world.has_racks,
            steps=self._left,
            left_s=self._left_s() - self._reserve_s,
            all_pairs=self.request.all_pairs,
            known_links=[(link.kind, link.locality) for link in self.base.links]
            if self.base
            else [],
            findings=self.findings.to_dict(self.world),
        )
        members = {member.rank: member for member in self.world.members}
        silent: set[int] = set()
        trouble_at: float | None = None

        def is_over(ended: Mapping[int, str]) -> bool:
            nonlocal trouble_at
            silent.update(self._silent(members.keys() - ended.keys()))
            now, failures = time.monotonic(), [failure for failure in ended.values() if failure]
            if failures or silent:
                trouble_at = now if trouble_at is None else trouble_at
            # A lost peer is no cause: the lost are known by their silence, after some seconds.
            is_failed = trouble_at is not None and now - trouble_at > _GIVEN_UP_S
            is_late = now > min(ends_at, self._step_ends)
            return self.is_called_off() or is_late or is_failed or bool(_cause(failures))

        ended = self._gathered(f"ended/{number}", members, is_over)
        self.store.post(f"given_up/{number}", True)
        reasons = [failure for failure in ended.values() if failure]
        lost = {rank: members[rank] for rank in silent - ended.keys()}
        if lost or len(ended) == len(members):
            return lost, "" if lost else next(iter(reasons), "")
        if self.is_called_off():
            return {}, "cut short"
        return {}, _cause(reasons) or next(iter(reasons), "the budget was over")

    def _order(self, **order: Any) -> int:
        """Say what comes next; the number of that."""
        members = [member.to_dict() for member in self.world.members]
        self.store.post(f"order/{self._orders}", {"members": members, **self._roster, **order})
        self._orders += 1
        return self._orders - 1

    def _silent(self, ranks: Iterable[int]) -> set[int]:
        now = time.monotonic()
        tick_s, self._heard_at = now - self._heard_at, now
        return {
            rank
            for rank in ranks
            if not self._silence.is_alive(rank, self.store.read(f"beat/{rank}"), tick_s)
        }

    def finish(self) -> None:
        """Tell all ranks that it is over, and let them hear it before the store ends."""
        self._order(members=[])
        patience_s = _SHORT_LEAVE_S if self.is_called_off() else _LEAVE_S
        deadline = time.monotonic() + patience_s
        living = [member.rank for member in self.world.members]
        while living and time.monotonic() < deadline:
            living = [rank for rank in living if self.store.read(f"leave/{rank}") is None]
            time.sleep(_POLL_S)

    def profiles(self) -> ClusterProfiles:
        """Everything found; raises ProbeError where that is nothing."""
        measured = replace(
            self.findings,
            missing=[*self.missing, *self.findings.missing],
            remarks=list(dict.fromkeys([*self.remarks, *self.findings.remarks])),
        )
        if measured.empty and (self.base is None or self.request.base is not None):
            reason = "; ".join(measured.missing[:3]) or "there was no time"
            raise ProbeError(f"nothing was measured ({reason}); mend that and probe again")
        # The machine of rank 0 where nothing but the network was measured.
        bare = MachineProfile(
            name=self.request.name,
            devices=self._everyone.own_devices,
            provenance=Provenance(source="measured", at=measured.at, samples=0),
        )
        profile = measured.merged(
            self.base or bare,
            name=self.request.name,
            world=self._everyone,
            used_s=self._used_s(),
        )
        return ClusterProfiles(profile=profile, others=self.others)


def _cause(failures: Sequence[str]) -> str:
    """The failure that made others fail, or "" where all say that a peer was lost."""
    causes = (why for why in failures if not any(words in why for words in _CONSEQUENCES))
    return next(causes, "")


def numbered(facts: Mapping[int, Mapping[str, Any]], rank: int) -> tuple[int, int, bool]:
    """A rank's number on its node, of how many, and whether each has cores of its own there.

    Ranks of one node are numbered in order where the launcher does not say.
    """
    own = facts[rank]
    peers = [one for one in sorted(facts) if facts[one]["host"] == own["host"]]
    cores = [core for one in peers for _, node in facts[one]["cpu"]["numa_cores"] for core in node]
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
        return _gpu_of([device_from(gpu) for gpu in own["gpus"]], own["visible"], number, count)
    nodes = {node: tuple(cores) for node, cores in own["cpu"]["numa_cores"]}
    cpu = Cpu(**{**own["cpu"], "numa_cores": nodes})
    named = base.devices[number].cores if base else ()
    if named and set(named) <= set(cpu.cores):
        return core_device(cpu, number, named, memory_bytes=cpu.memory_bytes)
    if has_own_cores:
        cores = cpu.cores[: len(named) or None]
        return core_device(cpu, number, cores, memory_bytes=cpu.memory_bytes)
    return core_groups(cpu, count)[number]


def _gpu_of(gpus: Sequence[Device], visible: int, number: int, count: int) -> Device:
    if count > 1 and visible == 1:
        # The launcher shows each rank its own GPU alone (srun --gpus-per-task).
        return replace(gpus[min(number, len(gpus) - 1)], index=0)
    if number >= min(visible, len(gpus)):
        raise ProbeError(
            f"{count} ranks were started on a node with {visible} GPUs; start at most "
            f"{visible} there"
        )
    return gpus[number]


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
    refused: dict[str, str] = {}
    for rank in range(world_size):
        if reason := _refusal(facts, rank):
            refused[str(rank)] = reason
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
