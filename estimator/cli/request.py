"""Turn what a command asks for into a graph, an estimate and a real training run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from estimator.cli.console import remark, waiting
from estimator.errors import AllocationError, ModelError, StrategyError, WorkloadError, quoted
from estimator.placement.topology import Cluster
from estimator.units import parse_bandwidth_bytes_per_s
from estimator.workload.strategies import Strategy

if TYPE_CHECKING:
    from estimator.advise.scaling import SweepRow
    from estimator.coefficients import Calibration
    from estimator.estimates.balance import Balance
    from estimator.estimates.estimate import Estimate
    from estimator.estimates.request import EstimateRequest
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.machines.catalogue import GivenNetwork
    from estimator.machines.profile import DeviceKind, MachineProfile
    from estimator.placement.mesh import Mesh
    from estimator.workload.loader import Loader


EXECUTIONS = {
    "--compile": "compiled",
    "--compile-blocks": "compiled-blocks",
    "--cuda-graphs": "cuda-graphs",
}
# Options of how the model itself is run, as a trace has them.
_TRACED = (
    *("checkpoint", "float8", "recipe", "seq_len", "channels_last", "grad_scaler"),
    *("clip_grad_norm", "execution"),
)
_CHANGEABLE = ("optimizer", "grad_scaler", "clip_grad_norm", "float8", "recipe")
_COMPILED: dict[str | None, Any] = {"compiled": True, "compiled-blocks": "blocks"}


def _traffic(text: str) -> tuple[str, float]:
    """Another job as ``ALLOCATION=RATE``: where it is, and what each of its nodes sends."""
    where, _, rate = text.rpartition("=")
    try:
        return where, parse_bandwidth_bytes_per_s(rate)
    except ValueError as error:
        raise WorkloadError(
            f"neighbour {quoted(text)}: {error}; write ALLOCATION=RATE such as 2x4:NAME=10Gbit/s"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model with how it is trained; None means the default, or what a saved graph has.

    `batch` counts samples per device and micro-batch, `global_batch` those of a whole step; both
    together say how many micro-batches there are. `network` is that of all nodes.
    """

    model: str
    batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    seq_len: int | None = None
    optimizer: str | None = None
    precision: str | None = None
    strategy: str = "ddp"
    layout: str | None = None
    tp_plan: str | None = None
    cluster: Cluster | None = None
    calibration: Calibration | None = None
    loader: Loader | None = None
    measure: bool = False
    execution: Literal["compiled", "compiled-blocks", "cuda-graphs"] | None = None
    channels_last: bool = False
    grad_scaler: bool = False
    clip_grad_norm: bool = False
    checkpoint: str | None = None
    float8: str | None = None
    recipe: str | None = None
    network: GivenNetwork | None = None
    neighbours: tuple[str, ...] = ()
    _machines: dict[str, MachineProfile] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.recipe and (self.execution or self.float8):
            raise ModelError(
                f"--recipe {self.recipe} says itself what is compiled and in float8; leave out "
                f"{', '.join(EXECUTIONS)} and --float8"
            )

    def graph(
        self,
        allocations: Sequence[str],
        report: Callable[[str, float], None] | None = None,
        *,
        target: DeviceKind | None = None,
        ranks: int | None = None,
    ) -> OpGraph:
        """The graph that the model names, or its trace for `target`, or the first machine's kind.

        Allocations and strategy are checked first, since building a model can take long. `report`
        is told what is being measured and how far that is, from 0 to 1. A model that calls
        collectives itself is traced for `ranks`, or for as many as all allocations have.
        """
        placements = [self._checked(text).placement for text in allocations]
        machines = [placement.kinds[0].profile for placement in placements]
        if len(counts := {placement.ranks for placement in placements}) == 1:
            ranks = ranks or counts.pop()
        from estimator.graph.files import is_saved_graph, is_summary_file
        from estimator.graph.ir.op_graph import OpGraph

        if is_saved_graph(self.model):
            return self._changed(OpGraph.load(self.model))
        if is_summary_file(self.model):
            return self._summarised(target or machines[0].kind)
        from estimator.api import trace_model
        from estimator.graph.models import load_model  # needs torch, a saved graph none

        model, batch, loss, name = load_model(
            self.model,
            batch=self.batch,
            seq_len=self.seq_len,
            weights=False,
            say=remark,
        )
        return trace_model(
            model,
            batch,
            loss=loss,
            **self._recipe,
            precision=self.precision or Strategy.parse(self.strategy).gathered_dtype or "fp32",
            target=target or machines[0].kind,
            measure=self.measure,
            compiled=_COMPILED.get(self.execution, self.execution),
            channels_last=self.channels_last,
            checkpoint=self.checkpoint,
            ranks=ranks,
            profile=machines[0] if machines else "local",
            name=name,
            report=report,
        )

    def _changed(self, graph: OpGraph) -> OpGraph:
        """A saved graph with what of this request can be changed after tracing.

        Raises ModelError that names the command to trace again with for what cannot.
        """
        from estimator.api import with_recipe

        precision = self.precision
        if {precision, graph.precision} == {"fp32", "tf32"} and not graph.timings:
            precision = None
        for option, wanted, traced in (
            ("precision", precision, graph.precision),
            ("measure", self.measure, bool(graph.timings)),
            ("channels-last", self.channels_last, graph.channels_last),
            ("checkpoint", self.checkpoint, graph.checkpoint),
            ("seq-len", self.seq_len, graph.tokens_per_sample),
        ):
            if wanted and wanted != traced:
                words = f"with --{option} {traced}" if traced else f"without --{option}"
                raise ModelError(
                    f"{self.model} was traced {words}, on which its operators depend; trace its "
                    f"model again: {self._trace_command(graph)}"
                )
        return with_recipe(
            graph,
            precision=self.precision,
            compiled=self.execution,
            **self._recipe,
        )

    @property
    def _recipe(self) -> dict[str, Any]:
        """What can be changed of a graph, too."""
        return {name: getattr(self, name) for name in _CHANGEABLE}

    def _trace_command(self, graph: OpGraph) -> str:
        """What traces the model as it was traced, but for what is asked."""
        words = ["--target", graph.target]
        for name in ("batch", "precision", "optimizer", *_TRACED):
            value = getattr(self, name) or getattr(graph, name, None)
            if name == "execution":
                words += [flag for flag, execution in EXECUTIONS.items() if execution == value]
            elif value:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        words += ["--measure"] if self.measure or graph.timings else []
        return f"estimator trace MODEL {shlex.join([*words, '-o', self.model])}"

    def _summarised(self, target: DeviceKind) -> OpGraph:
        from estimator.graph.summary import load_summary, summary_graph

        summary = load_summary(self.model)
        for name in ("measure", *_TRACED):
            wanted = getattr(self, name)
            if wanted and (name != "seq_len" or wanted != summary.tokens_per_sample):
                flags = EXECUTIONS if name == "execution" else [f"--{name.replace('_', '-')}"]
                raise ModelError(
                    f"{self.model} is a summary, whose operators are not known; leave out "
                    f"{', '.join(flags)} or name the model itself"
                )
        trained = replace(
            summary,
            optimizer=self.optimizer or summary.optimizer,
            precision=self.precision or summary.precision,
        )
        if summary.step_times and trained != summary:
            raise ModelError(
                f"{self.model} has step times of {summary.optimizer} in {summary.precision}; leave "
                "out --optimizer and --precision or time such steps"
            )
        return summary_graph(trained, target=target)

    def of(self, graph: OpGraph, allocation: str) -> EstimateRequest:
        """What is asked of a traced graph on an allocation."""
        from estimator.estimates.request import EstimateRequest
        from estimator.graph.partition.plan import read_plan

        layout = graph.layout if self.layout is None else self.layout
        steps = self._accumulation(replace(self, layout=layout).mesh(allocation))
        return EstimateRequest.of(
            graph,
            allocation,
            batch_per_gpu=self.batch,
            global_batch=self.global_batch if self.batch is None else None,
            accumulation_steps=steps,
            strategy=self.strategy,
            layout=self.layout,
            tp_plan=None if self.tp_plan is None else read_plan(self.tp_plan),
            loader=self.loader,
            cluster=self.cluster,
            profile=self.machine(allocation),
            calibration=self.calibration,
            neighbours=[_traffic(text) for text in self.neighbours],
        )

    @waiting("estimating")
    def balance(self, graph: OpGraph, allocation: str) -> Balance:
        """The estimate of a traced graph on an allocation, and that of an even split beside it."""
        from estimator.estimates.balance import balance

        return balance(self.of(graph, allocation))

    def estimate(self, graph: OpGraph, allocation: str) -> Estimate:
        """The estimate of a traced graph on an allocation, a global batch split by speed."""
        return self.balance(graph, allocation).answer

    def exists(self, allocation: str) -> bool:
        """Whether there are such machines and devices, and the strategy can divide the ranks."""
        try:
            self._checked(allocation)
        except (AllocationError, StrategyError, WorkloadError):
            return False
        return True

    def mesh(self, allocation: str) -> Mesh:
        """The ranks of an allocation along the axes of the layout."""
        from estimator.placement.mesh import Mesh
        from estimator.placement.placement import place
        from estimator.workload.layouts import DATA_PARALLEL, Layout

        strategy = Strategy.parse(self.strategy)
        placement = place(allocation, cluster=self.cluster, profile=self.machine(allocation))
        layout = DATA_PARALLEL if self.layout is None else Layout.parse(self.layout)
        return Mesh.laid_out(placement, layout, strategy)

    def _checked(self, allocation: str) -> Mesh:
        """A mesh over which the samples of a step can be divided."""
        from estimator.placement.mesh import largest_share

        mesh = self.mesh(allocation)
        steps = self._accumulation(mesh)
        if self.global_batch is not None and self.batch is None:
            largest_share(mesh, self.global_batch, steps, strict=False)
        return mesh

    def _accumulation(self, mesh: Mesh) -> int:
        """Micro-batches of a step; raises WorkloadError where batches ask for no whole number."""
        if self.batch is None or self.global_batch is None:
            return self.accumulation or 1
        ranks = mesh.dp
        samples = self.batch * ranks
        steps, rest = divmod(self.global_batch, samples)
        if rest or not steps:
            raise WorkloadError(
                f"a global batch of {self.global_batch} is no multiple of {samples}, which is "
                f"{self.batch} on each of {ranks} ranks; change --batch or --global-batch"
            )
        if self.accumulation not in (None, steps):
            raise WorkloadError(
                f"--batch {self.batch} and --global-batch {self.global_batch} on {ranks} "
                f"ranks make {steps} micro-batches, found --accumulation {self.accumulation}; "
                "leave one of the three out"
            )
        return steps

    def machine(self, allocation: str) -> MachineProfile | None:
        """The machine of an allocation on the network that was given; None for its own."""
        if self.network is None:
            return None
        from estimator.machines.catalogue import load_profile
        from estimator.placement.allocation import Allocation

        names = {group.machine for group in Allocation.parse(allocation).groups}
        name = names.pop()
        if names or name is None or self.cluster is not None:
            raise AllocationError(
                f"--network is that of nodes of one machine, found '{allocation}'; write a cluster "
                "file with the uplink of each node"
            )
        if name not in self._machines:
            self._machines[name] = self.network.of(load_profile(name))
        return self._machines[name]

    @waiting("looking for drifts")
    def counting_drifts(self, allocations: Sequence[str]) -> tuple[Request, list[str]]:
        """The request with hosts of the allocations as slow as the store shows them, and its words.

        Those with a slowdown in the cluster file keep that.
        """
        from estimator.placement.allocation import Allocation

        groups = [group for text in allocations for group in Allocation.parse(text).groups]
        hosts = {group.host for group in groups if group.host}
        if self.calibration is None or self.cluster is None or not hosts:
            return self, []
        from estimator.calibrate.calibrator import Calibrator

        if not isinstance(self.calibration, Calibrator):
            return self, []
        cluster, drifts = self.calibration.counting_drifts(self.cluster, hosts=hosts)
        return replace(self, cluster=cluster), drifts

    @waiting("estimating")
    def ranked(
        self, graph: OpGraph, allocation: str, strategies: Sequence[str | Strategy]
    ) -> list[SweepRow]:
        """Estimates on an allocation under each strategy instead of the request's, best first."""
        from estimator.advise.scaling import rank_strategies

        def answer_of(strategy: Strategy) -> Estimate:
            return replace(self, strategy=str(strategy)).estimate(graph, allocation)

        return rank_strategies(allocation, strategies, answer_of)

    def check_trainable_here(self, allocations: Sequence[str]) -> None:
        """Raise AllocationError where this machine lacks the GPUs that an allocation names."""
        from estimator.placement.placement import place

        for text in allocations:
            nodes = place(text, cluster=self.cluster).node_groups[0]
            if nodes.profile.kind != "cuda":
                continue
            from torch import cuda  # cores need no look at what GPUs there are

            if cuda.device_count() < nodes.per_node:
                raise AllocationError(
                    f"'{text}' is to train on {nodes.per_node} of this machine's GPUs, and torch "
                    f"finds {cuda.device_count()}; validate on the machine itself"
                )

    def trainer(
        self, graph: OpGraph, *, steps: int, warmup_steps: int
    ) -> Callable[[Estimate], float]:
        """A function that trains as an estimate assumed: the slowest rank's seconds per step."""
        from estimator.placement.placement import place
        from estimator.validate.training import train

        if graph.mode != graph.precision:
            raise ModelError(
                f"this command trains eagerly, but {graph.name} was asked for as {graph.mode}; "
                "leave out what is not its precision"
            )

        if self.layout is not None:
            raise StrategyError(
                f"this command trains data-parallel ranks, found --layout {self.layout}; leave it "
                "out"
            )

        def run(predicted: Estimate) -> float:
            placement = place(predicted.allocation)
            if placement.nodes > 1:
                raise AllocationError(
                    f"'{predicted.allocation}' spans {placement.nodes} nodes, but this command "
                    "trains on one; validate an allocation such as 1x2:local"
                )
            devices = placement.node_groups[0].profile.devices[: predicted.ranks]
            training = train(
                self.model,
                devices,
                batch=predicted.batch_per_gpu,
                optimizer=graph.optimizer,
                precision=graph.precision,
                strategy=self.strategy,
                steps=steps,
                warmup_steps=warmup_steps,
                accumulation_steps=predicted.accumulation_steps,
                seq_len=self.seq_len,
            )
            return training.slowest_step_s

        return run
