"""Predict training on real clusters with shaped links, write it down, then measure it.

``python benchmarks/testbed_accuracy.py`` (as root) builds each testbed of `testbed_cases`, probes
it with ``python -m estimator.probe`` on all its devices, predicts its cases from that profile, and
trains every case in fresh processes, round-robin over the cases of the testbed. Beside our
prediction stand linear scaling and the forms of Optimus and Pollux, each fitted to the measured
steps of all *other* cases of the same model on that testbed and to its step on one device. What is
found is appended to a file in --work, from which a second run continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from records import Progress, Record, Records, now, say
from summary import Bound, format_rows, format_table, noise_ratio, summarise
from testbed.measure import measure
from testbed.network import Testbed, testbed
from testbed.paced import paced_graph, paced_machine
from testbed_cases import Case, beds, cases
from testbed_runs import MACHINE, add_options, open_work, probe_network

from estimator.calibrate.baselines import LinearScaling, OptimusRegressor, PolluxRegressor
from estimator.engine import estimate_graph
from estimator.errors import EstimatorError
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.topology import Cluster

REPEATS = 7
BOUNDS = {
    "computing": Bound(median_ratio=0.08, worst_ratio=0.25),
    "paced": Bound(median_ratio=0.03, worst_ratio=0.10),
    "paced fsdp": Bound(median_ratio=0.03, worst_ratio=0.10),
}
FORMS = {"linear": LinearScaling, "optimus": OptimusRegressor, "pollux": PolluxRegressor}
MODELS = Path(__file__).with_name("local_models.py")


class Bench:
    """One testbed under test: its network's profile, its graphs, its records."""

    def __init__(self, name: str, options: argparse.Namespace, records: Records) -> None:
        self.name, self.options, self.records = name, options, records
        self.description = beds()[name]
        self.cases = [case for case in options.cases if case.bed == name]
        self.network_path = options.work / f"{name}.json"
        self.cluster_path = options.work / f"{name}.toml"
        self.graphs: dict[str, OpGraph] = {}

    def run(self) -> None:
        """Build, probe, predict, measure, tear down."""
        left = [case for case in self.cases if self._runs(case) < self.options.repeats]
        if not left and all(self.records.of("prediction", case.key) for case in self.cases):
            return
        self.cluster_path.write_text(self.description.cluster_toml(MACHINE))
        with testbed(self.description) as bed:
            self.prepare(bed)
            if not self.options.predict_only:
                self.measure(bed)

    def prepare(self, bed: Testbed) -> None:
        """Probe the network and write predictions down, where either is missing."""
        if not self.network_path.exists():
            self._probe(bed)
        for case in self.cases:
            if not self.records.of("prediction", case.key) or self.options.repredict:
                self._predict(case)

    def _runs(self, case: Case) -> int:
        return len(self.records.of("measurement", case.key))

    def _probe(self, bed: Testbed) -> None:
        base_path = self.options.work / f"{self.name}_base.json"
        most = max(node.devices for node in self.description.nodes)
        with_devices(load_profile(self.options.profile), most).save(base_path)
        probe_network(
            bed,
            self.description.all_devices(),
            self.options,
            self.network_path,
            base=base_path,
            cluster=self.cluster_path,
        )

    def _predict(self, case: Case) -> None:
        try:
            answer = self._estimate(case, case.allocation, case.strategy)
            # One rank has nobody to share with.
            first = case.allocation.split("[")[0] + "[0]"
            alone = self._estimate(case, first, case.strategy.partition(":")[0])
        except EstimatorError as error:
            self.records.add({"kind": "refusal", "key": case.key, "reason": str(error)[:500]})
            say(f"{case.key}: {error}")
            return
        self.records.add(
            {
                "kind": "prediction",
                "key": case.key,
                "predicted_s": answer.step_time_s,
                "low_s": answer.low_s,
                "high_s": answer.high_s,
                "alone_s": alone.step_time_s,
                "batch_per_gpu": answer.batch_per_gpu,
                "global_batch": answer.global_batch,
                "breakdown": asdict(answer.breakdown),
                "bottleneck": answer.bottleneck,
            }
        )

    def _graph(self, case: Case) -> OpGraph:
        if case.model not in self.graphs:
            if case.is_paced:
                self.graphs[case.model] = paced_graph(case.model)
            else:
                import estimator
                from estimator.graph.models import load_model

                model, batch, loss, name = load_model(f"{MODELS}:{case.model}")
                graph = estimator.trace_model(model, batch, loss=loss, optimizer="adamw", name=name)
                self.graphs[case.model] = graph
        return self.graphs[case.model]

    def machine(self, case: Case) -> MachineProfile:
        """What a node of this testbed is to a case, by the probe."""
        network = load_profile(self.network_path)
        devices = max(node.devices for node in self.description.nodes)
        return paced_machine(network, devices) if case.is_paced else shared_host(network)

    def _estimate(self, case: Case, allocation: str, strategy: str) -> Estimate:
        return estimate_graph(
            self._graph(case),
            allocation,
            batch_per_gpu=case.batch,
            accumulation_steps=case.accumulation_steps,
            strategy=strategy,
            cluster=Cluster.load(self.cluster_path),
            profile=self.machine(case),
        )

    def measure(self, bed: Testbed) -> None:
        """Train what is predicted, as often as asked for."""
        # What is not predicted is not measured: a prediction comes first.
        predicted = [case for case in self.cases if self.records.of("prediction", case.key)]
        total = sum(max(0, self.options.repeats - self._runs(case)) for case in predicted)
        progress = Progress(f"{self.name}: trained", total)
        for done in range(self.options.repeats):
            for case in predicted:
                if self._runs(case) > done or self.records.of("failure", case.key):
                    continue
                try:
                    step_s = self._train(bed, case)
                except EstimatorError as error:
                    self.records.add(
                        {"kind": "failure", "key": case.key, "reason": str(error)[:500]}
                    )
                    progress.advance(f"{case.key}: {error}")
                    continue
                self.records.add({"kind": "measurement", "key": case.key, "step_s": step_s})
                progress.advance(f"{case.key} {1e3 * step_s:.1f} ms")

    def _train(self, bed: Testbed, case: Case) -> float:
        expected_s = self.records.of("prediction", case.key)[-1]["predicted_s"]
        return measure(
            bed,
            f"paced:{case.model}" if case.is_paced else f"{MODELS}:{case.model}",
            case.allocation,
            batch=case.batch,
            strategy=case.strategy,
            optimizer="sgd" if case.is_paced else "adamw",
            accumulation_steps=case.accumulation_steps,
            steps=self.options.steps if expected_s < 1.0 else max(5, self.options.steps // 2),
        ).step_s


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


def assemble(options: argparse.Namespace, records: Records) -> list[Record]:
    """The cases of DESIGN, ours and the scaling forms', failed ones included."""
    ours = [_assembled(case, records) for case in options.cases]
    return [*ours, *_forms(ours)]


def _assembled(case: Case, records: Records) -> Record:
    predictions = records.of("prediction", case.key)
    prediction = predictions[-1] if predictions else {}
    steps_s = [run["step_s"] for run in records.of("measurement", case.key)]
    failures = records.of("failure" if prediction else "refusal", case.key)
    measured_at = records.of("measurement", case.key)[0]["at"] if steps_s else None
    status = "ok" if steps_s and prediction else "not_measured" if prediction else "no_prediction"
    kept = ("predicted_s", "low_s", "high_s", "alone_s", "batch_per_gpu", "global_batch")
    return {
        "id": case.key,
        "source": "testbed",
        "bed": case.bed,
        "title": case.title,
        "model": case.model,
        "machine": MACHINE,
        "allocation": case.allocation,
        "ranks": case.ranks,
        "nodes": case.nodes,
        "strategy": case.strategy,
        "accumulation_steps": case.accumulation_steps,
        "precision": "fp32",
        "method": case.method,
        "k": 0,
        "draw": 0,
        **{name: prediction.get(name) for name in kept},
        "breakdown": prediction.get("breakdown"),
        "measured_s": statistics.median(steps_s) if steps_s else None,
        "noise_ratio": noise_ratio(steps_s) if steps_s else None,
        "runs_s": steps_s,
        "predicted_at": prediction.get("at"),
        "measured_at": measured_at,
        "predicted_beforehand": measured_at is None or prediction.get("at", "") < measured_at,
        "status": status,
        "reason": failures[-1]["reason"] if failures else None,
    }


def _forms(ours: Sequence[Record]) -> Iterator[Record]:
    """Each form's prediction of each measured case from the other cases of its model and bed."""
    whole = [case for case in ours if case["status"] == "ok"]
    for case in whole:
        others = [
            other
            for other in whole
            if other is not case and (other["bed"], other["model"]) == (case["bed"], case["model"])
        ]
        rows = [_row(other) for other in others]
        rows += [(1, 1, case["batch_per_gpu"], case["accumulation_steps"])]
        times = [other["measured_s"] for other in others] + [case["alone_s"]]
        for name, form in FORMS.items():
            predicted_s = float(form().fit(rows, times).predict([_row(case)])[0])
            kind = "" if case["method"] == "paced" else f" ({case['method']})"
            yield {
                **case,
                "method": f"{name}{kind}",
                "predicted_s": predicted_s,
                "low_s": None,
                "high_s": None,
            }


def _row(case: Record) -> tuple[int, int, int, int]:
    return case["ranks"], case["nodes"], case["batch_per_gpu"], case["accumulation_steps"]


def report(found: Sequence[Record]) -> Iterator[str]:
    """The tables for people."""
    lines = [["case", "predicted", "measured", "error", "noise", "linear", "optimus", "pollux", ""]]
    for case in found:
        if case["method"] not in BOUNDS:
            continue
        others = {
            other["method"].split()[0]: other
            for other in found
            if other["id"] == case["id"] and other["method"] not in BOUNDS
        }
        remarks = [case["title"]] if case["title"] else []
        remarks += [case["reason"]] if case["reason"] else []
        remarks += [] if case["predicted_beforehand"] else ["predicted after measuring"]
        lines.append(
            [
                case["id"],
                _ms(case["predicted_s"]),
                _ms(case["measured_s"]),
                _error(case),
                f"{100 * case['noise_ratio']:.1f} %" if case["noise_ratio"] is not None else "-",
                *(_error(others[name]) if name in others else "-" for name in FORMS),
                ", ".join(remarks),
            ]
        )
    yield format_table(lines)
    yield ""
    yield format_rows(summarise(found, by=("method",), bounds=BOUNDS))
    yield ""
    ours = [{**case, "method": "ours"} for case in found if case["method"] in BOUNDS]
    for by_bed in (True, False):
        pool = [{**case, "source": case["bed"]} for case in ours] if by_bed else ours
        row = summarise(pool, by=("method",))[0]
        where = "allocations of one model on one testbed" if by_bed else "and across testbeds"
        share = "-" if row.pairs_right_ratio is None else f"{100 * row.pairs_right_ratio:.1f} %"
        yield f"order right in {share} of {row.pairs} pairs that differ by ≥ 10 % ({where})"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _error(case: Record) -> str:
    if case["predicted_s"] is None or case["measured_s"] is None:
        return "-"
    return f"{100 * (case['predicted_s'] / case['measured_s'] - 1):+.1f} %"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "testbed_accuracy")
    add = parser.add_argument
    add("--beds", help="names of testbeds, joined by commas")
    add("--only", choices=list(BOUNDS), help="the cases judged together")
    add("--repeats", type=int, default=REPEATS, help="fresh launches of each case")
    add("--steps", type=int, default=15, help="timed steps in each launch")
    add("--repredict", action="store_true", help="predict again, and say so where it is too late")
    add("--predict-only", action="store_true", help="write predictions down, measure nothing")
    options = parser.parse_args(arguments)
    wanted = options.beds.split(",") if options.beds else list(beds())
    unknown = sorted(set(wanted) - set(beds()))
    if unknown:
        parser.error(f"there is no testbed '{unknown[0]}'; choose of {', '.join(beds())}")
    options.cases = [
        case for case in cases() if case.bed in wanted and options.only in (None, case.method)
    ]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, predict, write down, measure, report."""
    options = parse_options(arguments)
    records = open_work(options)
    for name in dict.fromkeys(case.bed for case in options.cases):
        Bench(name, options, records).run()
    found = assemble(options, records)
    if options.json:
        rows = [asdict(row) for row in summarise(found, by=("method",), bounds=BOUNDS)]
        machine = load_profile(options.profile).devices[0].name
        answer = {"machine": machine, "at": now(), "cases": found, "summary": rows}
        print(json.dumps(answer, allow_nan=False))
    else:
        print("\n".join(report(found)))


if __name__ == "__main__":
    main()
