"""Hold one question: which model is trained on which devices, how, and corrected by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypedDict, Unpack

from estimator.coefficients import Calibration, check_calibration
from estimator.errors import StrategyError, WorkloadError, quoted
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.plan import Plan
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.placement import Placement, check_kinds
from estimator.placement.topology import Cluster
from estimator.workload.layouts import DATA_PARALLEL, Layout
from estimator.workload.loader import Loader
from estimator.workload.strategies import DDP, MOST_ACCUMULATION, Strategy, check_count

_DDP = Strategy.parse("ddp")


class Traffic(NamedTuple):
    """What is known of another job: where it is, and bytes per second from each of its nodes.

    The mean over its time; it sends them as fast as its links allow.
    """

    allocation: str | Allocation | Placement
    bytes_per_s: float


class Options(TypedDict, total=False):
    """How a graph is trained, as `estimator.estimate` takes it; strategy, layout, loader as texts.

    Functions that ask about several steps pass these on to `EstimateRequest.of`.
    """

    batch_per_gpu: int | Sequence[int] | None
    global_batch: int | None
    accumulation_steps: int
    strategy: str | Strategy
    layout: str | Layout | None
    tp_plan: Plan | None
    loader: str | Loader | None
    cluster: Cluster | None
    profile: MachineProfile | None
    calibration: Calibration | None
    strict: bool
    neighbours: Sequence[Any]


class ChangedOptions(Options, total=False):
    """What may differ between two requests."""

    graph: OpGraph
    allocation: str | Allocation | Placement | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimateRequest:
    """A whole question, parsed and checked; `of` reads it from what people write.

    `allocation` is placed already where the same one is asked about repeatedly, and None in what
    the rows of a table share. `batch_per_gpu` has one number for all ranks or one for each group of
    the allocation. `strict` refuses a global batch that ranks cannot share evenly. `neighbours` are
    jobs that train at once, on links in common. Nothing here reads a file. Raises AllocationError,
    ProfileError, StrategyError, TopologyError, WorkloadError.

    >>> # EstimateRequest.of(graph, "2x8:h100-sxm", strategy="fsdp", layout="tp=2,dp=*")
    """

    graph: OpGraph
    allocation: Allocation | Placement | None = None
    batch_per_gpu: int | Sequence[int] | None = None
    global_batch: int | None = None
    accumulation_steps: int = 1
    strategy: Strategy = _DDP
    layout: Layout = DATA_PARALLEL
    tp_plan: Plan | None = None
    loader: Loader | None = None
    cluster: Cluster | None = None
    profile: MachineProfile | None = None
    calibration: Calibration | None = None
    strict: bool = False
    neighbours: tuple[EstimateRequest | Traffic, ...] = ()

    def __post_init__(self) -> None:
        if self.cluster is not None or self.profile is not None:
            check_kinds(cluster=self.cluster, profile=self.profile)
        if self.calibration is not None:
            check_calibration(self.calibration)
        steps = self.accumulation_steps
        if type(steps) is not int or not 0 < steps <= MOST_ACCUMULATION:
            steps = check_count(steps, "accumulation steps", most=MOST_ACCUMULATION)
            object.__setattr__(self, "accumulation_steps", steps)
        if self.batch_per_gpu is not None and self.global_batch is not None:
            raise WorkloadError("give either the batch per device or the global batch, not both")
        if self.tp_plan is not None and self.layout is DATA_PARALLEL:
            raise StrategyError("a tensor-parallel plan needs a layout; write layout='tp=2,dp=*'")

    @classmethod
    def of(
        cls,
        graph: OpGraph,
        allocation: str | Allocation | Placement | None = None,
        **options: Unpack[Options],
    ) -> EstimateRequest:
        """The request of a graph on an allocation, its texts parsed.

        A graph that was divided or sharded before it was traced keeps its own layout and strategy.
        """
        if not isinstance(graph, OpGraph):
            raise WorkloadError(
                f"steps are estimated of an OpGraph, found {type(graph).__name__}; make one with "
                "trace_model"
            )
        nouns: dict[str, Any] = {**options}
        if allocation is not None and not isinstance(allocation, Placement):
            allocation = Allocation.parse(allocation)
        if nouns.get("loader") is not None:
            nouns["loader"] = Loader.parse(nouns["loader"])
        nouns["strategy"] = agreed_strategy(graph, nouns.get("strategy", "ddp"))
        nouns["layout"] = agreed_layout(graph, nouns.get("layout"))
        if nouns.get("neighbours"):
            nouns["neighbours"] = tuple(map(_neighbour, nouns["neighbours"]))
        return cls(graph=graph, allocation=allocation, **nouns)

    def changed(self, **changes: Unpack[ChangedOptions]) -> EstimateRequest:
        """The same question but for some of it, which is parsed as `of` parses it."""
        if changes.keys() <= _PLAIN:
            nouns: Any = changes
            return replace(self, **nouns)
        values: dict[str, Any] = {name: getattr(self, name) for name in _NAMES}
        if self.layout is DATA_PARALLEL:
            del values["layout"]
        values.update(changes)
        return EstimateRequest.of(**values)


def _neighbour(job: Any) -> EstimateRequest | Traffic:
    """Another job by its estimate, its request, or (allocation, bytes per second of a node)."""
    request = getattr(job, "request", job)
    if isinstance(request, EstimateRequest) and request.allocation is not None:
        return replace(request, neighbours=())
    if not isinstance(job, Traffic) and not (isinstance(job, tuple) and len(job) == 2):
        raise WorkloadError(
            f"a neighbour is an estimate or (allocation, bytes per second), found {quoted(job)}; "
            "give one of them for each other job"
        )
    where, rate = job
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < MOST_TRAFFIC:
        raise WorkloadError(f"a neighbour sends {quoted(rate)} bytes per second; give 0 or more")
    return Traffic(where if isinstance(where, Placement) else Allocation.parse(where), float(rate))


MOST_TRAFFIC = 1e15
_NAMES = tuple(item.name for item in fields(EstimateRequest))
# What there is nothing to parse of.
_PLAIN = {"batch_per_gpu", "global_batch", "accumulation_steps", "calibration"}


def agreed_layout(graph: OpGraph, layout: str | Layout | None) -> Layout:
    """The layout of a graph's ranks: what is asked, or what its module was divided by before.

    Raises StrategyError where these differ.
    """
    if graph.layout is None:
        return DATA_PARALLEL if layout is None else Layout.parse(layout)
    own = Layout.parse(graph.layout)
    wanted = own if layout is None else Layout.parse(layout)
    if wanted.megatron or any(
        getattr(wanted, axis) != getattr(own, axis) for axis in ("tp", "cp", "ep", "pp")
    ):
        raise StrategyError(
            f"{graph.name} is the graph of a rank of '{own}', by which its module was divided "
            f"before it was traced, found layout '{wanted}'; leave the layout out, or trace the "
            "module before it is divided"
        )
    return wanted


def agreed_strategy(graph: OpGraph, strategy: str | Strategy) -> Strategy:
    """The strategy of a graph's ranks: what is asked, or what its module was sharded by before.

    The default stands for either. Raises StrategyError where these differ in more than when
    gradients are reduced.
    """
    wanted = Strategy.parse(strategy)
    if graph.strategy is None:
        return wanted
    own = Strategy.parse(graph.strategy)
    if wanted == DDP():
        return own
    if not own.differs_in_sync(wanted):
        raise StrategyError(
            f"{graph.name} was sharded by '{own}' before it was traced, found strategy '{wanted}'; "
            "leave the strategy out, or trace the module before it is sharded"
        )
    return wanted
