"""Probe several nodes together within a budget of time, the most telling parts first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from estimator.errors import EstimatorError, ProbeError
from estimator.machines.profile import DeviceKind, MachineProfile, Provenance
from estimator.placement.topology import Cluster
from estimator.probe.cluster.discovery import Place, shared_on_this_host
from estimator.probe.cluster.findings import ClusterFindings, Member, WorkerGroup, unequal_versions
from estimator.probe.cluster.leader import CALLED_OFF_S, Leader, RankTask, Slot
from estimator.probe.cluster.messages import Assignment, Rendezvous, begin_session, connect, listen
from estimator.probe.cluster.parts import ClusterParts, ProbePart
from estimator.probe.cluster.worker import START_S, run_worker

Report = Callable[[str, float], None]
Say = Callable[[str], None]

# Of the budget, what is planned for the machine itself where no profile of it is given, and when
# that is called off.
_MACHINE_RATIO, _MACHINE_END_RATIO = 0.4, 0.5
# What is left at the end for tasks that take longer than planned, and for calling them off.
_RESERVE_RATIO, _RESERVE_S = 0.08, CALLED_OFF_S + 1.0
_LEAST_PART_S = 0.3
# Tasks that take this much longer than planned are called off.
_OVERTIME_RATIO, _OVERTIME_S = 2.0, 5.0


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


def probe_cluster(
    place: Place,
    request: ClusterRequest,
    *,
    host: str,
    versions: Mapping[str, str],
    report: Report,
    say: Say,
    stop: threading.Event,
) -> ClusterProfiles:
    """Lead all ranks through the probe as rank 0, itself one of them; raises ProbeError.

    `host` is the name of this node. Out of time, told to `stop` or with ranks lost it returns what
    it has; `report(part, fraction of the budget used)` is called as it goes, `say` with sentences.
    Raises KeyboardInterrupt when told to stop before all ranks have come.
    """
    listener = None if place.has_store else listen(place)
    tcp_store = connect(
        place.master_address, place.master_port, listener=listener, timeout_s=START_S
    )
    with contextlib.ExitStack() as stack:
        if place.secret is None:
            secret = stack.enter_context(shared_on_this_host(place.master_port, place.attempt))
            place = replace(place, secret=secret)
        store = begin_session(tcp_store, place)
        # A thread of its own, so that rank 0's share of a task runs beside the watch over all.
        own = threading.Thread(
            target=_work_quietly, args=(place, host, versions), name="rank 0", daemon=True
        )
        own.start()
        leader = Leader(store, place.world_size, stop)
        try:
            probe = _ClusterProbe(leader, request, report, say)
            probe.run()
            return probe.profiles()
        finally:
            # Where the store has ended, nobody is left to be told.
            with contextlib.suppress(ProbeError):
                leader.finish()
            own.join(timeout=2.0)


def _work_quietly(place: Place, host: str, versions: Mapping[str, str]) -> None:
    # What goes wrong is on the store, where the leader reads it.
    with contextlib.suppress(EstimatorError):
        run_worker(place, host=host, versions=versions)


class _ClusterProbe:
    """One run: who takes part, the parts and their time, what they found."""

    def __init__(self, leader: Leader, request: ClusterRequest, report: Report, say: Say) -> None:
        self.leader, self.request = leader, request
        self.tell_people, self._report = say, report
        self._doing = "waiting for all ranks"
        report(self._doing, 0.0)
        self.findings = ClusterFindings(at=datetime.now(UTC).isoformat(timespec="seconds"))
        self.others: dict[str, MachineProfile] = {}
        self.base = request.base
        rendezvous = leader.gather_ranks(START_S)
        # Ranks start when their launcher starts them; from here on the time is the probe's own.
        self._begun = time.monotonic()
        self.workers = WorkerGroup(members=self._assign(rendezvous), cluster=request.cluster)
        self._everyone = self.workers

    def run(self) -> None:
        """Measure the machine if need be, then part after part, and say what is missing."""
        self._greet()
        try:
            if self.base is None:
                self._probe_machines()
            self._run_parts()
        except ProbeError as error:
            self._miss(f"{self._doing} and what follows: {error}")

    def profiles(self) -> ClusterProfiles:
        """Everything found; raises ProbeError where that is nothing."""
        if self.findings.empty and (self.base is None or self.request.base is not None):
            reason = "; ".join(self.findings.missing[:3]) or "there was no time"
            raise ProbeError(f"nothing was measured ({reason}); mend that and probe again")
        return ClusterProfiles(
            profile=self.findings.merged(
                self.base or self._bare_machine(),
                name=self.request.name,
                workers=self._everyone,
                used_s=self._used_s(),
            ),
            others=self.others,
        )

    def _bare_machine(self) -> MachineProfile:
        """The machine of rank 0 where nothing but the network was measured."""
        members = next(iter(self._everyone.nodes.values()))
        return MachineProfile(
            name=self.request.name,
            devices=tuple(member.device for member in members),
            provenance=Provenance(source="measured", at=self.findings.at, samples=0),
        )

    def _used_s(self) -> float:
        return time.monotonic() - self._begun

    def _tell(self) -> None:
        self._report(self._doing, min(1.0, self._used_s() / self.request.budget_s))

    # who takes part

    def _assign(self, rendezvous: Mapping[int, Rendezvous]) -> tuple[Member, ...]:
        if 0 not in rendezvous:
            raise ProbeError("rank 0 cannot reach itself; check MASTER_ADDR")
        assignments = assignments_for(rendezvous, self.request)
        members = self.leader.assign(assignments, START_S)
        if members[0].rank != 0:
            raise ProbeError(f"rank 0 has no device: {self.leader.lost[0]}")
        for rank, assignment in assignments.items():
            if assignment.refused:
                self.leader.lost[rank] = assignment.refused
        return members

    def _greet(self) -> None:
        """Say what is unlike the rest before anything is measured."""
        for reason in dict.fromkeys(self.leader.lost.values()):
            self._miss(reason)
        for what, version in unequal_versions(self.workers).items():
            package = what.split(" on ")[0]
            ours = self.workers.members[0].versions.get(package, "none")
            self._remark(f"{what} is {version}, on rank 0 it is {ours}; install the same on all")
        for host in self.workers.unknown_hosts():
            self._remark(f"the cluster file does not name node {host}, so its rack is not known")

    def _miss(self, sentence: str) -> None:
        self.findings.missing.append(sentence)
        self.tell_people(f"not measured: {sentence}")

    def _remark(self, sentence: str) -> None:
        self.findings.remarks.append(sentence)
        self.tell_people(sentence)

    # the machines themselves

    def _probe_machines(self) -> None:
        """Rank 0's machine here, other types on the first node of each, at the same time."""
        self._doing = "the machine itself"
        first_of: dict[str, Member] = {}
        for member in self.workers.members:
            first_of.setdefault(member.machine, member)
        mine = self.workers.members[0]
        budget_s = _MACHINE_RATIO * self.request.budget_s
        strangers = [member for member in first_of.values() if member.machine != mine.machine]
        tasks = [
            RankTask(
                ranks=(member.rank,),
                function="probe_own_machine",
                arguments=self._machine_arguments(member, budget_s),
            )
            for member in (mine, *strangers)
        ]
        timeout_s = _MACHINE_END_RATIO * self.request.budget_s - self._used_s()
        outcomes = self.leader.run(tasks, timeout_s=timeout_s, tell=self._tell)
        for member, outcome in zip((mine, *strangers), outcomes, strict=True):
            data = outcome.results.get(member.rank)
            if data is None:
                why = outcome.failures.get(member.rank, "no answer")
                self._miss(f"the machine of node {member.host}: {why}")
            elif member is mine:
                self.base = MachineProfile.from_dict(data)
            else:
                self.others[member.host] = MachineProfile.from_dict(data)

    def _machine_arguments(self, member: Member, budget_s: float) -> dict[str, Any]:
        on_cpu = member.device.kind == "cpu"
        return {
            "name": self.request.name if member.rank == 0 else member.host,
            "devices": len(self.workers.nodes[member.host]) if on_cpu else None,
            "budget_s": budget_s,
            "kind": member.device.kind,
        }

    # the network

    def _run_parts(self) -> None:
        budget_s = self.request.budget_s
        planned_s = budget_s - max(_RESERVE_RATIO * budget_s, _RESERVE_S)
        parts = ClusterParts(self.findings, self.base, self.request.all_pairs)
        plan = parts.plan(self.workers)
        for number, part in enumerate(plan):
            left_s = planned_s - self._used_s()
            rest = plan[number:]
            if reason := self._why_over(left_s):
                self._miss(f"{', '.join(each.name for each in rest)}: {reason}")
                break
            self._doing = part.name
            self._tell()
            self._measure(part, left_s * part.share / sum(each.share for each in rest))
        for sentence in parts.remarks():
            self._remark(sentence)
        if forged := self.leader.store.forged:
            self._remark(
                f"{len(forged)} messages, such as '{min(forged)}', were not signed with the secret "
                "of this launch and were ignored; somebody else writes to rank 0's store"
            )

    def _why_over(self, left_s: float) -> str:
        """Why no further part can be measured, or ""."""
        if self.leader.stop.is_set():
            return "interrupted"
        if len(self.workers.members) < 2:
            return "no two ranks are left"
        return "the budget was over" if left_s < _LEAST_PART_S else ""

    def _measure(self, part: ProbePart, planned_s: float) -> None:
        """One part; once more without the ranks that were lost during it."""
        for _ in range(2):
            left_s = self.request.budget_s - self._used_s()
            timeout_s = min(left_s - CALLED_OFF_S, _OVERTIME_RATIO * planned_s + _OVERTIME_S)
            if reason := self._why_over(timeout_s):
                self._miss(f"{part.name}: {reason}")
                return
            known_lost = set(self.leader.lost)
            slot = Slot(
                leader=self.leader,
                workers=self.workers,
                planned_s=min(planned_s, left_s),
                ends_at=time.monotonic() + timeout_s,
                tell=self._tell,
            )
            failed = part.measure(slot)
            if self.leader.stop.is_set():
                self._miss(f"{part.name}: cut short")
                return
            lost = set(self.leader.lost) - known_lost
            for rank in sorted(lost):
                host = self.workers.of(rank).host
                self._miss(
                    f"rank {rank} on node {host} {self.leader.lost[rank]} during {part.name}; the "
                    "rest goes on without it"
                )
            self.workers = self.workers.without(lost)
            if lost:
                continue
            if failed:
                is_late = time.monotonic() > slot.ends_at
                self._miss(f"{part.name}: {'the budget was over' if is_late else failed}")
            return


def assignments_for(
    rendezvous: Mapping[int, Rendezvous], request: ClusterRequest
) -> dict[int, Assignment]:
    """What each rank is told: its number on its node, its cores, a rank on another node.

    Ranks that speak another version of this package are refused. Raises ProbeError where a node
    has more ranks than the base profile has devices.
    """
    base, ours = request.base, rendezvous[0].versions.get("estimator")
    kind: DeviceKind | None = base.kind if base else "cpu" if request.name == "local-cpu" else None
    assignments: dict[int, Assignment] = {}
    for rank, message in sorted(rendezvous.items()):
        host, version = message.host, message.versions.get("estimator")
        if version != ours:
            words = f"rank {rank} on node {host} runs estimator {version}, rank 0 runs {ours}"
            assignments[rank] = Assignment(
                nonce=message.nonce, refused=f"{words}; install the same on all nodes"
            )
            continue
        peers = [one for one in sorted(rendezvous) if rendezvous[one].host == host]
        local_rank = message.local_rank
        local_rank = peers.index(rank) if local_rank is None else local_rank
        cores_of_peers = [core for one in peers for core in rendezvous[one].cores]
        assignments[rank] = Assignment(
            nonce=message.nonce,
            local_rank=local_rank,
            local_size=len(peers),
            kind=kind,
            cores=_cores_by_base(base, local_rank, host),
            has_own_cores=len(set(cores_of_peers)) == len(cores_of_peers),
            peer=next((one.address for one in rendezvous.values() if one.host != host), None),
        )
    return assignments


def _cores_by_base(base: MachineProfile | None, local_rank: int, host: str) -> list[int]:
    """The cores of a device by its profile, if that says so."""
    if base is None:
        return []
    if local_rank >= len(base.devices):
        raise ProbeError(
            f"more than {len(base.devices)} ranks were started on node {host}, and the base "
            f"profile '{base.name}' has {len(base.devices)} devices; start at most as many on a "
            "node"
        )
    return list(base.devices[local_rank].cores)
