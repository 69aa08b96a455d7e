"""Run a subject on one testbed: probe, write predictions down, measure, continue where it ended."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from layout_paces import Divided, divided
from records import Record, Records, measure_in_turns, say
from testbed import layouts
from testbed.launch import launch
from testbed.measure import measure
from testbed.network import Testbed, testbed
from testbed.paced import paced_graph, paced_machine
from testbed_cases import Case, beds

from estimator.errors import EstimatorError
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.request import EstimateRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.topology import Cluster

MACHINE = "testbed"
MODELS = Path(__file__).with_name("local_models.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Something to launch: its name among the records, and what finds the fields of a record."""

    key: str
    run: Callable[[Testbed], Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Which cases, in what folder, from which profile of the host, how often and how long."""

    cases: Sequence[Any]
    work: Path
    profile: Path
    repeats: int
    steps: int


class Bench(ABC):
    """One testbed under test: the profile of its network, and the records of its cases.

    A case has a `bed`, and a `key`: its name among the records.
    """

    def __init__(self, name: str, plan: RunPlan, records: Records) -> None:
        self.name, self.description = name, beds()[name]
        self.plan, self.records = plan, records
        self.cases = [case for case in plan.cases if case.bed == name]
        self.network_path = plan.work / f"{name}.json"
        self.cluster_path = plan.work / f"{name}.toml"

    @abstractmethod
    def predict(self, case: Any) -> Record:
        """What is to be written down of a case; raises EstimatorError."""

    @abstractmethod
    def trials(self, case: Any, prediction: Record) -> Iterator[Trial]:
        """What is to be launched for a case."""

    @abstractmethod
    def probe(self, bed: Testbed) -> None:
        """Write the profile `network_path`."""

    def run(self) -> None:
        """Build, probe, predict, measure, tear down; nothing where all is there."""
        if self.network_path.exists() and not self._is_unfinished():
            return
        self.cluster_path.write_text(self.description.cluster_toml(MACHINE))
        with testbed(self.description) as bed:
            self.prepare(bed)
            self.measure(bed)

    def _is_unfinished(self) -> bool:
        predicted = all(self._prediction(case) for case in self.cases)
        left = (self.records.left(trial.key, self.plan.repeats) for trial in self._trials())
        return not predicted or any(left)

    def prepare(self, bed: Testbed) -> None:
        """Probe the network and write predictions down, where either is missing."""
        if not self.network_path.exists():
            self.probe(bed)
        for case in self.cases:
            if self._prediction(case):
                continue
            try:
                found = self.predict(case)
            except EstimatorError as error:
                self.records.add({"kind": "refusal", "key": case.key, "reason": str(error)[:500]})
                say(f"{case.key}: {error}")
                continue
            self.records.add({"kind": "prediction", "key": case.key, **found})

    def _prediction(self, case: Any) -> Record | None:
        found = self.records.of("prediction", case.key)
        return found[-1] if found else None

    def _trials(self) -> list[Trial]:
        """What is not predicted is not measured: a prediction comes first."""
        return [
            trial
            for case in self.cases
            if (prediction := self._prediction(case))
            for trial in self.trials(case, prediction)
        ]

    def measure(self, bed: Testbed) -> None:
        """Launch what is predicted, in turns, as often as asked for."""
        runs = {trial.key: partial(trial.run, bed) for trial in self._trials()}
        measure_in_turns(self.records, runs, self.plan.repeats, f"{self.name}: measured")


class ModelBench(Bench):
    """One testbed on which the cases of `testbed_cases` are trained."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._graphs: dict[str, OpGraph] = {}

    def probe(self, bed: Testbed) -> None:
        base = self.plan.work / f"{self.name}_base.json"
        most = max(node.devices for node in self.description.nodes)
        with_devices(load_profile(self.plan.profile), most).save(base)
        everywhere = self.description.all_devices()
        probe_network(
            bed, everywhere, self.plan, self.network_path, base=base, cluster=self.cluster_path
        )

    def graph(self, case: Case) -> OpGraph:
        """The traced graph of a case's model, once."""
        if case.rank_s:
            return self.divided(case).graph
        if case.model not in self._graphs:
            self._graphs[case.model] = self.traced(case)
        return self._graphs[case.model]

    def divided(self, case: Case) -> Divided:
        """The same of a model of `layout_paces`."""
        return divided(case.model, case.layout or "", rank_s=case.rank_s or 0.0)

    def traced(self, case: Case) -> OpGraph:
        """The graph of a paced model, or one traced from `local_models`."""
        if case.is_paced:
            return paced_graph(case.model)
        import estimator
        from estimator.graph.models import load_model

        model, batch, loss, name = load_model(f"{MODELS}:{case.model}")
        return estimator.trace_model(model, batch, loss=loss, optimizer="adamw", name=name)

    def machine(self, case: Case) -> MachineProfile:
        """What a node of this testbed is to a case, by the probe."""
        network = load_profile(self.network_path)
        devices = max(node.devices for node in self.description.nodes)
        return paced_machine(network, devices) if case.is_paced else shared_host(network)

    def asked(self, case: Case) -> dict[str, Any]:
        """What every question about a case tells the engine."""
        return {
            "strategy": case.strategy,
            "cluster": Cluster.load(self.cluster_path),
            "profile": self.machine(case),
        }

    def estimate(self, case: Case, allocation: str, **changed: Any) -> Estimate:
        """The engine's answer about a case on an allocation; raises EstimatorError."""
        options = {
            "batch_per_gpu": case.batch,
            "accumulation_steps": case.accumulation_steps,
            "layout": case.layout,
            **changed,
        }
        if case.rank_s and options["layout"]:
            options["tp_plan"] = self.divided(case).plan
        asked = {**self.asked(case), **options}
        return DEFAULT.estimate(EstimateRequest.of(self.graph(case), allocation, **asked))

    def train(self, bed: Testbed, case: Case, **changed: Any) -> Record:
        """One launch of a case: the slowest rank's seconds of a step; raises TrainingError."""
        if case.layout:
            return {"step_s": self.train_divided(bed, case)}
        options = {"batch": case.batch, "steps": self.plan.steps, **changed}
        step_s = measure(
            bed,
            f"paced:{case.model}" if case.is_paced else f"{MODELS}:{case.model}",
            case.allocation,
            strategy=case.strategy,
            optimizer="sgd" if case.is_paced else "adamw",
            accumulation_steps=case.accumulation_steps,
            **options,
        )
        return {"step_s": step_s}

    def train_divided(self, bed: Testbed, case: Case) -> float:
        """The same of a model that torch's own parallelism divides, stages as the engine cuts."""
        known = self.divided(case) if case.rank_s else None
        pipeline = self.estimate(case, case.allocation).pipeline
        return layouts.step_seconds(
            bed,
            case.model,
            case.allocation,
            layout=case.layout or "",
            plan=known.plan if known else None,
            strategy=case.strategy,
            flops_per_s=known.flops_per_s if known else None,
            steps=self.plan.steps,
            micro_batches=case.accumulation_steps,
            points=pipeline.points if pipeline else (),
        )


def shared_host(profile: MachineProfile) -> MachineProfile:
    """The profile of a node that shares its host, and so its memory, with the other nodes.

    Namespaces of one machine are not two machines: a rank on each is slowed as two ranks of one.
    """
    alone = [item for item in profile.contentions if item.devices_busy == 2]
    return replace(
        profile,
        contentions=(*profile.contentions, *(replace(item, devices_busy=1) for item in alone)),
    )


def with_devices(profile: MachineProfile, count: int) -> MachineProfile:
    """The profile of a host with at least `count` devices; further ones share the cores."""
    devices = profile.devices
    further = range(len(devices), count)
    return replace(
        profile,
        devices=(*devices, *(replace(devices[n % len(devices)], index=n) for n in further)),
    )


def probe_network(
    bed: Testbed,
    allocation: str,
    plan: RunPlan,
    out: Path,
    *,
    base: Path | None = None,
    cluster: Path | None = None,
    all_pairs: bool = False,
) -> None:
    """Probe the ranks of an allocation together, from the profile `base`, by default the host's."""
    say(f"probing the network for {out.stem}")
    command = [sys.executable, "-m", "estimator.probe", "--name", MACHINE]
    command += ["--out", str(out), "--base", str(base or plan.profile)]
    command += ["--cluster", str(cluster)] if cluster else []
    command += ["--pairs", "all"] if all_pairs else []
    launch(bed, allocation, command)
