"""Probe several nodes together within a budget of time, the most telling parts first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from estimator.errors import EstimatorError, ProbeError
from estimator.probe.board import Board
from estimator.probe.cluster_findings import ClusterFindings, unequal_versions
from estimator.probe.cluster_parts import ClusterParts
from estimator.probe.discovery import Place
from estimator.probe.follower import START_S, follow
from estimator.probe.leader import CALLED_OFF_S, Leader, Task
from estimator.probe.machine import probe_machine
from estimator.probe.members import Crew, Member
from estimator.probe.parts import Part, Slot
from estimator.profile import DeviceKind, MachineProfile
from estimator.topology import Cluster

Report = Callable[[str, float], None]
Say = Callable[[str], None]

# Of the budget, what goes to the machine itself where no profile of it is given.
_MACHINE_RATIO = 0.5
# Of the budget, what is planned for measuring; processes take the rest to start and end.
_PLANNED_RATIO = 0.92
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
) -> ClusterProfiles:
    """Lead all ranks through the probe as rank 0, itself one of them; raises ProbeError.

    `host` is the name of this node. Out of time, interrupted or with ranks lost it returns what it
    has; `report(part, fraction of the budget used)` is called as it goes, `say` with sentences.
    """
    board = Board(place, serves=not place.has_store, timeout_s=START_S)
    # A thread of its own, so that rank 0's share of a task runs beside the watch over all.
    own = threading.Thread(
        target=_follow_quietly, args=(place, host, versions), name="rank 0", daemon=True
    )
    own.start()
    leader = Leader(board, place.world_size)
    try:
        probe = _ClusterProbe(leader, request, report, say)
        probe.run()
        return probe.profiles()
    finally:
        leader.finish()
        own.join(timeout=2.0)


def _follow_quietly(place: Place, host: str, versions: Mapping[str, str]) -> None:
    # What goes wrong is on the board, where the leader reads it.
    with contextlib.suppress(EstimatorError):
        follow(place, host=host, versions=versions)


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
        self.crew = Crew(members=self._gather(), cluster=request.cluster)
        self._everyone = self.crew
        self._begun = time.monotonic()

    def run(self) -> None:
        """Measure the machine if need be, then part after part; interrupted, keep what is there."""
        self._greet()
        try:
            if self.base is None:
                self._probe_machines()
            self._run_parts()
        except KeyboardInterrupt:
            self.findings.missing.append(f"{self._doing} and what follows: interrupted")

    def profiles(self) -> ClusterProfiles:
        """Everything found; raises ProbeError where that is nothing."""
        if self.base is None or (self.findings.empty and self.request.base is not None):
            reason = "; ".join(self.findings.missing[:3]) or "there was no time"
            raise ProbeError(f"nothing was measured ({reason}); mend that and probe again")
        return ClusterProfiles(
            profile=self.findings.merged(
                self.base, name=self.request.name, crew=self._everyone, used_s=self._used_s()
            ),
            others=self.others,
        )

    def _used_s(self) -> float:
        return time.monotonic() - self._begun

    def _tell(self) -> None:
        self._report(self._doing, min(1.0, self._used_s() / self.request.budget_s))

    # who takes part

    def _gather(self) -> tuple[Member, ...]:
        hellos = self.leader.gather_hellos(START_S)
        if 0 not in hellos:
            raise ProbeError("rank 0 cannot reach itself; check MASTER_ADDR")
        welcomes = welcomes_to(hellos, self.request)
        members = self.leader.welcome(welcomes, START_S)
        if members[0].rank != 0:
            raise ProbeError(f"rank 0 has no device: {self.leader.lost[0]}")
        for rank, words in welcomes.items():
            if "turned_away" in words:
                self.leader.lost[rank] = words["turned_away"]
        return members

    def _greet(self) -> None:
        """Say what is unlike the rest before anything is measured."""
        for reason in dict.fromkeys(self.leader.lost.values()):
            self._miss(reason)
        for what, version in unequal_versions(self.crew).items():
            package = what.split(" on ")[0]
            ours = self.crew.members[0].versions.get(package, "none")
            self._remark(f"{what} is {version}, on rank 0 it is {ours}; install the same on all")
        for host in self.crew.strangers():
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
        for member in self.crew.members:
            first_of.setdefault(member.machine, member)
        mine = self.crew.members[0]
        budget_s = _MACHINE_RATIO * self.request.budget_s
        strangers = [member for member in first_of.values() if member.machine != mine.machine]
        tasks = [
            Task(
                ranks=(member.rank,),
                function=f"{__name__}:probe_own_machine",
                arguments=self._machine_arguments(member, budget_s),
                alone=True,
            )
            for member in (mine, *strangers)
        ]
        outcomes = self.leader.run(
            tasks, timeout_s=_OVERTIME_RATIO * budget_s + START_S, tell=self._tell
        )
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
            "devices": len(self.crew.nodes[member.host]) if on_cpu else None,
            "budget_s": budget_s,
            "kind": member.device.kind,
        }

    # the network

    def _run_parts(self) -> None:
        parts = ClusterParts(self.leader, self.findings, self.base, self.request.all_pairs)
        plan = parts.plan(self.crew)
        for number, part in enumerate(plan):
            left_s = _PLANNED_RATIO * self.request.budget_s - self._used_s()
            rest = plan[number:]
            if left_s < _LEAST_PART_S:
                for each in rest:
                    self._miss(f"{each.name}: the budget was over")
                return
            self._doing = part.name
            self._tell()
            self._measure(part, left_s * part.share / sum(each.share for each in rest))
        for sentence in parts.remarks():
            self._remark(sentence)

    def _measure(self, part: Part, planned_s: float) -> None:
        """One part; once more without the ranks that were lost during it."""
        for _ in range(2):
            if len(self.crew.members) < 2:
                self._miss(f"{part.name}: no two ranks are left")
                return
            left_s = self.request.budget_s - self._used_s()
            timeout_s = min(left_s - CALLED_OFF_S / 2, _OVERTIME_RATIO * planned_s + _OVERTIME_S)
            if timeout_s < _LEAST_PART_S:
                return
            known_lost = set(self.leader.lost)
            slot = Slot(
                crew=self.crew,
                planned_s=min(planned_s, left_s),
                ends_at=time.monotonic() + timeout_s,
                tell=self._tell,
            )
            failed = part.measure(slot)
            lost = set(self.leader.lost) - known_lost
            for rank in sorted(lost):
                host = self.crew.of(rank).host
                self._miss(
                    f"rank {rank} on node {host} {self.leader.lost[rank]} during {part.name}; the "
                    "rest goes on without it"
                )
            self.crew = self.crew.without(lost)
            if not lost and failed:
                self._miss(f"{part.name}: {failed}")
            if not lost:
                return


def welcomes_to(
    hellos: Mapping[int, Mapping[str, Any]], request: ClusterRequest
) -> dict[int, dict[str, Any]]:
    """What each rank is told: its number on its node, its cores, a rank on another node.

    Ranks that speak another version of this package are turned away. Raises ProbeError where a node
    has more ranks than the base profile has devices.
    """
    base, ours = request.base, hellos[0]["versions"].get("estimator")
    kind: DeviceKind | None = base.kind if base else "cpu" if request.name == "local-cpu" else None
    welcomes: dict[int, dict[str, Any]] = {}
    for rank, hello in sorted(hellos.items()):
        host, version = hello["host"], hello["versions"].get("estimator")
        if version != ours:
            words = f"rank {rank} on node {host} runs estimator {version}, rank 0 runs {ours}"
            welcomes[rank] = {"turned_away": f"{words}; install the same on all nodes"}
            continue
        peers = [one for one in sorted(hellos) if hellos[one]["host"] == host]
        local_rank = hello["local_rank"]
        local_rank = peers.index(rank) if local_rank is None else local_rank
        cores_of_peers = [core for one in peers for core in hellos[one]["cores"]]
        welcomes[rank] = {
            "local_rank": local_rank,
            "local_size": len(peers),
            "kind": kind,
            "cores": _cores_by_base(base, local_rank, host),
            "has_own_cores": len(set(cores_of_peers)) == len(cores_of_peers),
            "peer": next((h["address"] for h in hellos.values() if h["host"] != host), None),
        }
    return welcomes


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


def probe_own_machine(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The profile of the machine this is called on, as JSON values."""
    return probe_machine(
        name=arguments["name"],
        devices=arguments["devices"],
        budget_s=arguments["budget_s"],
        kind=arguments["kind"],
    ).to_dict()
