"""Predict steps of tensor-parallel CPU ranks, then run them: parallelize_module on gloo.

Every case is predicted before it is measured; a measurement is the median over fresh processes of
the slowest rank's step. What is found is appended to a file in --work, from which a further run
continues.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from layout_models import Case, decoder
from options import add_work, parser_of, print_found
from records import Record, Records, now, say

import estimator as est
from estimator.estimates import Estimate
from estimator.graph.split_plan import Plan
from estimator.graph.trace import trace_graph
from estimator.machines.profile import MachineProfile
from estimator.probe.ranks import run_on_devices

TP = 2
_BIG = {"width": 512, "heads": 8, "words": 4096}
CASES = (
    Case("llama-like 4 x 512", decoder(**_BIG, inner=1408, layers=4), sequence=True),
    Case("llama-like 8 x 256", decoder(width=256, heads=8, words=2048, inner=704, layers=8), True),
    Case("llama-like 2 x 1024", decoder(width=1024, heads=16, inner=2816, layers=2), True),
    Case("gpt-like 4 x 512", decoder(**_BIG, inner=2048, layers=4, gated=False, bias=True), True),
    Case("gpt-like 6 x 384", decoder(width=384, heads=6, inner=1536, layers=6, gated=False), True),
    Case("gpt-like 2 x 768", decoder(width=768, heads=12, inner=3072, layers=2, gated=False), True),
)


def train_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: a model divided by torch, its steps timed."""
    import torch
    from layout_oracle import torch_styles
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from estimator.probe.backend import keep_memory_resident
    from estimator.probe.training import time_steps

    keep_memory_resident()
    torch.manual_seed(0)
    model, batch = next(case for case in CASES if case.name == arguments["case"]).make()
    plan = Plan(tuple(tuple(each) for each in arguments["styles"]), sequence=arguments["sequence"])
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, torch_styles(plan, model))
    return time_steps(_Steps(model, batch), arguments, world_size)  # type: ignore[arg-type]


class _Steps:
    """What `time_steps` asks of a training."""

    unused_parameters = 0

    def __init__(self, model: Any, batch: Any) -> None:
        import torch

        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.marks: list[tuple[str, float]] = []

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.batch).backward()
        self.optimizer.step()

    def mark(self, what: str) -> None:
        """Steps are timed as a whole."""

    def synchronize(self) -> None:
        """Operators of CPUs have ended when they return."""

    def step_times_s(self) -> list[float]:
        return []

    def phases_s(self, steps: int) -> dict[str, float]:
        return {}


def predicted(case: Case, profile: MachineProfile, *, sequence: bool) -> tuple[Plan, Estimate]:
    """The plan and the estimate of one case on two ranks."""
    from layout_oracle import plan_of

    from estimator.engine import DEFAULT

    model, batch = case.make()
    graph = trace_graph(model, batch, loss=case.loss)
    plan = plan_of(graph, sequence=sequence)
    layout = f"tp={TP},sp" if sequence else f"tp={TP}"
    answer = DEFAULT.estimate(
        graph, f"1x{TP}:{profile.name}", layout=layout, tp_plan=plan, profile=profile
    )
    return plan, answer


def measured(
    case: Case, plan: Plan, profile: MachineProfile, *, steps: int, processes: int
) -> list[float]:
    """Seconds of the slowest rank's step in each of some runs."""
    arguments = {
        "case": case.name,
        "styles": plan.styles,
        "sequence": plan.sequence,
        "kind": "cpu",
        "steps": steps,
        "warmup_steps": 3,
    }
    found = []
    for _ in range(processes):
        ranks = run_on_devices(
            profile.devices[:TP], "layout_accuracy:train_rank", arguments, timeout_s=300, world=True
        )
        found.append(max(rank["step_s"] for rank in ranks))
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--machine", default="local")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--only", type=int, action="append", default=[])
    add_work(parser, "layout_accuracy")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.work / "records.jsonl")
    profile = est.load_profile(options.machine)
    rows = []
    for number, case in enumerate(CASES):
        if options.only and number not in options.only:
            continue
        for sequence in (False, True):
            if not records.of("layout", case.name, sequence=sequence):
                plan, answer = predicted(case, profile, sequence=sequence)
                at = now()
                runs = measured(
                    case, plan, profile, steps=options.steps, processes=options.processes
                )
                records.add(_record(case, answer, runs, predicted_at=at, sequence=sequence))
                say(_line(records.found[-1]))
            rows += records.of("layout", case.name, sequence=sequence)[-1:]
    errors = sorted(abs(row["error_ratio"]) for row in rows)
    median, worst = statistics.median(errors), errors[-1]
    lines = [*map(_line, rows), f"median {median:.1%}, worst {worst:.1%}, {len(rows)} cases"]
    print_found(options, lines, machine=profile.name, cases=rows, median=median, worst=worst)
    return 0


def _record(
    case: Case, answer: Estimate, runs: list[float], *, predicted_at: str, sequence: bool
) -> Record:
    """A case's prediction beside its measurement."""
    step_s = statistics.median(runs)
    return {
        "kind": "layout",
        "key": case.name,
        "sequence": sequence,
        "layout": answer.layout,
        "predicted_at": predicted_at,
        "predicted_s": answer.step_time_s,
        "layer_communication_s": answer.breakdown.layer_communication_s,
        "measured_s": step_s,
        "runs_s": runs,
        "error_ratio": answer.step_time_s / step_s - 1,
    }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['key']:22} {row['layout']:14} predicted {row['predicted_s'] * 1e3:7.1f} ms "
        f"(communication {row['layer_communication_s'] * 1e3:5.1f}) measured "
        f"{row['measured_s'] * 1e3:7.1f} ms  {row['error_ratio']:+.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
