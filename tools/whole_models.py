"""Learn what no operator table measures from step times of whole models on one GPU.

A step is the sum of its kernels; those that operator tables cover take what the kernel model says,
every other kind takes a multiple of its seconds at the chip's peaks. The multiples come from
non-negative least squares of the relative error over many models, weighted towards the median
(IRLS), with a light prior. Convolutions, batch norm, pooling, copies and reductions are learnt so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published.machines import machine_name
from published.rows import NotMapped
from scipy.optimize import nnls
from timm_rows import entry_of, read_index, read_timm_rows

from estimator import OpGraph, load_profile
from estimator.calibrate.observation_files import read_rows
from estimator.graph.costs.call_costs import Features, features_of
from estimator.kernels.roofline import Roofline, memory_bound_keys, phase_of
from estimator.machines.profile import MachineProfile, UpdateCost
from estimator.machines.typical import with_typical_costs
from estimator.tensors import OpCall

Array = NDArray[np.float64]

VISION = "timm_train"
VISION_MACHINE = "rtx-3090"
# Forward passes alone tell them from backward ones; later versions of torch in this table run
# attention by other kernels than the graphs hold.
INFERENCE = "timm_infer"
EAGER_INFERENCE_TORCH = "1.13"
# Families whose seconds are learnt here, kinds of normalization that no operator table holds, and
# families that are plain memory-bound kernels.
LEARNT = ("convolution", "pooling", "reduction")
LEARNT_KINDS = ("batch_norm", "group_norm")
PLAIN = ("elementwise", "copy", "fill")
# Multiples before anything was seen, and how strongly they hold: a gradient of a convolution copies
# and sums more than its forward pass; a plain stream's multiple is the memory's.
PRIORS: Mapping[str, tuple[float, float]] = {
    "plain": (1.15, 10.0),
    "batch_norm.forward": (1.4, 3.0),
    "batch_norm.backward": (1.7, 3.0),
    "pooling.forward": (2.0, 5.0),
    "pooling.backward": (2.0, 5.0),
}
CONVOLUTION_PRIORS = {
    "flops": (1.1, 1.0),
    "forward bytes": (2.0, 1.0),
    "backward bytes": (5.0, 1.0),
}
USUAL_PRIOR = (1.5, 1.0)
PRIOR_STRENGTH = 0.03
# A convolution computes little faster than matmuls of its size, and a kernel streams at what the
# best kernels get of a memory. Batch norm reads its image once for the statistics and once to
# normalize it, and backward both the image and the gradient twice: 3 and 5 passes for the 2 and 3
# that its tensors are.
LEAST_FLOPS_MULTIPLE = 0.9
LEAST_STREAM_MULTIPLE = 1.08
LEAST_PASSES = {"batch_norm.forward": 3 / 2, "batch_norm.backward": 5 / 3}
ITERATIONS = 25
FLOOR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """One measured step on one device, to be written as a sum of multiples.

    `is_inference`: only the forward pass was timed, in evaluation mode.
    """

    model: str
    family: str
    graph_path: Path
    machine: str
    batch: int
    layout: str
    step_time_s: float
    is_inference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Rows of seconds at the peaks: measured ≈ fixed + matrix @ multiples."""

    cases: tuple[ModelCase, ...]
    names: tuple[str, ...]
    matrix: Array
    fixed_s: Array

    @property
    def measured_s(self) -> Array:
        return np.array([case.step_time_s for case in self.cases])

    def without(self, family: str) -> Design:
        """The rows of all other families of models."""
        return self.only([case.family != family for case in self.cases])

    def only(self, chosen: Sequence[bool]) -> Design:
        """The chosen rows."""
        mask = np.array(chosen)
        return Design(
            cases=tuple(case for case, keep in zip(self.cases, chosen, strict=True) if keep),
            names=self.names,
            matrix=self.matrix[mask],
            fixed_s=self.fixed_s[mask],
        )


class ModelTerms:
    """Seconds at the peaks of every kind of kernel of a graph on a machine of the catalogue."""

    def __init__(self, profile: MachineProfile, kernel_model: Path | None = None) -> None:
        self.profile = with_typical_costs(profile)
        self._kernel_models: dict[str, Roofline] = {}
        self._kernel_model = kernel_model
        self._bytes_per_s = profile.devices[0].memory_bandwidth_bytes_per_s or 1e12

    def of(
        self, graph: OpGraph, batch: int, layout: str, is_inference: bool
    ) -> tuple[float, dict[str, float]]:
        """(seconds that are not learnt, seconds at the peak by kind) of a step or a forward pass.

        Batch norm of fixed mean and variance is another kernel than the one that finds them.
        """
        bound = graph.at(batch)
        roofline = self._roofline(graph.precision)
        fixed_s, terms = 0.0, defaultdict[str, float](float)
        for op, call in zip(graph.ops, bound.calls, strict=True):
            left_out = op.is_view or (is_inference and op.phase == "backward")
            features = None if left_out else features_of(call)
            if features is None:
                continue
            found = dict(self._terms(features, roofline, layout))
            for name, seconds in found.items():
                fixed_norm = is_inference and name.startswith("batch_norm")
                terms["batch_norm of fixed statistics" if fixed_norm else name] += seconds
            fixed_s += self._fixed_s(call, features, roofline, bool(found))
        return fixed_s + (0.0 if is_inference else self._update_s(graph)), terms

    def _roofline(self, precision: str) -> Roofline:
        if precision not in self._kernel_models:
            self._kernel_models[precision] = Roofline(
                self.profile, precision=precision, kernel_model=self._kernel_model
            )
        return self._kernel_models[precision]

    def _terms(
        self, features: Features, roofline: Roofline, layout: str
    ) -> Iterator[tuple[str, float]]:
        cost = features.cost
        if features.family == "convolution":
            kind, compute_s = roofline.convolutions([features])[0]
            suffix = "" if layout == "nchw" else ".channels last"
            name = f"{kind}.{phase_of(features)}{suffix}"
            yield f"{name} flops", compute_s
            yield f"{name} bytes", cost.moved_bytes / self._bytes_per_s
        elif features.family in PLAIN:
            yield "plain", cost.moved_bytes / self._bytes_per_s
        elif features.family in LEARNT or memory_bound_keys(features)[0].startswith(LEARNT_KINDS):
            yield memory_bound_keys(features)[0], cost.moved_bytes / self._bytes_per_s

    def _fixed_s(
        self, call: OpCall, features: Features, roofline: Roofline, is_learnt: bool
    ) -> float:
        if is_learnt:
            return roofline.kernel_model.memory_bound.start_s
        predicted = roofline.predict(call)
        return predicted.cold_s if predicted else 0.0

    def _update_s(self, graph: OpGraph) -> float:
        cost: UpdateCost = next(
            item for item in self.profile.updates if item.optimizer == graph.optimizer
        )
        count = len(graph.parameters)
        return cost.update_time_s(tensors=count, parameters=graph.parameter_count)


def vision_cases(folder: Path, bank: Path) -> list[ModelCase]:
    """timm's training steps and forward passes with the graphs of their models."""
    trained = _trained(folder / f"{VISION}.csv", bank)
    return trained + _inferred(folder / f"{INFERENCE}.csv", bank)


def _trained(table: Path, bank: Path) -> list[ModelCase]:
    return [
        ModelCase(
            model=row.model,
            family=row.family,
            graph_path=row.graph_path,
            machine=row.machine,
            batch=row.batch_per_gpu,
            layout=row.layout,
            step_time_s=row.step_time_s,
        )
        for row in read_timm_rows(table, bank).rows
    ]


def _inferred(table: Path, bank: Path) -> list[ModelCase]:
    """Forward passes of the models in the bank, as eager torch ran them."""
    index = read_index(bank)
    cases = []
    for _, row in read_rows(table):
        if row["compiled"] != "0" or row["torch"] != EAGER_INFERENCE_TORCH:
            continue
        try:
            entry = entry_of(row, index)
        except NotMapped:
            continue
        cases.append(
            ModelCase(
                model=row["model"],
                family=entry["family"],
                graph_path=bank / entry["file"],
                machine=machine_name(row["gpu"]),
                batch=int(row["batch"]),
                layout=row["layout"],
                step_time_s=float(row["step_time_ms"]) * 1e-3,
                is_inference=True,
            )
        )
    return cases


def design_of(cases: Sequence[ModelCase], kernel_model: Path | None = None) -> Design:
    """The rows of cases; graphs are read once each."""
    machines = {
        case.machine: ModelTerms(load_profile(case.machine), kernel_model) for case in cases
    }
    by_graph: dict[Path, list[ModelCase]] = defaultdict(list)
    for case in cases:
        by_graph[case.graph_path].append(case)
    known: dict[tuple[object, ...], tuple[float, dict[str, float]]] = {}
    for path, members in by_graph.items():
        graph = OpGraph.load(path)
        for case in members:
            if _key(case) not in known:
                terms = machines[case.machine]
                known[_key(case)] = terms.of(graph, case.batch, case.layout, case.is_inference)
    found = [known[_key(case)] for case in cases]
    names = tuple(sorted({name for _, terms in found for name in terms}))
    matrix = np.array([[terms.get(name, 0.0) for name in names] for _, terms in found])
    fixed = np.array([fixed_s for fixed_s, _ in found])
    return Design(cases=tuple(cases), names=names, matrix=matrix, fixed_s=fixed)


def _key(case: ModelCase) -> tuple[object, ...]:
    return (case.graph_path, case.batch, case.layout, case.machine, case.is_inference)


def multiples(design: Design) -> dict[str, float]:
    """How many times longer than at the peaks each kind takes (non-negative least squares)."""
    measured = design.measured_s
    lower = np.array([_least(name) for name in design.names])
    prior = np.array([prior_of(name) for name in design.names])
    # Solve for what comes on top of the lower bounds.
    target = 1.0 - (design.fixed_s + design.matrix @ lower) / measured
    relative = design.matrix / measured[:, None]
    scale = np.sqrt((relative**2).mean(axis=0)) + 1e-12
    holding = np.diag(PRIOR_STRENGTH * prior[:, 1] * scale * np.sqrt(len(measured)))
    weights = np.ones(len(measured))
    above = np.zeros(len(design.names))
    for _ in range(ITERATIONS):
        root = np.sqrt(weights)
        left = np.vstack([relative * root[:, None], holding])
        wanted = np.maximum(prior[:, 0] - lower, 0.0)
        right = np.concatenate([target * root, holding @ wanted])
        above, _ = nnls(left, right)
        weights = 1.0 / np.maximum(np.abs(relative @ above - target), FLOOR)
        weights /= weights.mean()
    return dict(zip(design.names, map(float, lower + above), strict=True))


def prior_of(name: str) -> tuple[float, float]:
    """(multiple before anything was seen, how strongly it holds) of a kind of kernel."""
    if name.endswith((" flops", " bytes")):
        phase = "forward" if "forward" in name else "backward"
        kind = name.rsplit(" ", 1)[1]
        return CONVOLUTION_PRIORS["flops" if kind == "flops" else f"{phase} bytes"]
    return PRIORS.get(name, USUAL_PRIOR)


def _least(name: str) -> float:
    if name.endswith(" bytes"):  # on top of a convolution's flops
        return 0.0
    if name.endswith(" flops"):
        return LEAST_FLOPS_MULTIPLE
    return LEAST_STREAM_MULTIPLE * LEAST_PASSES.get(name, 1.0)


def predicted_s(design: Design, found: Mapping[str, float]) -> Array:
    """Step times of the rows; a kind that was not learnt takes its prior."""
    factors = [found.get(name, prior_of(name)[0]) for name in design.names]
    return np.asarray(design.fixed_s + design.matrix @ np.array(factors))


def without_own_family(design: Design, judged: Design) -> Array:
    """Predictions of the judged rows, each from the rows of all other families of models."""
    predicted = np.zeros(len(judged.cases))
    for family in sorted({case.family for case in judged.cases}):
        mine = [case.family == family for case in judged.cases]
        found = multiples(design.without(family))
        predicted[np.array(mine)] = predicted_s(judged.only(mine), found)
    return predicted
