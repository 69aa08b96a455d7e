"""The options that commands share, and the graph of the MODEL that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from estimator.cli.console import printing_to_stderr, progress, remark, waiting
from estimator.cli.option_types import Amount, Count
from estimator.cli.request import EXECUTIONS, Request
from estimator.errors import EstimatorError
from estimator.files import check_writable
from estimator.workload.optimizers import OPTIMIZERS
from estimator.workload.recipe import PRECISIONS, Recipe

if TYPE_CHECKING:
    from estimator.calibrate.calibrator import Calibrator
    from estimator.estimates.estimate import Estimate
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.machines.prices import PriceList
    from estimator.machines.profile import DeviceKind

# Of the canary, beyond what it varies by itself.
_LEAST_SLOWDOWN_RATIO = 1.2

Command = TypeVar("Command", bound=Callable[..., Any])


class OutFile(click.Path):
    """A file that is written at the end: refused before the work where it cannot be."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Its path; raises StoreError."""
        path: Any = super().convert(value, param, context)
        check_writable(path)
        return path


def _read_by(home: str) -> Callable[..., Any]:
    """A callback that reads an option's text with a function, imported where it is given."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        module, _, name = home.partition(":")
        try:
            return attrgetter(name)(import_module(module))(text)
        except EstimatorError:
            raise
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return read


def read_store(
    context: click.Context, option: click.Parameter, path: str | None
) -> Calibrator | None:
    """What a store of observed steps teaches; - is the user's own."""
    if path is None:
        return None
    from estimator.calibrate.calibrator import Calibrator

    if path != "-" and not Path(path).is_file():
        raise click.BadParameter(f"there is no store '{path}'; see 'estimator calibrate observe'")
    return Calibrator(None if path == "-" else path)


def _prices(context: click.Context, option: click.Parameter, path: str | None) -> PriceList:
    from estimator.machines.prices import PriceList

    return PriceList.load(path)


def _recipe(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    return None if text is None else str(Recipe.parse(text))


RESTART = "What a job's restart takes; default {}."
several_batches_option = click.option(
    "--batch",
    "batches",
    callback=_read_by("estimator.advise.scaling:read_batches"),
    help="Per device: one, or such as 1..64 or 8,12,16.",
)
cluster_option = click.option(
    "--cluster",
    callback=_read_by("estimator.placement.topology:Cluster.load"),
    metavar="FILE",
    help="Nodes and the switches between them (TOML).",
)

LOADER = "What feeds each rank, as in sample=150kB,prep=8ms,workers=4."
# What the steps run on and beside, and what is known of it.
_SURROUNDINGS = (
    cluster_option,
    click.option(
        "--network",
        callback=_read_by("estimator.machines.catalogue:GivenNetwork.parse"),
        metavar="RATE[,KIND]",
        help="What a node sends to others, as in 100Gbit/s,roce.",
    ),
    click.option(
        "--calibration",
        callback=read_store,
        metavar="STORE",
        help="Correct by the steps observed in this store; - is the user's own.",
    ),
    click.option(
        "--loader",
        callback=_read_by("estimator.workload.loader:Loader.parse"),
        metavar="PARTS",
        help=LOADER,
    ),
)


# What a step is part of, where a command asks of the model alone or trains it as it is.
OF_LAYOUTS = ("layout", "tp_plan")
OF_STEPS = (*OF_LAYOUTS, "accumulation", "global_batch", "loader", "calibration")


def refuse_given(context: click.Context, names: Iterable[str], why: str) -> None:
    """Raise UsageError for options that a command does not heed this time."""
    for name in names:
        if context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT):
            option = next(param for param in context.command.params if param.name == name)
            raise click.UsageError(f"{option.opts[-1]} {why}; leave it out")


_TRACE_OPTIONS = (
    click.option("--precision", type=click.Choice(PRECISIONS), help="Default fp32."),
    click.option(
        "--optimizer",
        callback=_read_by("estimator.workload.optimizers:check_optimizer"),
        help=f"{', '.join(OPTIMIZERS)}, or as torch.optim writes it; by default what the step "
        "or configure_optimizers() has, else adamw.",
    ),
    click.option("--seq-len", type=Count(), help="Tokens per sample, where the model asks."),
)
# How the model itself is run, beside these.
_RECIPE_OPTIONS = (
    click.option("--grad-scaler", is_flag=True, help="Scale fp16 gradients, check for inf."),
    click.option("--checkpoint", metavar="FORM", help="full, selective:op, or selective:2 blocks."),
    click.option("--clip-grad-norm", is_flag=True, help="Clip gradients by their norm."),
    click.option("--channels-last", is_flag=True, help="Images with their channels innermost."),
    *(
        click.option(name, "execution", flag_value=EXECUTIONS[name], help=words)
        for name, words in (
            ("--cuda-graphs", 'As torch.compile(mode="reduce-overhead") replays it.'),
            ("--compile", "As torch.compile fuses it."),
            ("--compile-blocks", "Each repeated block compiled by itself."),
        )
    ),
    click.option(
        "--float8",
        type=click.Choice(("tensorwise", "rowwise")),
        help="Linear layers as torchao.float8 has them.",
    ),
    click.option(
        "--recipe",
        callback=_recipe,
        metavar="FRAMEWORK[:KNOBS]",
        help="A framework's kernels, as in megatron:fp8=current,graphs=layers.",
    ),
)


def workload_options(
    command: Command, *, batch: Any = None, without: Sequence[str] = ()
) -> Command:
    """Give a command MODEL and the options that make a Request, `without` those it ignores.

    `batch` may be another option.
    """
    command, positive = click.argument("model")(command), Count()
    for option in (
        click.option("--measure", is_flag=True, help="Time this model's own operators first."),
        *_SURROUNDINGS,
        click.option(
            "--strategy",
            default="ddp",
            help="Such as ddp:bucket=5MiB,view, zero2, fsdp:shard=8 or ps:2.",
        ),
        click.option(
            "--layout",
            help="Ranks that share layers, tokens or experts: tp=2,sp,dp=* or cp=2,ep=8.",
        ),
        click.option(
            "--tp-plan",
            metavar="FILE",
            help='JSON of styles, such as {"layers.*.q_proj": "colwise"}; default found by rule.',
        ),
        *_RECIPE_OPTIONS,
        *_TRACE_OPTIONS,
        click.option("--accumulation", type=positive, help="Micro-batches per step; default 1."),
        click.option(
            "--global-batch",
            type=positive,
            help="Samples of a step, split by speed; with --batch, accumulated.",
        ),
        batch or click.option("--batch", type=positive, help="Samples per device and micro-batch."),
    ):
        command = option(command)
    listed = vars(command)["__click_params__"]
    listed[:] = [option for option in listed if option.name not in without]
    return command


on_option = click.option("--on", required=True, metavar="ALLOCATION", help="Such as 1x2:local.")
picture_option = click.option("--picture", type=OutFile(), help="Draw it, as .png or .svg.")
prices_option = click.option(
    "--prices",
    callback=_prices,
    metavar="FILE",
    help="Own prices: a CSV with Machine,AcceleratorCount,Price, or SkyPilot's.",
)


def trace_options(command: Command) -> Command:
    """Give a command the little that a trace of MODEL must know."""
    for option in _TRACE_OPTIONS:
        command = option(command)
    return command


def amount_options(command: Command) -> Command:
    """Give a command --samples and --tokens, of which one may be said."""
    command = click.option("--tokens", type=Amount(), help="How much is trained.")(command)
    return click.option("--samples", type=Amount(), help="How much is trained.")(command)


def check_amounts(samples: float | None, tokens: float | None) -> None:
    """Refuse two amounts of what is trained."""
    if samples is not None and tokens is not None:
        raise click.UsageError("give --samples or --tokens, not both")


def duration_of(answer: Estimate, samples: float | None, tokens: float | None) -> float | None:
    """Seconds that an amount takes, where one was said."""
    if samples is None and tokens is None:
        return None
    return answer.duration_s(samples=samples, tokens=tokens)


def traced(
    request: Request,
    allocations: Sequence[str],
    *,
    target: DeviceKind | None = None,
    ranks: int | None = None,
) -> OpGraph:
    """The graph of a request for the first allocation's machine, or for a kind of device."""
    if not request.measure:
        with waiting(f"tracing {request.model}"), printing_to_stderr():
            return request.graph(allocations, target=target, ranks=ranks)
    with progress("timing operators") as report, printing_to_stderr():
        return request.graph(allocations, report, target=target, ranks=ranks)


def told_slowdowns(request: Request, allocations: Sequence[str]) -> dict[str, float]:
    """How much slower this machine is than when it was probed, said where that matters.

    Not told where torch is not loaded yet: that takes longer than the answer.
    """
    if "torch" not in sys.modules:
        return {}
    from estimator.probe.devices.jobs import slowdown_ratio

    kinds = [
        kind for allocation in allocations for kind in request.mesh(allocation).placement.kinds
    ]
    own = {kind.profile.name: kind.profile for kind in kinds}
    ratios = {name: slowdown_ratio(own[name]) for name in own if name in ("local", "local-cpu")}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    for name, ratio in known.items():
        if max(ratio, 1 / ratio) > _LEAST_SLOWDOWN_RATIO:
            how = f"{ratio:.1f} × slower" if ratio > 1 else f"{1 / ratio:.1f} × faster"
            remark(
                f"this machine is now {how} than when '{name}' was probed, by a fixed matmul; end "
                "other programs, or probe it again"
            )
    return known


def counting_told_drifts(request: Request, allocations: Sequence[str]) -> tuple[Request, list[str]]:
    """The request with hosts as slow as the store shows them, and what it said of them."""
    counting, drifts = request.counting_drifts(allocations)
    for drift in drifts:
        remark(drift)
    return counting, drifts
