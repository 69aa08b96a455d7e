"""Compare the predicted peak of live memory of a training step with what the allocator counted.

Every allocation and release of one real step on the CPU is read from torch's profiler
(``profile_memory``), on top of what is held when the step starts. The prediction is written down
before the step is run. The bound is A9 of the targets: 2 % on each model.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import local_models
import torch
from options import parser_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from estimator.graph.memory import peak_memory
from estimator.graph.trace import trace_graph
from estimator.graph.training_call import TrainingCall
from estimator.optimizers import OPTIMIZERS
from estimator.units import format_bytes, format_ratio
from estimator.workload import Strategy

BOUND_RATIO = 0.02
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and optimizer: peak of live bytes predicted, and measured on this CPU."""

    model: str
    optimizer: str
    batch_per_gpu: int | None
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_ratio(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer with torch's own defaults."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5)
    if name == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters, lr=1e-5)


def step(model: nn.Module, call: TrainingCall, optimizer: torch.optim.Optimizer) -> None:
    """One training step; the output of the model is not kept, as in the trace."""
    optimizer.zero_grad(set_to_none=True)
    call.run(model, call.batch).backward()
    optimizer.step()


def storage_bytes(tree: Any) -> dict[int, int]:
    """Bytes of every storage in nested tuples, lists and mappings, by address."""
    if isinstance(tree, Tensor):
        storage = tree.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    found: dict[int, int] = {}
    items = tree.values() if isinstance(tree, dict) else tree
    for item in items if isinstance(tree, (dict, list, tuple)) else ():
        found |= storage_bytes(item)
    return found


def measured_peak_bytes(
    model: nn.Module, call: TrainingCall, optimizer: torch.optim.Optimizer
) -> int:
    """Most bytes held at once during a step: what stands before it plus the allocator's changes."""
    for _ in range(WARM_UP_STEPS):
        step(model, call, optimizer)
    optimizer.zero_grad(set_to_none=True)
    standing = storage_bytes([*model.parameters(), *model.buffers()]) | storage_bytes(call.batch)
    standing |= storage_bytes(list(optimizer.state.values()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(model, call, optimizer)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return sum(standing.values()) + max(accumulate(size for _, size in changes))


def run_case(build: Callable[[], Any], optimizer: str) -> Case:
    """Predict, then run one model."""
    torch.manual_seed(0)
    model, batch, *rest = build()
    loss = rest[0] if rest else None
    graph = trace_graph(model, batch, loss=loss, optimizer=optimizer)
    predicted = peak_memory(graph.at(), optimizer=optimizer, strategy=Strategy(), ranks=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    measured = measured_peak_bytes(
        model, TrainingCall.of(model, batch, loss), optimizer_of(optimizer, trained)
    )
    return Case(
        model=build.__name__,
        optimizer=optimizer,
        batch_per_gpu=graph.batch,
        predicted_bytes=predicted.total_bytes,
        measured_bytes=measured,
    )


def line_of(case: Case) -> str:
    """One case as people read it."""
    predicted, measured = format_bytes(case.predicted_bytes), format_bytes(case.measured_bytes)
    sizes = f"predicted {predicted:>9}  measured {measured:>9}"
    return f"{case.model:14} {case.optimizer:13} {sizes}  {format_ratio(case.error_ratio)}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="names of local_models.py")
    parser.add_argument("--optimizer", nargs="+", default=["sgd", "adamw"], choices=OPTIMIZERS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for build in local_models.ALL:
        if chosen.only and build.__name__ not in chosen.only:
            continue
        for optimizer in chosen.optimizer:
            case = run_case(build, optimizer)
            cases.append(case)
            print(line_of(case), file=sys.stderr if chosen.json else sys.stdout, flush=True)
    if not cases:
        print(f"no model is called {chosen.only}; see local_models.py", file=sys.stderr)
        return 2
    errors = [abs(case.error_ratio) for case in cases]
    if chosen.json:
        rows = [asdict(case) | {"error_ratio": case.error_ratio} for case in cases]
        print(json.dumps({"bound_ratio": BOUND_RATIO, "cases": rows}))
    else:
        print(
            f"{len(cases)} cases: median {format_ratio(statistics.median(errors))}, "
            f"worst {format_ratio(max(errors))}; bound {format_ratio(BOUND_RATIO)} each"
        )
    return 0 if max(errors) <= BOUND_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
